"""Corrections for tokens that another policy than the one trained from has sampled: weights and masks, all constant.

The mismatch of a token is the log-ratio of pi_old, the trainer's own probability under the weights that the rollout
began with, to pi_b, the engine's at the sampling temperature, before top-p and top-k: where these cut, it is not what
sampled. The CURRENT policy never enters a weight: where the engine agrees with the trainer every weight is exactly 1,
however far the update has gone. A token that is rejected contributes
nothing and stays in every denominator.

Suffixes: T response tokens of whole rows laid end to end, B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.aggregation import masked, row_sums
from miles.algorithms.kl import MAX_LOG_RATIO, log_ratio

Metrics = dict[str, Tensor]

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How importance weights are made of the ratios pi_old / pi_b.

    Level: "token", "sequence" (product over the row's trainable tokens, for all of them) or "geometric" (their
    geometric mean). Mode: "truncate" min(ratio, high), "clip" to [low, high], "mask" the ratio inside [low, high],
    bounds included, and 0 outside; None leaves every weight 1, for a correction that only rejects.

    Raises:
        ValueError: unknown level or mode, bounds that are not 0 <= low <= high.
    """

    level: str = "token"
    mode: str | None = "truncate"
    high: float = 2.0
    low: float | None = None
    """None: 1 / high."""
    reject_level: str | None = None
    """Reject tokens, or whole rows, whose ratio of this level leaves [reject_low, reject_high]."""
    reject_high: float = 2.0
    reject_low: float | None = None
    """None: 1 / reject_high. For the level "geometric" 0.9999 and 1.0001 are usual."""
    veto: float | None = None
    """Reject a whole row where any trainable token's ratio is below this; 1e-4 is usual."""
    batch_normalize: bool = False
    """Divide weights by their mean over the trainable tokens of the whole batch."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS or self.reject_level not in (None, *LEVELS):
            raise ValueError(
                f"unknown level of a correction {self.level!r} / {self.reject_level!r}, expected one of"
                f" {', '.join(LEVELS)}"
            )
        if self.mode not in (None, *MODES):
            raise ValueError(f"unknown mode of a correction {self.mode!r}, expected one of {', '.join(MODES)}")
        for name, low, high in (
            ("weights", self.weight_low, self.high),
            ("rejection", self.rejection_low, self.reject_high),
        ):
            if not 0.0 <= low <= high or high == 0.0:
                raise ValueError(f"the bounds of {name} must be 0 <= low <= high, got [{low}, {high}]")
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise ValueError(f"the veto must lie between 0 and 1, got {self.veto}")

    @property
    def weight_low(self) -> float:
        return _low(self.low, self.high)

    @property
    def rejection_low(self) -> float:
        return _low(self.reject_low, self.reject_high)


def _low(low: float | None, high: float) -> float:
    if low is not None:
        return low
    return 1.0 / high if high > 0.0 else 0.0


def tis(*, high: float = 2.0, low: float = 0.0) -> Correction:
    """Truncated importance sampling: each token's ratio clamped to [low, high]."""
    return Correction(level="token", mode="clip", low=low, high=high)


def icepop(*, low: float = 0.5, high: float = 5.0) -> Correction:
    """Each token's ratio inside [low, high], bounds included; tokens outside are dropped."""
    return Correction(level="token", mode="mask", low=low, high=high)


