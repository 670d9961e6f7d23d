"""From a column batch to one shard per data-parallel rank in Ray's object store."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from miles.config import Args
from miles.config.hf_folder import read_json_object
from miles.data.batch import select_rows
from miles.data.schedule import build_schedule, localize


@dataclass(frozen=True)
class Box:
    """Holds a reference so that Ray passes it on instead of fetching what it refers to."""

    ref: ray.ObjectRef


def split_train_data_by_dp(args: Args, rollout_batch: dict[str, Any], *, dp_size: int) -> list[Box]:
    """Pack rows into micro-batches, balance them over data-parallel ranks, put one shard per rank into the store.

    A shard holds the batch's columns for its rows, `micro_batches` (lists of row numbers within the shard, as many on
    every rank) and `global_counts` ("samples" and trainable "tokens" of the whole batch), the denominators of losses.

    Raises:
        ValueError: the rows cannot be split over `dp_size` ranks as the settings ask.
    """
    return [Box(ray.put(shard)) for shard in build_shards(args, rollout_batch, dp_size=dp_size)]


def build_shards(args: Args, batch: dict[str, Any], *, dp_size: int) -> list[dict[str, Any]]:
    """The shards themselves, by data-parallel rank."""
    lengths = [len(tokens) for tokens in batch["tokens"]]
    if args.use_dynamic_batch_size:
        assert args.max_tokens_per_gpu is not None and args.hf_checkpoint is not None
        # Context-parallel ranks share a micro-batch, each with its own budget.
        schedule = build_schedule(
            lengths,
            dp_size=dp_size,
            max_tokens=args.max_tokens_per_gpu * args.context_parallel_size,
            hidden_size=_hidden_size(args.hf_checkpoint),
        )
    else:
        schedule = build_schedule(lengths, dp_size=dp_size, micro_batch_size=args.micro_batch_size)
    counts = {"samples": len(lengths), "tokens": sum(int(sum(mask)) for mask in batch["loss_masks"])}
    shards = []
    for rank_schedule in schedule:
        rows, micro_batches = localize(rank_schedule)
        shards.append({**select_rows(batch, rows), "micro_batches": micro_batches, "global_counts": counts})
    return shards


@functools.lru_cache(maxsize=4)
def _hidden_size(hf_checkpoint: str) -> int:
    config = read_json_object(Path(hf_checkpoint) / "config.json")
    return config.get("text_config", config)["hidden_size"]
