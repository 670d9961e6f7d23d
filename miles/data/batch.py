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
_RAGGED = _PER_TOKEN | {"tokens"}
_COMMON = ("tokens", "response_lengths", "loss_masks", "sample_indices")
REQUIRED_COLUMNS = {
    "rollout": (*_COMMON, "rewards", "rollout_log_probs"),
    "value": (*_COMMON, "returns"),
    "policy": (*_COMMON, "advantages"),
}
KNOWN_COLUMNS = _PER_TOKEN | {
    *(*_COMMON, "sample_ids", "group_indices", "trajectory_ids", "rewards", "failed", *COMPACTION_COLUMNS),
}


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

    def where(row: int) -> str:
        return f"row {row} (sample {batch['sample_indices'][row]})"

    def numbers_of(name: str, kinds: str, expected: str) -> np.ndarray:
        """A per-token column as one array."""
        rows = [np.asarray(numbers) for numbers in batch[name]]
        for row, (numbers, length) in enumerate(zip(rows, lengths, strict=True)):
            if numbers.shape != (length,) or numbers.dtype.kind not in kinds:
                raise ValueError(f"{name} {where(row)}: expected {length} {expected}, got shape {numbers.shape}")
        return np.concatenate(rows)

    lengths = list(batch["response_lengths"])
    for row, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"response_lengths {where(row)}: {length!r}, expected an integer >= 1")
    for row, tokens in enumerate(map(np.asarray, batch["tokens"])):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min(initial=0) < 0:
            raise ValueError(f"tokens {where(row)}: expected a flat list of integers >= 0")
        if lengths[row] >= len(tokens):
            raise ValueError(
                f"response_lengths {where(row)}: {lengths[row]} of {len(tokens)} tokens, must leave at least one "
                "prompt token"
            )
    mask = numbers_of("loss_masks", "biuf", "entries of 0 or 1")
    active = mask == 1
    if bad := _first(~active & (mask != 0), lengths):
        raise ValueError(f"loss_masks {where(bad[0])}: expected {lengths[bad[0]]} entries of 0 or 1")
    for name in sorted(_PER_TOKEN & set(batch) - {"loss_masks"}):
        wrong = ~np.isfinite(numbers_of(name, "fiu", "numbers"))
        if bad := _first(wrong if name == "returns" else wrong & active, lengths):
            raise ValueError(f"{name} {where(bad[0])}: not finite at response token {bad[1]}")
    for row, reward in enumerate(batch.get("rewards", ())):
        check_reward(reward, where(row))
    if not active.any():
        raise ValueError(f"{objective} batch has no trainable token: every loss mask is zero")


def _first(bad: np.ndarray, lengths: Sequence[int]) -> tuple[int, int] | None:
    """Row and response token of the first entry that is set."""
    if not bad.any():
        return None
    place, ends = int(bad.argmax()), np.cumsum(lengths)
    row = int(np.searchsorted(ends, place, side="right"))
    return row, place - int(ends[row] - lengths[row])


def check_reward(reward: Any, where: str) -> None:
    """Raise ValueError, naming `where`, unless `reward` is a finite real number (bool counts as 0 or 1)."""
    try:
        finite = isinstance(reward, (int, float, np.integer, np.floating)) and math.isfinite(reward)
    except OverflowError:
        # An integer of Python's that no float holds.
        finite = False
    if not finite:
        raise ValueError(f"reward of {where} is {reward!r}, expected a finite number")


class Ragged(list[Any]):
    """Rows of numbers, which pickle as one array: thousands of small ones take longer than all their bytes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _ragged, (np.concatenate(self), [len(row) for row in self])


def _ragged(numbers: np.ndarray, lengths: Sequence[int]) -> Ragged:
    ends = np.cumsum(lengths).tolist()
    return Ragged(numbers[end - length : end] for end, length in zip(ends, lengths, strict=True))


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with `Ragged` columns where rows are sequences of numbers; entries are shared, not copied."""
    return {name: Ragged(column) if name in _RAGGED else column for name, column in batch.items()}


def select_rows(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The given rows of every column, in the given order; columns become lists, entries are shared, not copied."""
    return {name: [column[row] for row in rows] for name, column in batch.items()}


def samples_to_batch(samples: Sequence[Sample]) -> dict[str, Any]:
    """Column batch ("rollout" objective) of finished samples, in the given order.

    A FAILED sample, one without a reward, keeps its row, so that the batch keeps its size, but none of its tokens is
    trained on and its reward of 0 counts in no group. Where there are any, the column "failed" says which.

    Raises:
        ValueError: a sample that is aborted, pending, unscored, misaligned or there twice, naming its index.
    """
    seen: set[int] = set()
    for sample in samples:
        if sample.index in seen:
            raise ValueError(f"sample {sample.index} is there twice; every sample needs an index of its own")
        seen.add(sample.index)
        if sample.status is not SampleStatus.FAILED:
            if sample.status not in TRAINABLE_STATUSES:
                raise ValueError(f"sample {sample.index} is {sample.status.value}; drop it before training")
            check_reward(sample.reward, f"sample {sample.index}")
        sample.check_aligned()
    failed = [sample.status is SampleStatus.FAILED for sample in samples]
    batch = {
        "tokens": [np.asarray(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [
            np.zeros(s.response_length, dtype=np.uint8) if lost else _mask(s)
            for s, lost in zip(samples, failed, strict=True)
        ],
        "rewards": [0.0 if s.reward is None else float(s.reward) for s in samples],
        "rollout_log_probs": [np.asarray(s.rollout_log_probs, dtype=np.float32) for s in samples],
        "sample_indices": [s.index for s in samples],
        "group_indices": [s.group_index for s in samples],
        **({"failed": failed} if any(failed) else {}),
        **compaction_columns(samples),
    }
    validate_batch(batch, "rollout")
    return ragged(batch)


def _mask(sample: Sample) -> np.ndarray:
    """The loss mask in one byte per token; as it is where it does not fit, for `validate_batch` to refuse."""
    try:
        return np.frombuffer(bytes(list(sample.loss_mask)), dtype=np.uint8)
    except (TypeError, ValueError):
        return np.asarray(sample.loss_mask)
