"""Online RL: actor and critic groups, rollout engines, PPO. One process drives; Ray runs the rest."""

from miles.utils.audit_utils.interrupts import end_in_one_line

if __name__ == "__main__":
    end_in_one_line("train.py")

import logging
from pathlib import Path
from typing import Any

from miles.config import Args
from miles.ray.origins import consumed_critic, settle
from miles.ray.train_state import resume_state
from miles.rollout.inputs import Inputs, refuse_changed_inputs, refuse_edited_inputs, run_inputs
from miles.rollout.preflight import check_rollout_inputs, kept_rollout_state, set_aside_earlier_work
from miles.utils.arguments import parse_args
from miles.utils.logging_utils import configure_logger
from miles.utils.tracking_utils.run_folder import (
    claim_run_folder,
    create_run_folder,
    record_start,
    update_run_json,
)
from miles.utils.tracking_utils.tracking import METRICS_FILE, has_line, init_tracking

logger = logging.getLogger("train")


async def main(
    args: Args, state: dict[str, Any] | None, inputs: Inputs, consumed: dict[str, Any] | None = None
) -> None:
    """All rollouts from `state` (None: from the start) to the last.

    Args:
        inputs: as `run_inputs` has them.
        consumed: the contract that a fresh run's critic comes with, as `consumed_critic` has it.
    """
    from miles.ray.actor_group import TrainingRankLost
    from miles.ray.canary import check_canary
    from miles.ray.online import OnlineTrainer
    from miles.ray.rollout_only import sample_rollouts

    assert args.rollouts_to_run is not None and args.run_dir is not None
    first = 0 if state is None else state["rollout_id"] + 1
    if first >= args.rollouts_to_run and not owes_evaluation(args, first):
        which = "--canary-one-step" if args.canary_one_step else f"--num-rollout {args.num_rollout}"
        raise ValueError(f"{which}: the run folder already holds {first} rollouts")
    if state is None:
        set_aside_earlier_work(args)
    tracker = init_tracking(args, resume_step=first + 1 if first else 0)
    if args.rollout_only:
        await sample_rollouts(args, tracker, state, inputs)
        print(f"rollouts: {args.num_rollout}, kept in {args.run_dir}/rollouts")
        return
    async with OnlineTrainer(args, tracker, state, inputs) as trainer:
        record_start(args, entry="train", inputs=inputs)
        refuse_edited_inputs(args, inputs)
        if state is None:
            # A resumed run's stands there; the critic's folder may have moved on since.
            update_run_json(args.run_dir, value_pretraining=consumed)
        while True:
            try:
                await run(args, trainer, first)
                break
            except TrainingRankLost as lost:
                first = await trainer.recover(lost)
        if args.canary_one_step:
            await check_canary(args, trainer)
    print(f"online RL: {args.rollouts_to_run} rollouts, run folder {args.run_dir}")


def evaluation_is_due(args: Args, done: int) -> bool:
    """Whether the policy is evaluated after so many rollouts."""
    at_an_end = done in (0, args.rollouts_to_run)
    return bool(args.eval_sets()) and (at_an_end or bool(args.eval_interval and done % args.eval_interval == 0))


def owes_evaluation(args: Args, done: int) -> bool:
    """Whether that evaluation is missing: the run has just begun, or ended between a save and what follows it."""
    if args.rollout_only or not evaluation_is_due(args, done):
        return False
    assert args.run_dir is not None
    return not has_line(Path(args.run_dir) / METRICS_FILE, step=done, stage="eval")


async def run(args: Args, trainer: Any, first: int) -> None:
    """The rollouts from number `first` on, with evaluation and saves in between."""
    from miles.ray.progress import progress_bar

    assert args.rollouts_to_run is not None
    evaluated = args.eval_sets()
    accuracy = evaluated[0].metric("accuracy") if evaluated else ""
    if owes_evaluation(args, first):
        when = f"after step {first}" if first else "before training"
        logger.info("held-out accuracy %s: %.1f %%", when, 100 * (await trainer.evaluate(first))[accuracy])
    with progress_bar("online RL", total=args.rollouts_to_run, done=first) as advance:
        for rollout_id in range(first, args.rollouts_to_run):
            figures = await trainer.step(rollout_id)
            done = rollout_id + 1
            # First, so that an evaluation which fails takes no work with it.
            if done == args.rollouts_to_run or (args.save_interval and done % args.save_interval == 0):
                await trainer.save(rollout_id)
            if evaluation_is_due(args, done):
                figures |= await trainer.evaluate(done)
            shown = [f"reward {figures['rollout/reward_mean']:.3f}"]
            if accuracy in figures:
                shown.append(f"held-out accuracy {figures[accuracy]:.1%}")
            advance(", ".join(shown))


if __name__ == "__main__":
    settings = parse_args(entry="train")
    configure_logger(settings, source="train")
    try:
        claim_run_folder(settings, entry="train")
        resumed = kept_rollout_state(settings) if settings.rollout_only else resume_state(settings)
        settings = settle(settings, None if settings.rollout_only else resumed)
        check_rollout_inputs(settings)
        inputs = run_inputs(settings)
        if resumed is not None:
            refuse_changed_inputs(settings, resumed["inputs"], inputs)
        # Importing Ray takes a second: after the cheaper refusals.
        from miles.ray.cluster import check_before_ray_starts
        from miles.ray.program import run_program

        check_before_ray_starts(settings, entry="train")
        create_run_folder(settings, entry="train")
        consumed = consumed_critic(settings)
    except (ValueError, OSError) as mistake:
        raise SystemExit(f"train.py: {mistake}") from None
    run_program("train.py", main(settings, resumed, inputs, consumed))
