"""From a column batch to one shard per data-parallel rank in Ray's object store."""

import functools
from dataclasses import dataclass
from typing import Any

import ray

from miles.algorithms.aggregation import sequence_counts
from miles.algorithms.corrections import mean_weight
from miles.backends.megatron.policy import correction_of
from miles.config import Args
from miles.config.hf_folder import read_model_config
from miles.data.batch import select_rows
from miles.data.schedule import build_schedule, localize

# Rows with one id are one sequence: segments of a compacted trajectory.
TRAJECTORY_COLUMN = "compaction_trajectory_ids"


@dataclass(frozen=True)
class Box:
    """Holds a reference so that Ray passes it on instead of fetching what it refers to."""

    ref: ray.ObjectRef


def split_train_data_by_dp(args: Args, rollout_batch: dict[str, Any], *, dp_size: int) -> list[Box]:
    """Pack rows into micro-batches, balance them over data-parallel ranks, put one shard per rank into the store.

    A shard holds the batch's columns for its rows, `sequence_tokens` (trainable tokens of the sequence that a row
    belongs to), `micro_batches` (lists of row numbers within the shard, as many on every rank) and `global_counts`
    ("samples", "sequences" and trainable "tokens" of the whole batch), the denominators of losses.

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
    sequence_tokens, num_sequences, num_tokens = sequence_counts(batch["loss_masks"], batch.get(TRAJECTORY_COLUMN))
    counts: dict[str, Any] = {"samples": len(lengths), "sequences": num_sequences, "tokens": num_tokens}
    correction = correction_of(args) if "advantages" in batch else None
    if correction is not None and correction.batch_normalize:
        counts["correction_weight_mean"] = mean_weight(
            correction,
            old_log_probs=batch["old_log_probs"],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
        )
    batch = {**batch, "sequence_tokens": sequence_tokens}
    shards = []
    for rank_schedule in schedule:
        rows, micro_batches = localize(rank_schedule)
        shards.append({**select_rows(batch, rows), "micro_batches": micro_batches, "global_counts": counts})
    return shards


@functools.lru_cache(maxsize=4)
def _hidden_size(hf_checkpoint: str) -> int:
    return read_model_config(hf_checkpoint)["hidden_size"]
