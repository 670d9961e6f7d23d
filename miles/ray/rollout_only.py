"""Rollouts without training: `train.py --rollout-only`."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from miles.config import Args
from miles.contracts.canonical import sha256_file
from miles.ray.placement_group import create_placement
from miles.ray.progress import progress_bar
from miles.ray.rollout.engine import EngineGroup
from miles.ray.rollout.manager import create_rollout_manager
from miles.rollout.inputs import Inputs, refuse_edited_inputs
from miles.rollout.preflight import publish_rollout_state, rollout_file
from miles.utils.tracking_utils.run_folder import record_start
from miles.utils.tracking_utils.tracking import Tracker

logger = logging.getLogger(__name__)


async def sample_rollouts(args: Args, tracker: Tracker, state: dict[str, Any] | None, inputs: Inputs) -> None:
    """Sample, score and keep `num_rollout` rollouts of the model in `hf_checkpoint`.

    Args:
        state: where the prompts stand after those that are kept already (`kept_rollout_state`); None keeps none.
        inputs: what the run reads (`run_inputs`), for the record of its start and of each save.
    """
    assert args.num_rollout is not None and args.run_dir is not None
    digests: list[str] = [] if state is None else list(state["rollouts"])
    first, folder = len(digests), Path(args.run_dir) / "rollouts"
    placement = create_placement(args, {"rollout": args.rollout_num_gpus})
    engines = EngineGroup(args, placement)
    manager = create_rollout_manager(args, engines.actors)
    await manager.start.remote()
    refuse_edited_inputs(args, inputs)
    record_start(args, entry="train", inputs=inputs)
    if state is not None:
        await manager.load_state.remote(state["prompts"])
    replacing = asyncio.ensure_future(_replace_lost(manager, engines))
    with progress_bar("rollouts", total=args.num_rollout, done=first) as advance:
        for rollout_id in range(first, args.num_rollout):
            rollout = asyncio.ensure_future(manager.generate.remote(rollout_id))
            await asyncio.wait({rollout, replacing}, return_when=asyncio.FIRST_COMPLETED)
            if replacing.done():
                replacing.result()
            metrics = (result := await rollout)["metrics"]
            # Before the state counts it: lines of rollouts that it does not count are dropped by a resume.
            tracker.log(rollout_id + 1, "rollout", metrics)
            prompts = await manager.state_dict.remote()
            digests.append(sha256_file(rollout_file(folder, rollout_id)))
            publish_rollout_state(folder, args, rollouts=digests, prompts=prompts, inputs=inputs)
            for line in result["warnings"]:
                logger.warning("rollout %d: %s", rollout_id, line)
            advance(f"reward {metrics['rollout/reward_mean']:.3f}")
    replacing.cancel()
    await manager.stop.remote()


async def _replace_lost(manager: Any, engines: EngineGroup) -> None:
    """Start lost engines again, for ever; their weights are the model folder's again, as they were."""
    while True:
        loss = await manager.next_lost_engine.remote()
        url = await engines.restart(loss.number, loss.reason)
        await manager.engine_restored.remote(loss.number, url, engines.actors[loss.number])
