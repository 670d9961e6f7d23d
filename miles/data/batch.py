"""The column batch: a dict of equal-length lists, one declared schema per objective, validated once on the CPU."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.data.sample import TRAINABLE_STATUSES, Sample, SampleStatus
from miles.data.sao import COMPACTION_COLUMNS, compaction_columns

# per-token columns: one sequence of response_length numbers per row
_PER_TOKEN = frozenset(
    {"loss_masks", "rollout_log_probs", "returns", "values", "old_log_probs", "ref_log_probs", "kl", "advantages"}
)
_COMMON = ("tokens", "response_lengths", "loss_masks", "sample_indices")
REQUIRED_COLUMNS = {
    "rollout": (*_COMMON, "rewards", "rollout_log_probs"),
    "value": (*_COMMON, "returns"),
    "policy": (*_COMMON, "advantages"),
}
KNOWN_COLUMNS = _PER_TOKEN | {*_COMMON, "sample_ids", "group_indices", "rewards", *COMPACTION_COLUMNS}


def validate_batch(batch: dict[str, Any], objective: str) -> None:
    """Check a column batch against the schema of `objective`: "rollout", "value" or "policy".

    Required columns (`REQUIRED_COLUMNS`) are present, no unknown column is, all have the same number of rows, every
    per-token column has response_length entries per row. Every row keeps at least one prompt token (a token's value
    and log-probability are read one position earlier). Masks are 0/1 with at least one 1 in the batch. Numbers are
    finite wherever the mask is 1; `returns` is finite everywhere. Rewards are finite.

    Raises:
        ValueError: naming the column, the row and what was expected.
    """
    if objective not in REQUIRED_COLUMNS:
        raise ValueError(f"unknown batch objective {objective!r}, expected one of {', '.join(REQUIRED_COLUMNS)}")
    if missing := sorted(set(REQUIRED_COLUMNS[objective]) - set(batch)):
        raise ValueError(f"{objective} batch misses columns: {', '.join(missing)}")
    if unknown := sorted(set(batch) - KNOWN_COLUMNS):
        raise ValueError(f"{objective} batch has unknown columns: {', '.join(unknown)}")
    num_rows = len(batch["tokens"])
    if num_rows == 0:
        raise ValueError(f"{objective} batch has no rows")
    for name, column in batch.items():
        if len(column) != num_rows:
            raise ValueError(f"column {name} has {len(column)} rows, tokens has {num_rows}")

    active_tokens = 0
    for row in range(num_rows):
        where = f"row {row} (sample {batch['sample_indices'][row]})"
        length = batch["response_lengths"][row]
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"response_lengths {where}: {length!r}, expected an integer >= 1")
        tokens = np.asarray(batch["tokens"][row])
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or (tokens < 0).any():
            raise ValueError(f"tokens {where}: expected a flat list of integers >= 0")
        if length >= len(tokens):
            raise ValueError(
                f"response_lengths {where}: {length} of {len(tokens)} tokens, must leave at least one prompt token"
            )
        mask = np.asarray(batch["loss_masks"][row])
        if mask.shape != (length,) or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"loss_masks {where}: expected {length} entries of 0 or 1")
        active = mask.astype(bool)
        active_tokens += int(active.sum())
        for name in _PER_TOKEN & set(batch) - {"loss_masks"}:
            numbers = np.asarray(batch[name][row])
            if numbers.shape != (length,) or numbers.dtype.kind not in "fiu":
                raise ValueError(f"{name} {where}: expected {length} numbers, got shape {numbers.shape}")
            finite = np.isfinite(numbers)
            if not (finite if name == "returns" else finite[active]).all():
                raise ValueError(f"{name} {where}: not finite at response token {int(np.argmin(finite))}")
        if "rewards" in batch:
            check_reward(batch["rewards"][row], where)
    if active_tokens == 0:
        raise ValueError(f"{objective} batch has no trainable token: every loss mask is zero")


def check_reward(reward: Any, where: str) -> None:
    """Raise ValueError, naming `where`, unless `reward` is a finite real number (bool counts as 0 or 1)."""
    if not isinstance(reward, (int, float, np.integer, np.floating)) or not math.isfinite(reward):
        raise ValueError(f"reward of {where} is {reward!r}, expected a finite number")


def select_rows(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The given rows of every column, in the given order; columns become lists, entries are shared, not copied."""
    return {name: [column[row] for row in rows] for name, column in batch.items()}


def samples_to_batch(samples: Sequence[Sample]) -> dict[str, Any]:
    """Column batch ("rollout" objective) of finished samples, in the given order.

    A FAILED sample, one without a reward, keeps its row, so that the batch keeps its size, but none of its tokens is
    trained on and its reward of 0 counts in no group.

    Raises:
        ValueError: a sample that is aborted, pending, unscored or misaligned, naming its index.
    """
    for sample in samples:
        if sample.status is not SampleStatus.FAILED:
            if sample.status not in TRAINABLE_STATUSES:
                raise ValueError(f"sample {sample.index} is {sample.status.value}; drop it before training")
            check_reward(sample.reward, f"sample {sample.index}")
        sample.check_aligned()
    failed = [sample.status is SampleStatus.FAILED for sample in samples]
    batch = {
        "tokens": [list(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [
            [0] * s.response_length if lost else list(s.loss_mask) for s, lost in zip(samples, failed, strict=True)
        ],
        "rewards": [0.0 if s.reward is None else float(s.reward) for s in samples],
        "rollout_log_probs": [np.asarray(s.rollout_log_probs, dtype=np.float32) for s in samples],
        "sample_indices": [s.index for s in samples],
        "group_indices": [s.group_index for s in samples],
        **compaction_columns(samples),
    }
    validate_batch(batch, "rollout")
    return batch
