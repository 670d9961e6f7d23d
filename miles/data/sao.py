"""What a batch must be before SAO trains on it, and the columns of compacted trajectories.

(arXiv 2607.07508, 2607.05378)
With compaction a trajectory comes in segments, rows of their own: execution, summary, execution, ..., execution. All
share one reward and count their trainable tokens together.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from miles.data.sample import Sample, SampleStatus

SEGMENT_KEY = "compaction_trajectory_id"
"""What a sample has in its metadata if it is a segment."""
COMPACTION_COLUMNS = (
    "compaction_trajectory_ids",
    "compaction_segment_indices",
    "compaction_segment_types",
    "compaction_subsequent_active_tokens",
    "compaction_trajectory_active_tokens",
)
_REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs")
_SCHEMA_VERSION = 1


def compaction_columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The compaction columns of samples whose metadata tells of segments; none where no sample's does.

    Of a FAILED segment no token counts, for none is trained on.

    Raises:
        ValueError: some samples are segments and some are not, or a segment's metadata misses a key.
    """
    if not any(SEGMENT_KEY in sample.metadata for sample in samples):
        return {}
    for sample in samples:
        keys = (SEGMENT_KEY, "compaction_segment_index", "compaction_segment_type")
        if missing := [key for key in keys if key not in sample.metadata]:
            raise ValueError(
                f"sample {sample.index}: its batch has compacted segments, it misses {', '.join(missing)}"
            )
        version = sample.metadata.get("compaction_schema_version", _SCHEMA_VERSION)
        if version != _SCHEMA_VERSION:
            raise ValueError(f"sample {sample.index}: compaction_schema_version {version}, expected {_SCHEMA_VERSION}")
    ids = [sample.metadata[SEGMENT_KEY] for sample in samples]
    indices = [int(sample.metadata["compaction_segment_index"]) for sample in samples]
    masks = [[] if sample.status is SampleStatus.FAILED else sample.loss_mask for sample in samples]
    subsequent, totals = compaction_token_counts(trajectory_ids=ids, segment_indices=indices, loss_masks=masks)
    types = [sample.metadata["compaction_segment_type"] for sample in samples]
    return dict(zip(COMPACTION_COLUMNS, (ids, indices, types, subsequent, totals), strict=True))


def refuse_segments(batch: Mapping[str, Any], *, compaction: bool, where: str) -> None:
    """Raise ValueError, naming `where`, if there are segments of trajectories and training takes none.

    Their columns alone would change what estimators and denominators do.
    """
    if COMPACTION_COLUMNS[0] in batch and not compaction:
        raise ValueError(f"{where}: holds segments of compacted trajectories, which need --sao-compaction")


def failed_rows(batch: Mapping[str, Any]) -> Sequence[bool]:
    """Which rows are of samples that got no reward: the column "failed", which a batch without any has not."""
    return batch.get("failed", [False] * len(batch["loss_masks"]))


def validate_sao_train_data(
    batch: Mapping[str, Any], *, compaction: bool, calculate_per_token_loss: bool = True
) -> dict[str, int]:
    """Check a rollout's columns before the first update.

    Every row has an active token, but for those that the column "failed" names, where there is one.

    Returns:
        {"samples", "response_tokens", "active_action_tokens"}.

    Raises:
        ValueError: naming the column, the row and what was expected.
    """
    required = _REQUIRED + (COMPACTION_COLUMNS if compaction else ())
    if missing := sorted(set(required) - set(batch)):
        raise ValueError(f"missing required fields: {', '.join(missing)}")
    if compaction and not calculate_per_token_loss:
        raise ValueError("compaction needs one token normaliser over the batch: --loss-agg-mode token-mean")
    count = len(batch["tokens"])
    if count < 1:
        raise ValueError("SAO needs at least one sample")
    for name in required:
        if len(batch[name]) != count:
            raise ValueError(f"{name} has {len(batch[name])} rows, tokens has {count}")
    active = [_check_row(batch, row) for row in range(count)]
    if sum(active) < 1:
        raise ValueError("SAO needs at least one active action token: every loss mask is zero")
    failed = failed_rows(batch)
    for row in range(count):
        if not active[row] and not failed[row]:
            raise ValueError(f"loss_masks of row {row} is zero: SAO needs an active action token in every row")
    if compaction:
        _check_compaction(batch, active, failed)
    return {
        "samples": count,
        "response_tokens": int(sum(batch["response_lengths"])),
        "active_action_tokens": sum(active),
    }


