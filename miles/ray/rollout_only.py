"""Rollouts without training: `train.py --rollout-only`."""

import asyncio
import logging
from typing import Any

from miles.config import Args
from miles.ray.placement_group import create_placement
from miles.ray.progress import progress_bar
from miles.ray.rollout.engine import EngineGroup
from miles.ray.rollout.manager import create_rollout_manager
from miles.utils.tracking_utils.tracking import Tracker

logger = logging.getLogger(__name__)


async def sample_rollouts(args: Args, tracker: Tracker) -> None:
    """Sample, score and keep `num_rollout` rollouts of the model in `hf_checkpoint`."""
    assert args.num_rollout is not None
    placement = create_placement(args, {"rollout": args.rollout_num_gpus})
    engines = EngineGroup(args, placement)
    manager = create_rollout_manager(args, engines.actors)
    await manager.start.remote()
    replacing = asyncio.ensure_future(_replace_lost(manager, engines))
    with progress_bar("rollouts", total=args.num_rollout) as advance:
        for rollout_id in range(args.num_rollout):
            rollout = asyncio.ensure_future(manager.generate.remote(rollout_id))
            await asyncio.wait({rollout, replacing}, return_when=asyncio.FIRST_COMPLETED)
            if replacing.done():
                replacing.result()
            metrics = (result := await rollout)["metrics"]
            for line in result["warnings"]:
                logger.warning("rollout %d: %s", rollout_id, line)
            tracker.log(rollout_id + 1, "rollout", metrics)
            advance(f"reward {metrics['rollout/reward_mean']:.3f}")
    replacing.cancel()
    await manager.stop.remote()


async def _replace_lost(manager: Any, engines: EngineGroup) -> None:
    """Start lost engines again, for ever; their weights are the model folder's again, as they were."""
    while True:
        loss = await manager.next_lost_engine.remote()
        url = await engines.restart(loss.number, loss.reason)
        await manager.engine_restored.remote(loss.number, url, engines.actors[loss.number])
