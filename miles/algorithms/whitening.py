"""Whitening of advantages over the trainable tokens of a whole batch."""

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked


def whiten(x: Tensor, *, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) with the population variance, in `x`'s dtype, 0 outside the mask.

    Args:
        x, mask: the whole batch's, of one shape.
    """
    active_A = x.detach()[mask.bool()].double()
    mean = active_A.mean() if len(active_A) else active_A.sum()
    variance = (active_A - mean).square().sum() / max(len(active_A), 1)
    return masked(((x.double() - mean) * torch.rsqrt(variance + eps)).to(x.dtype), mask=mask)
