"""Per-token estimators of KL(pi || pi_ref) from the log-probabilities of sampled tokens (J. Schulman, 2020)."""

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked

MAX_LOG_RATIO = 20.0  # log-ratios are clamped here: exp(20) is still finite in every float type


def log_ratio(*, log_probs: Tensor, base_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """clamp(log_probs - base_log_probs, +-20) in float32, 0 outside the mask. NaN inside the mask stays NaN."""
    difference = masked(log_probs.float(), loss_mask) - masked(base_log_probs.float(), loss_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(*, log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, kind: str) -> Tensor:
    """Per-token KL(pi || pi_ref), 0 outside the mask. With d = log pi - log pi_ref (clamped to +-20):

    k1 = d, unbiased, high variance; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, unbiased and never negative.

    These are estimates of the VALUE. Differentiated as a loss on samples of the policy itself, k1 has expected
    gradient 0, k2 the gradient of the KL exactly, k3 a biased one.

    Args:
        log_probs, ref_log_probs, loss_mask: one shape.
        kind: "k1", "k2" or "k3".
    """
    d = log_ratio(log_probs=log_probs, base_log_probs=ref_log_probs, loss_mask=loss_mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"unknown KL estimator {kind!r}, expected k1, k2 or k3")
