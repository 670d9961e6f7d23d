"""From a column batch to one shard per data-parallel rank, through Ray's object store."""

import functools
from dataclasses import dataclass
from typing import Any

import ray

from miles.algorithms.aggregation import TRAJECTORY_COLUMNS, sequence_counts
from miles.algorithms.corrections import mean_weight
from miles.backends.megatron.policy import correction_of
from miles.config import Args
from miles.config.hf_folder import read_model_config
from miles.data.batch import ragged, select_rows
from miles.data.schedule import build_schedule, localize

_MAX_OBJECTS = 32
"""Most objects that a batch lies in. To put one takes a millisecond, so one per rank keeps the driver busy for seconds
at 1,024 ranks; with a single one every node fetches the whole batch. Ranks of a node read their rows in one copy."""


@dataclass(frozen=True)
class Shard:
    """What a data-parallel rank trains on: rows of columns in Ray's object store, and how they belong together."""

    columns: ray.ObjectRef
    rows: slice
    extras: dict[str, Any]

    def load(self) -> dict[str, Any]:
        """The columns' own rows, read where they lie, with the extras."""
        return {name: column[self.rows] for name, column in ray.get(self.columns).items()} | self.extras


def split_train_data_by_dp(args: Args, rollout_batch: dict[str, Any], *, dp_size: int) -> list[Shard]:
    """Pack rows into micro-batches, balance them over data-parallel ranks, put columns into the store; by rank.

    A loaded shard holds the batch's columns for its rows, `sequence_tokens` (trainable tokens of the sequence that a
    row belongs to), `micro_batches` (lists of row numbers within the shard, as many on every rank) and `global_counts`
    ("samples", "sequences" and trainable "tokens" of the whole batch), the denominators of losses.

    Raises:
        ValueError: the rows cannot be split over `dp_size` ranks as the settings ask.
    """
    batch, ranks, counts = _deal(args, rollout_batch, dp_size=dp_size)
    shards: list[Shard] = []
    together = -(-dp_size // _MAX_OBJECTS)
    for first in range(0, dp_size, together):
        group = ranks[first : first + together]
        columns = ray.put(ragged(select_rows(batch, [row for rows, _ in group for row in rows])))
        end = 0
        for rows, micro_batches in group:
            start, end = end, end + len(rows)
            extras = {"micro_batches": micro_batches, "global_counts": counts}
            shards.append(Shard(columns, slice(start, end), extras))
    return shards


def build_shards(args: Args, batch: dict[str, Any], *, dp_size: int) -> list[dict[str, Any]]:
    """The shards themselves, by data-parallel rank."""
    batch, ranks, counts = _deal(args, batch, dp_size=dp_size)
    return [
        {**select_rows(batch, rows), "micro_batches": micro_batches, "global_counts": counts}
        for rows, micro_batches in ranks
    ]


def _deal(
    args: Args, batch: dict[str, Any], *, dp_size: int
) -> tuple[dict[str, Any], list[tuple[list[int], list[list[int]]]], dict[str, Any]]:
    """The batch with `sequence_tokens`; each rank's rows and micro-batches; `global_counts`."""
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
    trajectory_ids = next((batch[name] for name in TRAJECTORY_COLUMNS if name in batch), None)
    sequence_tokens, num_sequences, num_tokens = sequence_counts(batch["loss_masks"], trajectory_ids=trajectory_ids)
    counts: dict[str, Any] = {"samples": len(lengths), "sequences": num_sequences, "tokens": num_tokens}
    correction = correction_of(args) if "advantages" in batch else None
    if correction is not None and correction.batch_normalize:
        counts["correction_weight_mean"] = mean_weight(
            correction,
            old_log_probs=batch["old_log_probs"],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
        )
    return {**batch, "sequence_tokens": sequence_tokens}, [localize(rank) for rank in schedule], counts


@functools.lru_cache(maxsize=4)
def _hidden_size(hf_checkpoint: str) -> int:
    return read_model_config(hf_checkpoint)["hidden_size"]
