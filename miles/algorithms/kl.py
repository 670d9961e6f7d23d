"""Per-token estimators of KL(pi || pi_ref) from the log-probabilities of sampled tokens, and their coefficient.

k1 and k3 are unbiased estimates of the VALUE. What trains is an expected gradient, on the policy's own samples:

* as a penalty k in the reward, a constant, it is E[k grad log pi]: that of k1 is the KL's; that of k3 is grad KL(pi ||
  pi_ref) - grad KL(pi_ref || pi), near the reference next to nothing, and that of k2 is of second order there as well;
* as a loss it is E[grad k]: that of k2 is the KL's, that of k1 is 0, that of k3 and low_var_kl is the one of KL(pi_ref
  || pi). "unbiased" has the KL's on samples of an older policy as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked

MAX_LOG_RATIO = 20.0  # log-ratios are clamped here: exp(20) is still finite in every float type
MAX_LOW_VAR_KL = 10.0

KL_KINDS = ("k1", "k2", "k3", "low_var_kl", "unbiased")


def log_ratio(*, log_probs: Tensor, base_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """clamp(log_probs - base_log_probs, +-20) in float32, 0 outside the mask. NaN inside the mask stays NaN."""
    difference = masked(log_probs.float(), mask=loss_mask) - masked(base_log_probs.float(), mask=loss_mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(
    *,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    kind: str,
    behaviour_log_probs: Tensor | None = None,
) -> Tensor:
    """Per-token KL(pi || pi_ref), float32, 0 outside the mask. With d = log pi - log pi_ref (clamped to +-20):

    k1 = d, unbiased, high variance; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, unbiased and never negative (J. Schulman,
    2020); low_var_kl = k3 clamped to +-10; unbiased = exp(log pi - log pi_b) k3, with the ratio to the policy pi_b
    that sampled the tokens in the graph (DeepSeek-V3.2).

    Args:
        log_probs: with gradient where it is a loss. All tensors have one shape.
        ref_log_probs, behaviour_log_probs: constants.
        kind: one of `KL_KINDS`.

    Raises:
        ValueError: unknown kind, or "unbiased" without `behaviour_log_probs`.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}, expected one of {', '.join(KL_KINDS)}")
    d = log_ratio(log_probs=log_probs, base_log_probs=ref_log_probs.detach(), loss_mask=loss_mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    k3 = torch.expm1(-d) + d
    if kind == "low_var_kl":
        return k3.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)
    if kind == "unbiased":
        if behaviour_log_probs is None:
            raise ValueError("the KL estimator 'unbiased' needs the log-probabilities of the policy that sampled")
        ratio = log_ratio(log_probs=log_probs, base_log_probs=behaviour_log_probs.detach(), loss_mask=loss_mask).exp()
        return ratio * k3
    return k3


@dataclass
class AdaptiveKLController:
    """Moves the KL coefficient towards a target: coef *= 1 + clip(kl / target - 1, +-0.2) n / horizon.

    arXiv 1909.08593, section 2.2. With `target` None the coefficient is fixed.

    Raises:
        ValueError: a negative coefficient, a target or horizon not above 0.
    """

    coef: float
    target: float | None = None
    horizon: float = 10_000.0
    """Samples after which a KL that stays 20 % or more off has changed the coefficient by about 20 %."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.coef < float("inf"):
            raise ValueError(f"the KL coefficient must be a finite number of at least 0, got {self.coef}")
        if self.target is not None and not self.target > 0.0:
            raise ValueError(f"the KL target must be above 0, got {self.target}")
        if not self.horizon > 0.0:
            raise ValueError(f"the KL horizon must be above 0, got {self.horizon}")

    def update(self, *, kl: float, num_samples: int) -> float:
        """The coefficient after a batch of `num_samples` whose mean KL per token was `kl`.

        Raises:
            ValueError: `kl` is not finite.
        """
        if self.target is None:
            return self.coef
        if not abs(kl) < float("inf"):
            raise ValueError(f"the KL that the adaptive coefficient follows is {kl}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef = max(self.coef * (1.0 + error * num_samples / self.horizon), 0.0)
        return self.coef
