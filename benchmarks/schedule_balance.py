"""How even the FLOPs of data-parallel ranks are, and what the schedule costs the driver.

    python benchmarks/schedule_balance.py [--samples 4096 8192 16384] [--ranks 64 128 1024]

Draws lengths of whole samples (prompt and response) from distributions as reasoning, chat and agent workloads show
them, and prints for each: the heaviest rank over the mean, the least that any schedule could reach (a row cannot be
split, so its cost is a bound), rows and micro-batches per rank, and the seconds of `build_schedule` and of `localize`
for all ranks. Then, with whole columns of a policy batch, the seconds of `build_shards`: all that the driver does
between a batch and what it puts into the object store.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from miles.config import Args
from miles.data.schedule import build_schedule, localize, row_costs
from miles.ray.rollout.train_data_conversion import build_shards

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(median: float, sigma: float, longest: int) -> Lengths:
    return lambda draw, count: np.clip(draw.lognormal(np.log(median), sigma, count), 64, longest)


WORKLOADS: dict[str, tuple[int, Lengths]] = {
    "uniform 256-4,096": (4096, lambda draw, count: draw.integers(256, 4097, count)),
    "reasoning, median 3,000, cut at 8,192": (8192, lognormal(3000, 0.8, 8192)),
    "short answers, median 800, cut at 4,096": (4096, lognormal(800, 0.6, 4096)),
    "chat 100-600 and reasoning 3,000-6,000": (
        6000,
        lambda draw, count: np.where(
            draw.random(count) < 0.5, draw.integers(100, 600, count), draw.integers(3000, 6001, count)
        ),
    ),
    "agents, Pareto tail, cut at 32,768": (
        32768,
        lambda draw, count: np.clip((draw.pareto(1.5, count) + 1) * 500, 64, 32768),
    ),
}


def seconds_of_shards(samples: int, ranks: int, *, hidden_size: int) -> float:
    """Seconds of `build_shards` for a policy batch of the "reasoning" workload, four fifths of it responses."""
    longest, lengths_of = WORKLOADS["reasoning, median 3,000, cut at 8,192"]
    lengths = lengths_of(np.random.default_rng(0), samples).astype(int)
    responses = np.maximum(lengths * 4 // 5, 1).tolist()
    batch = {
        "tokens": [list(range(length)) for length in lengths.tolist()],
        "response_lengths": responses,
        "loss_masks": [[1] * length for length in responses],
        "sample_indices": list(range(samples)),
    }
    for name in ("advantages", "old_log_probs", "rollout_log_probs"):
        batch[name] = [np.zeros(length, dtype=np.float32) for length in responses]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"hidden_size": hidden_size}))
        args = Args.build(hf_checkpoint=folder, use_dynamic_batch_size=True, max_tokens_per_gpu=2 * longest)
        started = time.perf_counter()
        build_shards(args, batch, dp_size=ranks)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 1024], help="data-parallel ranks")
    parser.add_argument("--hidden-size", type=int, default=4096)
    args = parser.parse_args()
    print(
        f"{'lengths':40}{'samples':>8}{'ranks':>6}{'heaviest/mean':>15}{'least':>8}{'rows':>9}{'mb':>5}{'seconds':>9}"
    )
    for name, (longest, lengths_of) in WORKLOADS.items():
        for samples in args.samples:
            lengths = lengths_of(np.random.default_rng(0), samples).astype(int).tolist()
            costs = row_costs(lengths, hidden_size=args.hidden_size)
            for ranks in args.ranks:
                started = time.perf_counter()
                schedule = build_schedule(lengths, dp_size=ranks, max_tokens=2 * longest, hidden_size=args.hidden_size)
                shards = [localize(rank) for rank in schedule]
                seconds = time.perf_counter() - started
                loads = np.array([costs[rows].sum() for rows, _ in shards])
                counts = [len(rows) for rows, _ in shards]
                least = max(loads.mean(), costs.max()) / loads.mean()
                print(
                    f"{name:40}{samples:8}{ranks:6}{loads.max() / loads.mean():15.4f}{least:8.3f}"
                    f"{min(counts):5}-{max(counts):<3}{len(schedule[0]):5}{seconds:9.3f}"
                )
    for samples in args.samples:
        for ranks in args.ranks:
            seconds = seconds_of_shards(samples, ranks, hidden_size=args.hidden_size)
            print(f"build_shards of {samples} samples for {ranks} ranks: {seconds:.3f} s")


if __name__ == "__main__":
    main()
