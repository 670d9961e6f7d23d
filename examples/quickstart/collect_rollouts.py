"""Stage 3: responses of the warm-started actor, sampled by a real SGLang server and scored; no training.

Each rollout becomes `rollouts/rollout_NNNNNN.jsonl` in the run folder, one sample a line.
"""

from pathlib import Path

from miles.config import Args
from miles.config.files import read_settings
from miles.utils.logging_utils import configure_logger
from miles.utils.strict_parser import StrictParser
from miles.utils.tracking_utils.run_folder import create_run_folder


async def collect(args: Args) -> None:
    from miles.ray.placement_group import create_placement
    from miles.ray.progress import progress_bar
    from miles.ray.rollout.engine import create_engines
    from miles.ray.rollout.manager import create_rollout_manager
    from miles.utils.tracking_utils.tracking import init_tracking

    assert args.num_rollout is not None
    tracker = init_tracking(args)
    placement = create_placement(args, {"rollout": args.rollout_num_gpus})
    manager = create_rollout_manager(args, create_engines(args, placement))
    await manager.start.remote()
    with progress_bar("rollouts", total=args.num_rollout) as advance:
        for rollout_id in range(args.num_rollout):
            metrics = (await manager.generate.remote(rollout_id))["metrics"]
            tracker.log(rollout_id, "rollout", metrics)
            advance(f"reward {metrics['rollout/reward_mean']:.3f}")
    await manager.stop.remote()
    print(f"{args.run_dir}/rollouts: {args.num_rollout} rollouts of {metrics['rollout/count']} samples")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of miles settings")
    options = parser.parse_args()
    try:
        args = read_settings(options.config)
        configure_logger(args, source="collect_rollouts")
        create_run_folder(args, entry="train")
    except ValueError as mistake:
        parser.error(str(mistake))
    # Ray takes seconds, which a mistake or --help need not wait for.
    from miles.ray.program import run_program

    run_program("collect_rollouts.py", collect(args))


if __name__ == "__main__":
    main()
