"""From losses of tokens to one number, and how the sums of micro-batches and ranks are put together.

Whatever the mode, a micro-batch contributes a SUM and the batch's one denominator is counted over all micro-batches of
all data-parallel ranks. Only so is the gradient the same however the batch was split.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

TRAJECTORY_COLUMNS = ("compaction_trajectory_ids", "trajectory_ids")
"""Batch columns whose equal entries make rows one trajectory, the first that is there: segments, fan-out siblings."""
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def masked(x: Tensor, *, mask: Tensor) -> Tensor:
    """`x` with everything outside the mask replaced by 0; no gradient and no NaN passes there. Shapes equal."""
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, *, mask: Tensor) -> Tensor:
    """Sum of `x` where the mask is set, a scalar in `x`'s dtype. An empty mask gives 0 with a valid gradient.

    A mean over tokens is the masked sums of all micro-batches on all data-parallel ranks, added, over the GLOBAL count
    of trainable tokens: only then does the gradient not depend on how the batch was split.
    """
    return masked(x, mask=mask).sum()


def sequence_counts(
    loss_masks: Sequence[Sequence[int] | np.ndarray], *, trajectory_ids: Sequence[Hashable] | None = None
) -> tuple[list[int], int, int]:
    """Counts of the WHOLE batch that the denominators are made of.

    Args:
        loss_masks: one per row.
        trajectory_ids: rows with one id are one sequence (fan-out siblings); without them every row is its own.

    Returns:
        (trainable tokens of each row's sequence, number of sequences that have any, trainable tokens).
    """
    # A list of a long response takes NumPy ten times as long as its own count.
    counts = [
        int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else len(mask) - mask.count(0)
        for mask in loss_masks
    ]
    ids = range(len(counts)) if trajectory_ids is None else trajectory_ids
    totals: dict[Hashable, int] = {}
    for name, count in zip(ids, counts, strict=True):
        totals[name] = totals.get(name, 0) + count
    return [totals[name] for name in ids], sum(total > 0 for total in totals.values()), sum(counts)


def aggregate(
    loss_T: Tensor,
    *,
    loss_mask_T: Tensor,
    mode: str,
    row_T: Tensor | None = None,
    sequence_tokens_B: Tensor | None = None,
) -> Tensor:
    """What a micro-batch adds to the batch's loss, to be divided by `loss_denominator`. A scalar.

    "seq-mean-token-mean" adds the mean over each sequence's trainable tokens, the others add tokens.

    Args:
        loss_T: loss of each response token.
        row_T: which of the micro-batch's B rows a token belongs to; only for "seq-mean-token-mean".
        sequence_tokens_B: trainable tokens of the whole sequence that each row belongs to (`sequence_counts`).

    Raises:
        ValueError: unknown mode, or an argument that the mode needs is missing.
    """
    if mode not in LOSS_AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}, expected one of {', '.join(LOSS_AGGREGATIONS)}")
    if mode != "seq-mean-token-mean":
        return masked_sum(loss_T, mask=loss_mask_T)
    if row_T is None or sequence_tokens_B is None:
        raise ValueError("seq-mean-token-mean needs the rows of tokens and the tokens of sequences")
    weight_B = 1.0 / sequence_tokens_B.to(loss_T.dtype).clamp(min=1.0)
    return (masked(loss_T, mask=loss_mask_T) * weight_B[row_T]).sum()


def loss_denominator(mode: str, *, num_tokens: int, num_sequences: int, constant: float | None = None) -> float:
    """What the sum of all `aggregate` of the batch is divided by.

    token-mean: trainable tokens. seq-mean-token-mean, seq-mean-token-sum: sequences that have any.
    seq-mean-token-sum-norm: sequences times `constant` (Dr.GRPO, arXiv 2503.20783: the longest response allowed).

    Args:
        num_tokens, num_sequences: of the whole global batch (`sequence_counts`).

    Raises:
        ValueError: unknown mode, or a constant that is missing or not above 0.
    """
    if mode not in LOSS_AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}, expected one of {', '.join(LOSS_AGGREGATIONS)}")
    if mode == "token-mean":
        return float(num_tokens)
    if mode != "seq-mean-token-sum-norm":
        return float(num_sequences)
    if constant is None or not 0.0 < constant < float("inf"):
        raise ValueError(f"seq-mean-token-sum-norm needs a constant length above 0, got {constant}")
    return num_sequences * constant


def row_sums(x_T: Tensor, *, row_T: Tensor, num_rows: int) -> Tensor:
    """Sums over each row's tokens, [num_rows] in `x_T`'s dtype; rows without tokens get 0."""
    return x_T.new_zeros(num_rows).index_add(0, row_T, x_T)


def add_metrics(parts: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Combine the metrics of micro-batches or ranks: names ending in `_max` / `_min` by maximum / minimum, all others
    added. Names present in only some parts are combined over those. NaN wins a maximum or minimum."""
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            if name not in combined:
                combined[name] = number
            elif not name.endswith(("_max", "_min")):
                combined[name] += number
            elif number != number or combined[name] != combined[name]:
                combined[name] = float("nan")
            else:
                combined[name] = (max if name.endswith("_max") else min)(combined[name], number)
    return combined
