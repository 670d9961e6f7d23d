"""Stage 2b: supervised training of the actor, through the Megatron backend, until it answers some but not all.

How often a policy answers right when it is sampled at temperature 1 needs no sampling where the answer is one string:
it is the probability of that string, exp(sum of its tokens' log-probabilities). Its mean over the held-out problems is
what `--target-accuracy` is compared with.
"""

import itertools
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config import Args
from miles.config.files import read_settings
from miles.utils.logging_utils import configure_logger
from miles.utils.strict_parser import StrictParser
from miles.utils.tracking_utils.run_folder import create_run_folder, record_start

if TYPE_CHECKING:
    from miles.data.prompts import PromptSource


def answers_batch(problems: "PromptSource", tokenizer: Any) -> dict[str, list]:
    """One row per problem: its prompt and its right answer, closed by the end-of-sequence token."""
    rows = [problems[number] for number in range(len(problems))]
    answers = [[*tokenizer.encode(row.label, add_special_tokens=False), tokenizer.eos_token_id] for row in rows]
    return {
        "tokens": [[*row.tokens, *answer] for row, answer in zip(rows, answers, strict=True)],
        "response_lengths": [len(answer) for answer in answers],
        "loss_masks": [[1] * len(answer) for answer in answers],
        "sample_indices": list(range(len(rows))),
    }


async def warm_start(args: Args, *, out: Path, target_accuracy: float, max_steps: int, eval_interval: int) -> None:
    """Train until the held-out accuracy reaches the target; write the model to `out`.

    Raises:
        ValueError: the target is not reached within `max_steps`.
    """
    import numpy as np
    from transformers import AutoTokenizer

    from miles.data.batch import select_rows
    from miles.data.prompts import PromptSource
    from miles.ray.actor_group import RayTrainGroup
    from miles.ray.placement_group import create_placement
    from miles.ray.progress import progress_bar
    from miles.ray.rollout.train_data_conversion import split_train_data_by_dp
    from miles.utils.tracking_utils.tracking import init_tracking

    assert args.prompt_data is not None and args.eval_prompt_data and args.global_batch_size is not None
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    train = answers_batch(PromptSource(args.prompt_data, tokenizer=tokenizer), tokenizer)
    heldout = answers_batch(PromptSource(args.eval_sets()[0].path, tokenizer=tokenizer), tokenizer)
    group = RayTrainGroup(args, role="sft", placement=create_placement(args, {"actor": args.world_size("actor")}))
    await group.init()
    whole = len(heldout["tokens"]) // (group.dp_size * args.micro_batch_size) * group.dp_size * args.micro_batch_size
    if whole == 0:
        raise ValueError(
            f"{args.eval_sets()[0].path}: {len(heldout['tokens'])} problems do not fill one micro-batch per rank"
        )
    heldout_shards = split_train_data_by_dp(args, select_rows(heldout, range(whole)), dp_size=group.dp_size)
    tracker = init_tracking(args)
    order: list[int] = []
    epochs = itertools.count()
    accuracy = 0.0
    with progress_bar("warm start", total=max_steps) as advance:
        for step in range(1, max_steps + 1):
            while len(order) < args.global_batch_size:
                epoch = list(range(len(train["tokens"])))
                random.Random(args.seed + next(epochs)).shuffle(epoch)
                order += epoch
            rows, order = order[: args.global_batch_size], order[args.global_batch_size :]
            shards = split_train_data_by_dp(args, select_rows(train, rows), dp_size=group.dp_size)
            metrics = await group.train_sft(step, shards)
            figures = {"sft/loss": metrics["sft_loss"], "sft/grad_norm": metrics["grad_norm"], "sft/lr": metrics["lr"]}
            if step % eval_interval == 0 or step == max_steps:
                log_probs = await group.compute_log_probs(heldout_shards)
                accuracy = float(np.mean([math.exp(float(answer.sum())) for answer in log_probs.values()]))
                figures["sft/heldout_accuracy"] = accuracy
            tracker.log(step, "sft", figures)
            advance(f"held-out accuracy {accuracy:.1%}")
            if accuracy >= target_accuracy:
                break
    if accuracy < target_accuracy:
        raise ValueError(f"held-out accuracy is {accuracy:.1%} after {max_steps} steps, {target_accuracy:.1%} wanted")
    await group.export_hf(str(out))
    print(f"{out}: held-out accuracy {accuracy:.1%} at temperature 1")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of miles settings")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--target-accuracy", type=float, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--eval-interval", type=int, default=20)
    options = parser.parse_args()
    try:
        args = read_settings(options.config)
        configure_logger(args, source="warm_start")
        create_run_folder(args, entry="train")
        record_start(args, entry="train")
    except ValueError as mistake:
        parser.error(str(mistake))
    # Ray takes seconds, which a mistake or --help need not wait for.
    from miles.ray.program import run_program

    work = warm_start(
        args,
        out=options.out,
        target_accuracy=options.target_accuracy,
        max_steps=options.max_steps,
        eval_interval=options.eval_interval,
    )
    run_program("warm_start.py", work)


if __name__ == "__main__":
    main()