def importance_weights(
    correction: Correction,
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    row_T: Tensor,
    num_rows: int,
    weight_mean: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Weight of each token, float32 [T], detached; 0 where rejected and outside the mask.

    Args:
        old_log_probs: log pi_old, of the trainer before the update. rollout_log_probs: log pi_b, of the engine.
        row_T: row of each token, 0 to num_rows - 1. Rows must be whole.
        weight_mean: with `batch_normalize`, the mean weight over all trainable tokens of the WHOLE batch, see
            `mean_weight`; a batch whose weights are all 0 stays as it is.

    Returns:
        weights and metric sums: `tokens`, `correction_weight` (before the normalisation), `correction_rejected`
        (trainable tokens with weight 0), `correction_bounded` (tokens whose weight a bound has changed), and
        `correction_ratio_max` / `_min` over tokens.
    """
    with torch.no_grad():
        mask_T = loss_mask.bool()
        token_T = log_ratio(log_probs=old_log_probs, base_log_probs=rollout_log_probs, loss_mask=mask_T)
        ones_T = masked(torch.ones_like(token_T), mask=mask_T)

        def ratio(level: str) -> Tensor:
            return _log_ratio_of(level, token_T, mask_T, row_T=row_T, num_rows=num_rows).exp()

        weight_T = raw_T = ones_T
        if correction.mode is not None:
            raw_T = ratio(correction.level)
            if correction.mode == "truncate":
                weight_T = raw_T.clamp(max=correction.high)
            elif correction.mode == "clip":
                weight_T = raw_T.clamp(correction.weight_low, correction.high)
            else:
                weight_T = _outside_to_zero(raw_T, raw_T, correction.weight_low, correction.high)
        bounded_T = (weight_T != raw_T) & mask_T
        if correction.reject_level is not None:
            weight_T = _outside_to_zero(
                weight_T, ratio(correction.reject_level), correction.rejection_low, correction.reject_high
            )
        if correction.veto is not None:
            vetoed_B = torch.zeros(num_rows, dtype=torch.bool, device=token_T.device)
            vetoed_B[row_T[token_T.exp() < correction.veto]] = True
            weight_T = torch.where(vetoed_B[row_T], torch.zeros_like(weight_T), weight_T)
        weight_T = masked(weight_T, mask=mask_T)
        metrics = {
            "tokens": mask_T.sum().double(),
            "correction_weight": weight_T.double().sum(),
            "correction_rejected": (mask_T & (weight_T == 0)).sum().double(),
            "correction_bounded": bounded_T.sum().double(),
        }
        active_A = token_T[mask_T].exp()
        if active_A.numel():
            metrics["correction_ratio_max"] = active_A.max().double()
            metrics["correction_ratio_min"] = active_A.min().double()
        if correction.batch_normalize and weight_mean:
            weight_T = weight_T / weight_mean
        return weight_T, metrics


def mean_weight(
    correction: Correction,
    *,
    old_log_probs: Sequence[np.ndarray],
    rollout_log_probs: Sequence[np.ndarray],
    loss_masks: Sequence[Sequence[int] | np.ndarray],
) -> float:
    """Mean weight over all trainable tokens of a batch, given as one array per row: the `weight_mean` of its parts."""
    lengths = torch.tensor([len(mask) for mask in loss_masks])

    def flat(rows: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(row, dtype=np.float32) for row in rows]))

    _, metrics = importance_weights(
        correction,
        old_log_probs=flat(old_log_probs),
        rollout_log_probs=flat(rollout_log_probs),
        loss_mask=flat(loss_masks),
        row_T=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        num_rows=len(lengths),
    )
    return float(metrics["correction_weight"] / metrics["tokens"])


def _outside_to_zero(x_T: Tensor, ratio_T: Tensor, low: float, high: float) -> Tensor:
    """`x_T` with 0 where the ratio leaves [low, high]. A NaN ratio is not outside: it must surface."""
    return torch.where((ratio_T < low) | (ratio_T > high), torch.zeros_like(x_T), x_T)


def _log_ratio_of(level: str, token_T: Tensor, mask_T: Tensor, *, row_T: Tensor, num_rows: int) -> Tensor:
    if level == "token":
        return token_T
    # sums in float64: the bounds of a geometric mean lie 1e-4 from 1
    sum_B = row_sums(token_T.double(), row_T=row_T, num_rows=num_rows)
    if level == "geometric":
        sum_B = sum_B / row_sums(mask_T.double(), row_T=row_T, num_rows=num_rows).clamp(min=1.0)
    return sum_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[row_T].to(token_T.dtype)


def opsm_keep(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    row_T: Tensor,
    num_rows: int,
    delta: float = 1e-4,
) -> tuple[Tensor, Metrics]:
    """Off-policy sequence masking (DeepSeek-V3.2): which tokens are kept, bool [T].

    Dropped are tokens with a negative advantage in rows whose mean of log pi_old - log pi, over trainable tokens,
    exceeds `delta`: answers that are bad and that the policy has left behind already.

    Returns:
        keep (False outside the mask) and the metric sum `opsm_dropped`, tokens.
    """
    with torch.no_grad():
        mask_T = loss_mask.bool()
        token_T = log_ratio(log_probs=old_log_probs, base_log_probs=log_probs, loss_mask=mask_T).double()
        mean_B = row_sums(token_T, row_T=row_T, num_rows=num_rows) / row_sums(
            mask_T.double(), row_T=row_T, num_rows=num_rows
        ).clamp(min=1.0)
        dropped_T = mask_T & (masked(advantages, mask=mask_T) < 0) & (mean_B > delta)[row_T]
        return mask_T & ~dropped_T, {"opsm_dropped": dropped_T.sum().double()}