def _check_row(batch: Mapping[str, Any], row: int) -> int:
    """Check one row; its active tokens."""
    length = batch["response_lengths"][row]
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length <= 0:
        raise ValueError(f"response_lengths of row {row} is {length!r}, expected an integer above 0")
    if len(batch["tokens"][row]) < length:
        raise ValueError(f"row {row}: {len(batch['tokens'][row])} tokens for a response of {length}")
    mask, log_probs = (np.asarray(batch[name][row]) for name in ("loss_masks", "rollout_log_probs"))
    for name, numbers in (("loss_masks", mask), ("rollout_log_probs", log_probs)):
        if numbers.shape != (length,):
            raise ValueError(f"{name} of row {row} has shape {numbers.shape}, expected {length} entries")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"loss_masks of row {row} must be 0 or 1")
    reward = batch["rewards"][row]
    if not isinstance(reward, (int, float, np.number)) or not math.isfinite(reward):
        raise ValueError(f"rewards of row {row} is {reward!r}, expected a finite number")
    if not np.isfinite(log_probs).all():
        raise ValueError(f"rollout_log_probs of row {row} are not finite")
    return int(np.count_nonzero(mask))


def _check_compaction(batch: Mapping[str, Any], active: Sequence[int], failed: Sequence[bool]) -> None:
    ids, indices, types, future, totals = (batch[name] for name in COMPACTION_COLUMNS)
    trajectories: dict[Hashable, list[int]] = {}
    for row, trajectory in enumerate(ids):
        if trajectory is None or trajectory == "":
            raise ValueError(f"compaction_trajectory_ids of row {row} is empty")
        if not _is_count(indices[row]):
            raise ValueError(f"compaction_segment_indices of row {row} is {indices[row]!r}, expected an integer >= 0")
        if types[row] not in ("execution", "summary"):
            raise ValueError(f"compaction_segment_types of row {row} is {types[row]!r}, expected execution or summary")
        if not _is_count(future[row]):
            raise ValueError(f"compaction_subsequent_active_tokens of row {row} is {future[row]!r}, expected >= 0")
        if not _is_count(totals[row]) or (totals[row] < 1 and not failed[row]):
            raise ValueError(f"compaction_trajectory_active_tokens of row {row} is {totals[row]!r}, expected above 0")
        trajectories.setdefault(trajectory, []).append(row)
    for trajectory, unsorted in trajectories.items():
        rows = sorted(unsorted, key=lambda row: indices[row])
        expected = ["summary" if number % 2 else "execution" for number in range(len(rows))]
        in_order = [indices[row] for row in rows] == list(range(len(rows)))
        if not in_order or [types[row] for row in rows] != expected or expected[-1] != "execution":
            raise ValueError(f"trajectory {trajectory}: invalid segment sequence")
        if len({failed[row] for row in rows}) != 1:
            raise ValueError(f"trajectory {trajectory}: some of its segments got no reward and some did")
        if len({float(batch["rewards"][row]) for row in rows}) != 1:
            raise ValueError(f"trajectory {trajectory}: its segments must share one reward")
        total = sum(active[row] for row in rows)
        later = total
        for row in rows:
            later -= active[row]
            if future[row] != later:
                raise ValueError(
                    f"trajectory {trajectory}: invalid future-token count {future[row]}, expected {later}"
                )
            if totals[row] != total:
                raise ValueError(
                    f"trajectory {trajectory}: invalid trajectory-token count {totals[row]}, expected {total}"
                )


def _is_count(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and bool(number >= 0)


def compaction_token_counts(
    *, trajectory_ids: Sequence[Hashable], segment_indices: Sequence[int], loss_masks: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Per segment: trainable tokens in LATER segments of its trajectory, and in all of them.

    Masks [1, 0, 1], [1], [0, 1, 1, 1] of one trajectory give ([4, 3, 0], [6, 6, 6]) (arXiv 2607.05378, Eq. 14).

    Args:
        trajectory_ids, segment_indices, loss_masks: one of each per row, rows in any order.
    """
    counts = [int(np.count_nonzero(mask)) for mask in loss_masks]
    remaining: dict[Hashable, int] = {}
    subsequent = [0] * len(counts)
    for row in sorted(range(len(counts)), key=lambda row: segment_indices[row], reverse=True):
        subsequent[row] = remaining.get(trajectory_ids[row], 0)
        remaining[trajectory_ids[row]] = subsequent[row] + counts[row]
    return subsequent, [remaining[trajectory] for trajectory in trajectory_ids]
