"""Sums over masks, and how the metric sums of micro-batches and ranks are put together."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with everything outside the mask replaced by 0; no gradient and no NaN passes there. Shapes equal."""
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where the mask is set, a scalar in `x`'s dtype. An empty mask gives 0 with a valid gradient.

    A mean over tokens is the masked sums of all micro-batches on all data-parallel ranks, added, over the GLOBAL count
    of trainable tokens: only then does the gradient not depend on how the batch was split.
    """
    return masked(x, mask).sum()


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
