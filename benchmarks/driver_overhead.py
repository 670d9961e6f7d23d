"""Seconds that the driver adds to an online step, with many training ranks that take no time at all.

    python benchmarks/driver_overhead.py [--ranks 1024] [--samples 4096] [--length 512 2048] [--steps 3]

The real `OnlineTrainer.step` runs a PPO step over `ranks` actor ranks and as many critic ranks: values, advantages,
schedules, shards into a real Ray object store, results merged, figures logged. The ranks are simulated: each reads its
rows from the store and answers at once, with prepared numbers. The seconds that this takes are left out, for ranks do
it side by side, and so is the way of calls and answers through Ray. Before that comes what the rollout manager does
with finished samples: the column batch, and its way through the object store to the driver.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from miles.config import Args
from miles.data.batch import samples_to_batch
from miles.data.sample import Sample, SampleStatus
from miles.ray.actor_group import RayTrainGroup
from miles.ray.online import OnlineTrainer
from miles.ray.rollout.train_data_conversion import Shard
from miles.utils.tracking_utils.tracking import init_tracking


class Simulated:
    """Something with a method `name.remote(...)` that answers at once; counts the seconds it needs for that."""

    seconds = 0.0

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def remote(self, *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        started = time.perf_counter()
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._answer(*arguments, **named))
        Simulated.seconds += time.perf_counter() - started
        return future


class SimulatedRank:
    """A data-parallel rank of its own: one shard, whose rows it reads to answer for them."""

    def __init__(self) -> None:
        self.call_on_shard = Simulated(self._call_on_shard)

    def _call_on_shard(self, method: str, shard: Shard, *arguments: Any) -> Any:
        columns = shard.load()
        if method in ("compute_values", "compute_log_probs"):
            lengths = zip(columns["sample_indices"], columns["response_lengths"], strict=True)
            return {index: np.zeros(length, dtype=np.float32) for index, length in lengths}
        figures = {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "tokens": 1.0}
        if method == "train_value":
            sums = dict.fromkeys(("count", "return_sum", "return_sq_sum", "residual_sum", "residual_sq_sum"), 1.0)
            return {**figures, "value_loss": 0.0, **{f"_ev_{name}": value for name, value in sums.items()}}
        return {**figures, "ratio_max": 1.0, "clip_fraction": 0.0, "log_prob_difference": 0.0}


def simulated_group(args: Args, role: str, ranks: int) -> RayTrainGroup:
    group = RayTrainGroup.__new__(RayTrainGroup)
    group.role = role  # pyright: ignore[reportAttributeAccessIssue]
    group.args, group.world_size, group.dp_size = args, ranks, ranks
    group._ranks = [SimulatedRank() for _ in range(ranks)]
    group._dp_ranks = group._output_ranks = list(range(ranks))
    return group


def make_samples(count: int, length: int) -> list[Sample]:
    """Finished samples of `length` tokens on average, a quarter of it prompt, in groups of 8."""
    draw = np.random.default_rng(0)
    samples = []
    for index in range(count):
        response = int(draw.integers(length // 4, length + length // 4))
        tokens = draw.integers(0, 150_000, length // 4 + response).tolist()
        samples.append(
            Sample(
                index=index,
                group_index=index // 8,
                rollout_id=0,
                prompt="",
                tokens=tokens,
                response_length=response,
                reward=float(index % 2),
                loss_mask=[1] * response,
                rollout_log_probs=draw.normal(-1, 0.1, response).tolist(),
                status=SampleStatus.COMPLETED,
            )
        )
    return samples


async def measure(args: Args, samples: list[Sample], ranks: int, steps: int) -> dict[str, float]:
    """Median seconds of each part of a step."""
    trainer = OnlineTrainer(args, init_tracking(args), None, {})
    trainer._actor = simulated_group(args, "actor", ranks)
    trainer._critic = simulated_group(args, "critic", ranks)
    trainer._sync = None
    rows: list[dict[str, float]] = []
    for step in range(steps):
        started = time.perf_counter()
        made = samples_to_batch(samples)
        converted = time.perf_counter()
        batch = ray.get(ray.put(made))
        carried = time.perf_counter()

        class Manager:
            generate = Simulated(
                lambda rollout_id, *, keep, batch=batch: {"batch": batch, "metrics": {}, "warnings": []}
            )

        trainer._manager = Manager
        Simulated.seconds = 0.0
        before = time.perf_counter()
        await trainer.step(step)
        whole = time.perf_counter() - before - Simulated.seconds
        rows.append(
            {"samples to columns": converted - started, "to the driver": carried - converted, "the step": whole}
        )
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="data-parallel ranks of each group")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--length", type=int, nargs="+", default=[512, 2048], help="mean tokens of a sample")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=1, object_store_memory=4 << 30, include_dashboard=False, log_to_driver=False)
    for length in options.length:
        samples = make_samples(options.samples, length)
        # In a run these millions of numbers lie in the rollout manager's process: no collection here walks over them.
        gc.freeze()
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").write_text('{"hidden_size": 4096}')
            args = Args.build(
                hf_checkpoint=scratch,
                run_dir=f"{scratch}/run",
                num_rollout=options.steps,
                rollout_batch_size=options.samples // 8,
                n_samples_per_prompt=8,
                num_steps_per_rollout=1,
                use_dynamic_batch_size=True,
                max_tokens_per_gpu=4 * length,
                tensorboard=False,
            )
            found = asyncio.run(measure(args, samples, options.ranks, options.steps))
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found.items())
        print(
            f"{options.ranks} ranks, {options.samples} samples of {length} tokens: {sum(found.values()):.3f} s a step "
            f"({parts})",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
