"""What one step of everything must show: `train.py --canary-one-step`."""

from miles.config import Args
from miles.contracts.chain import first_broken, verify_chain
from miles.ray.online import OnlineTrainer


async def check_canary(args: Args, trainer: OnlineTrainer) -> None:
    """The engine serves the updated policy, the chain holds, a resume answers the same.

    Raises:
        RuntimeError: one of them does not hold.
    """
    assert args.run_dir is not None
    if args.load_rollouts is None:
        difference = await trainer.engine_log_prob_difference(1)
        print(f"canary: engine and actor after the update: largest log-prob difference {difference:.2e}")
        if not difference < (5e-2 if args.bf16 else 1e-4):
            raise RuntimeError(f"the engine does not serve the updated policy: log-probs differ by {difference:.3g}")
    links = verify_chain(args.run_dir)
    if (broken := first_broken(links)) is not None:
        raise RuntimeError(f"broken link {broken.name}: {broken.path}: {broken.detail}")
    print(f"canary: chain verified, {len(links)} links hold")
    log_probs, values = await trainer.compare_with_saved(0 if args.load_rollouts is not None else 2)
    print(f"canary: resumed from the save: log-probs differ by {log_probs:.2e}, values by {values:.2e}")
    if max(log_probs, values) > (1e-2 if args.bf16 else 1e-5):
        raise RuntimeError("a resume from the save does not answer as the saved run did")
