"""Whitening of advantages over trainable tokens, from numbers in one place or from sums over many ranks."""

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked


def whitening_stats(x: Tensor, *, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) of `x` inside the mask, float64 [3]; add those of all ranks that share the batch.

    All zeros where there is no token: such a rank takes part in the sum like any other.
    """
    active_A = x.detach()[mask.bool()].double()
    return torch.stack([active_A.new_tensor(len(active_A)), active_A.sum(), active_A.square().sum()])


def whiten(x: Tensor, *, mask: Tensor, stats: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) with the population variance, in `x`'s dtype, 0 outside the mask.

    Args:
        x, mask: one shape. Without `stats` these must be the whole batch's: the moments are then taken from them, in
            two passes.
        stats: summed `whitening_stats` of all shares of the batch.
    """
    if stats is None:
        active_A = x.detach()[mask.bool()].double()
        mean = active_A.mean() if len(active_A) else active_A.sum()
        variance = (active_A - mean).square().sum() / max(len(active_A), 1)
    else:
        count, total, squares = stats.double().unbind()
        mean = total / count.clamp(min=1)
        variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
    return masked(((x.double() - mean) * torch.rsqrt(variance + eps)).to(x.dtype), mask)
