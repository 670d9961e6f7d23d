"""Stage 1: arithmetic problems from reasoning-gym, split by problem into train and held-out.

Each row: {"prompt", "label" (the right answer), "metadata" (what reasoning-gym's scorer needs)}.
"""

import json
import random
from pathlib import Path
from typing import Any

import reasoning_gym

from miles.contracts.publish import publish_bytes
from miles.utils.strict_parser import StrictParser


def make_problems(*, dataset: str, config: dict[str, Any], seed: int, count: int) -> list[dict]:
    """`count` problems of one kind with different questions, in an order that `seed` decides.

    Raises:
        ValueError: the generator does not have that many different problems.
    """
    generator = reasoning_gym.create_dataset(dataset, size=8 * count, seed=seed, **config)
    rows: dict[str, dict] = {}
    for entry in generator:
        rows.setdefault(
            entry["question"],
            {
                "prompt": entry["question"],
                "label": entry["answer"],
                "metadata": {"dataset": dataset, "entry": entry},
            },
        )
    if len(rows) < count:
        raise ValueError(f"{dataset} gave {len(rows)} different problems, {count} are wanted")
    problems = list(rows.values())
    random.Random(seed).shuffle(problems)
    return problems[:count]


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and heldout.jsonl")
    parser.add_argument(
        "--kinds",
        type=json.loads,
        required=True,
        help='JSON list of {"dataset", "config", "share"}; shares add up to 1',
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-train", type=int, required=True)
    parser.add_argument("--num-heldout", type=int, required=True)
    options = parser.parse_args()
    total = options.num_train + options.num_heldout
    problems = [
        problem
        for kind in options.kinds
        for problem in make_problems(
            dataset=kind["dataset"], config=kind["config"], seed=options.seed, count=round(total * kind["share"])
        )
    ]
    if len(problems) != total or len({problem["prompt"] for problem in problems}) != total:
        raise SystemExit(f"make_problems.py: --kinds gave {len(problems)} problems (some twice?), {total} are wanted")
    random.Random(options.seed).shuffle(problems)
    options.out.mkdir(parents=True, exist_ok=True)
    splits = {"train": problems[: options.num_train], "heldout": problems[options.num_train :]}
    for name, rows in splits.items():
        path = options.out / f"{name}.jsonl"
        publish_bytes(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        print(f"{path}: {len(rows)} problems, such as {rows[0]['prompt']!r} -> {rows[0]['label']!r}")


if __name__ == "__main__":
    main()
