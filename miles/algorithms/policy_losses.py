"""Policy losses per token, and the one function that puts a recipe's parts together.

Each loss takes tensors [T] over the response tokens of whole rows, keyword-only, and returns (loss_T, metrics):
loss_T is 0 outside the mask and has the gradient; metrics are detached sums and extremes (`aggregation.add_metrics`).
Nothing here divides by a number of tokens: `aggregation` does. A token that a loss rejects contributes neither value
nor gradient and stays in the denominator.

Names: log_probs log pi of the policy being trained; old_log_probs log pi_old, of the trainer before the update;
rollout_log_probs log pi_b, as the engine sampled; r = exp(log_probs - old_log_probs), log-ratio clamped to +-20.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked, row_sums
from miles.algorithms.corrections import Correction, importance_weights, opsm_keep
from miles.algorithms.kl import KL_KINDS, kl_estimate, log_ratio

Metrics = dict[str, Tensor]

POLICY_OBJECTIVES = ("ppo", "decoupled_ppo", "gspo", "cispo", "sao_dis")
RATIO_GRADS = ("detached", "in_graph")
_GSPO_MAX_LOG_RATIO = 10.0


def _high(eps_clip: float, eps_clip_high: float | None) -> float:
    return eps_clip if eps_clip_high is None else eps_clip_high


def _ratio_metrics(log_ratio_T: Tensor, loss_mask: Tensor) -> Metrics:
    """`tokens`, `approx_kl` (sum of r - 1 - log r), `ratio` (sum); `ratio_max`, `ratio_min` where there are tokens."""
    ratio_T = log_ratio_T.exp()
    metrics = {
        "tokens": loss_mask.bool().sum().double(),
        "approx_kl": (torch.expm1(log_ratio_T) - log_ratio_T).double().sum(),
        "ratio": masked(ratio_T, mask=loss_mask).double().sum(),
    }
    active_A = ratio_T[loss_mask.bool()]
    if active_A.numel():
        metrics["ratio_max"] = active_A.max().double()
        metrics["ratio_min"] = active_A.min().double()
    return metrics


def _clip_metrics(ratio_T: Tensor, clipped_T: Tensor) -> Metrics:
    """`clipped`, `clipped_low`, `clipped_high`: tokens whose bound has taken effect, on which side."""
    return {
        "clipped": clipped_T.sum().double(),
        "clipped_low": (clipped_T & (ratio_T < 1)).sum().double(),
        "clipped_high": (clipped_T & (ratio_T > 1)).sum().double(),
    }


def effective_sample_size(weight_T: Tensor, *, loss_mask: Tensor, row_T: Tensor, num_rows: int) -> Metrics:
    """Per row (sum w)^2 / (n sum w^2), between 1/n and 1, over its n trainable tokens.

    Returns:
        metric sums `ess` and `ess_rows`, the rows that have trainable tokens; their quotient is the mean.
    """
    with torch.no_grad():
        weight_T = masked(weight_T.double(), mask=loss_mask)
        sum_B = row_sums(weight_T, row_T=row_T, num_rows=num_rows)
        square_B = row_sums(weight_T.square(), row_T=row_T, num_rows=num_rows)
        count_B = row_sums(loss_mask.bool().double(), row_T=row_T, num_rows=num_rows)
        ess_B = torch.where(count_B > 0, sum_B.square() / (count_B * square_B).clamp(min=1e-300), 0.0)
        return {"ess": ess_B.sum(), "ess_rows": (count_B > 0).sum().double()}


def _clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    plain_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1.0 - low, 1.0 + high) * advantages_T
    loss_T = torch.maximum(plain_T, bounded_T)
    with torch.no_grad():
        metrics = _clip_metrics(ratio_T, bounded_T > plain_T)
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantages_T
        dual_T = (advantages_T < 0) & (ceiling_T < loss_T)
        loss_T = torch.where(dual_T, ceiling_T, loss_T)
        metrics["dual_clipped"] = dual_T.sum().double()
    return loss_T, metrics


def ppo_clip(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate: max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) (arXiv 1707.06347).

    Args:
        log_probs: with gradient. All four tensors have one shape; the other three are constants.
        eps_clip_high: upper band, default `eps_clip`.
        dual_clip: c > 1; where A < 0 the loss is at most -c A (arXiv 1912.09729).

    Returns:
        loss and metrics `tokens`, `clipped` (tokens whose clipped branch is the larger), `clipped_low`,
        `clipped_high`, `approx_kl` (sum of r - 1 - log r, an estimate of KL(old || new)), `ratio` (sum), `ratio_max`,
        `ratio_min` (absent without tokens), with dual clipping `dual_clipped`.

    Raises:
        ValueError: `dual_clip` not above 1.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"the constant of dual clipping must be above 1, got {dual_clip}")
    log_ratio_T = log_ratio(log_probs=log_probs, base_log_probs=old_log_probs.detach(), loss_mask=loss_mask)
    advantages_T = masked(advantages.detach().float(), mask=loss_mask)
    loss_T, metrics = _clipped_surrogate(
        log_ratio_T.exp(), advantages_T, low=eps_clip, high=_high(eps_clip, eps_clip_high), dual_clip=dual_clip
    )
    return loss_T, {**_ratio_metrics(log_ratio_T.detach(), loss_mask), **metrics}


def gspo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    row_T: Tensor,
    num_rows: int,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the sequence's ratio s = exp(mean over its trainable tokens of log pi - log pi_old).

    In its token form sg[s] exp(log pi - sg[log pi]): with one advantage per sequence and the aggregation
    "seq-mean-token-mean" the gradient is that of the sequence's own objective (arXiv 2507.18071, which takes bands of
    3e-4 and 4e-4). log s is clamped to at most 10.

    Args:
        row_T: row of each token, 0 to num_rows - 1; rows must be whole.

    Returns:
        loss and metrics as `ppo_clip`; ratios and clipped fractions are those of sequences, counted by token.
    """
    old_T = old_log_probs.detach()
    log_ratio_T = log_ratio(log_probs=log_probs.detach(), base_log_probs=old_T, loss_mask=loss_mask)
    count_B = row_sums(loss_mask.bool().double(), row_T=row_T, num_rows=num_rows).clamp(min=1.0)
    mean_B = row_sums(log_ratio_T.double(), row_T=row_T, num_rows=num_rows) / count_B
    log_s_T = masked(mean_B[row_T].float(), mask=loss_mask)
    own_T = masked(log_probs.float(), mask=loss_mask)
    # in this order: the gradient of own_T at the very value of log_s_T, which adding to own_T first would round
    ratio_T = (log_s_T + (own_T - own_T.detach())).clamp(max=_GSPO_MAX_LOG_RATIO).exp()
    loss_T, metrics = _clipped_surrogate(
        ratio_T,
        masked(advantages.detach().float(), mask=loss_mask),
        low=eps_clip,
        high=_high(eps_clip, eps_clip_high),
        dual_clip=None,
    )
    sequence = _ratio_metrics(log_s_T, loss_mask)
    token_kl = (torch.expm1(log_ratio_T) - log_ratio_T).double().sum()
    return loss_T, {**sequence, **metrics, "approx_kl": token_kl}


def cispo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """-sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] A log pi: the weight is clipped, no token's gradient is.

    arXiv 2506.13585, which tunes the upper bound alone (`eps_clip` 1 leaves the lower one open) with "token-mean".

    Returns:
        loss and metrics as `ppo_clip`; `clipped` counts tokens whose weight a bound has changed.
    """
    own_T = masked(log_probs.float(), mask=loss_mask)
    log_ratio_T = log_ratio(log_probs=own_T.detach(), base_log_probs=old_log_probs.detach(), loss_mask=loss_mask)
    ratio_T = log_ratio_T.exp()
    weight_T = ratio_T.clamp(1.0 - eps_clip, 1.0 + _high(eps_clip, eps_clip_high))
    loss_T = -weight_T * masked(advantages.detach().float(), mask=loss_mask) * own_T
    return masked(loss_T, mask=loss_mask), {
        **_ratio_metrics(log_ratio_T, loss_mask),
        **_clip_metrics(ratio_T, weight_T != ratio_T),
    }


def sao_dis(
    *,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    ratio_grad: str = "detached",
) -> tuple[Tensor, Metrics]:
    """SAO's double-sided importance sampling: -r A log pi where 1 - eps_clip < r < 1 + eps_clip_high, else 0.

    r = exp(log pi - log pi_b) with the ENGINE's log-probabilities; both bounds are strict (arXiv 2607.07508, Eq. 1-3).

    With `ratio_grad` "detached", the default, r is a constant weight and the gradient with respect to log pi is -r A.
    "in_graph" differentiates r as well, which gives -r A (1 + log pi): the factor 1 + log pi is negative for every
    token of probability under 1/e, so that there the update goes the WRONG way, and more so the rarer the token. It
    exists to reproduce runs that were made with it.

    Args:
        eps_clip: 0 <= eps_clip < 1. eps_clip_high: at least 0. Coding takes .8 and 3, reasoning .3 and 5.

    Returns:
        loss and metrics `tokens`, `approx_kl`, `ratio` (sum), `ratio_max`, `ratio_min`, `rejected`, `rejected_low`,
        `rejected_high` (tokens). A NaN inside the mask is not rejected but surfaces in the loss.

    Raises:
        ValueError: unknown `ratio_grad`, a band outside the above.
    """
    if ratio_grad not in RATIO_GRADS:
        raise ValueError(f"unknown ratio_grad {ratio_grad!r}, expected detached or in_graph")
    if not 0.0 <= eps_clip < 1.0:
        raise ValueError(f"the lower band of DIS must lie in [0, 1), got {eps_clip}")
    if not 0.0 <= eps_clip_high < math.inf:
        raise ValueError(f"the upper band of DIS must be a finite number of at least 0, got {eps_clip_high}")
    own_T = masked(log_probs.float(), mask=loss_mask)
    log_ratio_T = log_ratio(log_probs=own_T, base_log_probs=rollout_log_probs.detach(), loss_mask=loss_mask)
    if ratio_grad == "detached":
        log_ratio_T = log_ratio_T.detach()
    below_T = log_ratio_T.detach() <= math.log1p(-eps_clip)
    above_T = log_ratio_T.detach() >= math.log1p(eps_clip_high)
    rejected_T = (below_T | above_T) & loss_mask.bool()
    kept_T = loss_mask.bool() & ~rejected_T
    # rejected entries are zeroed before exp: what is far outside must not reach the gradient as inf * 0
    ratio_T = masked(log_ratio_T, mask=kept_T).exp()
    advantages_T = masked(advantages.detach().float(), mask=loss_mask)
    # times 0, and not just 0: a NaN advantage surfaces from a rejected token too
    loss_T = torch.where(kept_T, -ratio_T * advantages_T * own_T, 0.0 * advantages_T)
    return loss_T, {
        **_ratio_metrics(log_ratio_T.detach(), loss_mask),
        "rejected": rejected_T.sum().double(),
        "rejected_low": (below_T & rejected_T).sum().double(),
        "rejected_high": (above_T & rejected_T & ~below_T).sum().double(),
    }


# -------------------------------------------------------------------- a recipe's parts together


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The actor's loss per token: objective x correction, entropy bonus, KL to the reference.

    "decoupled_ppo" (arXiv 2110.00641) is "ppo" whose surrogate is to pi_old, the proximal policy, with the constant
    weight pi_old / pi_b of each token; a `correction` bounds that weight. Bypass mode is "ppo" where the caller hands
    rollout_log_probs over as old_log_probs.

    Raises:
        ValueError: unknown names, a correction or OPSM with "sao_dis", which corrects for the engine by itself, dual
            clipping with another objective than PPO's.
    """

    objective: str = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    dual_clip: float | None = None
    ratio_grad: str = "detached"
    correction: Correction | None = None
    opsm_delta: float | None = None
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k2"

    def __post_init__(self) -> None:
        if self.objective not in POLICY_OBJECTIVES:
            raise ValueError(
                f"unknown policy objective {self.objective!r}, expected one of {', '.join(POLICY_OBJECTIVES)}"
            )
        if self.kl_loss_type not in KL_KINDS:
            raise ValueError(f"unknown KL estimator {self.kl_loss_type!r}, expected one of {', '.join(KL_KINDS)}")
        if self.objective == "sao_dis" and (self.correction is not None or self.opsm_delta is not None):
            raise ValueError("sao_dis corrects for the engine itself: neither TIS, IcePop, MIS nor OPSM goes with it")
        if self.dual_clip is not None and self.objective not in ("ppo", "decoupled_ppo"):
            raise ValueError(f"dual clipping belongs to the objective ppo, not to {self.objective}")

    @property
    def effective_correction(self) -> Correction | None:
        """The correction of the engine's mismatch: that of the settings, or decoupled PPO's unbounded weight."""
        if self.correction is None and self.objective == "decoupled_ppo":
            return Correction(level="token", mode="clip", low=0.0, high=math.inf)
        return self.correction

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that it reads besides log_probs and entropy."""
        names = ["advantages"]
        if self.objective != "sao_dis":
            names.append("old_log_probs")
        if self.objective == "sao_dis" or self.effective_correction is not None or self._kl_needs_rollout:
            names.append("rollout_log_probs")
        if self.kl_loss_coef:
            names.append("ref_log_probs")
        return tuple(names)

    @property
    def _kl_needs_rollout(self) -> bool:
        return bool(self.kl_loss_coef) and self.kl_loss_type == "unbiased"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Every name that its metrics can have."""
        names = ["tokens", "policy_loss", "entropy", "approx_kl", "ratio", "ratio_max", "ratio_min", "ess", "ess_rows"]
        if self.objective == "sao_dis":
            names += ["rejected", "rejected_low", "rejected_high"]
        else:
            names += ["clipped", "clipped_low", "clipped_high"]
        if self.dual_clip is not None:
            names.append("dual_clipped")
        if self.effective_correction is not None:
            names += ["correction_weight", "correction_rejected", "correction_bounded"]
            names += ["correction_ratio_max", "correction_ratio_min"]
        if self.opsm_delta is not None:
            names.append("opsm_dropped")
        if self.kl_loss_coef:
            names.append("kl_loss")
        return tuple(names)

    def __call__(
        self,
        *,
        log_probs: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        row_T: Tensor,
        num_rows: int,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        correction_weight_mean: float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss of each token, [T], and metric sums and extremes (`metric_names`).

        Args:
            entropy: of the policy at each token, with gradient where `entropy_coef` is not 0.
            row_T: row of each token, 0 to num_rows - 1; rows must be whole.
            old_log_probs, rollout_log_probs, ref_log_probs: those that `columns` names.
            correction_weight_mean: see `importance_weights`.

        Returns:
            loss and metrics; `policy_loss`, `entropy` and `kl_loss` are sums over trainable tokens, before their
            coefficients.
        """
        given = {
            "old_log_probs": old_log_probs,
            "rollout_log_probs": rollout_log_probs,
            "ref_log_probs": ref_log_probs,
        }
        missing = [name for name in self.columns if name in given and given[name] is None]
        assert not missing, f"the policy loss needs {missing}"
        base = rollout_log_probs if self.objective == "sao_dis" else old_log_probs
        assert base is not None
        loss_T, metrics = self._surrogate(
            log_probs=log_probs, base=base, advantages=advantages, loss_mask=loss_mask, row_T=row_T, num_rows=num_rows
        )
        ratio_T = log_ratio(log_probs=log_probs.detach(), base_log_probs=base, loss_mask=loss_mask).exp()
        metrics |= effective_sample_size(ratio_T, loss_mask=loss_mask, row_T=row_T, num_rows=num_rows)
        if (correction := self.effective_correction) is not None:
            assert old_log_probs is not None and rollout_log_probs is not None
            assert not correction.batch_normalize or correction_weight_mean is not None, (
                "a batch-normalised correction needs the whole batch's mean weight"
            )
            weight_T, figures = importance_weights(
                correction,
                old_log_probs=old_log_probs,
                rollout_log_probs=rollout_log_probs,
                loss_mask=loss_mask,
                row_T=row_T,
                num_rows=num_rows,
                weight_mean=correction_weight_mean,
            )
            loss_T = loss_T * weight_T
            metrics |= figures
        if self.opsm_delta is not None:
            keep_T, figures = opsm_keep(
                log_probs=log_probs,
                old_log_probs=base,
                advantages=advantages,
                loss_mask=loss_mask,
                row_T=row_T,
                num_rows=num_rows,
                delta=self.opsm_delta,
            )
            loss_T = masked(loss_T, mask=keep_T)
            metrics |= figures
        metrics["policy_loss"] = loss_T.detach().double().sum()
        metrics["entropy"] = masked(entropy.detach(), mask=loss_mask).double().sum()
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * masked(entropy.float(), mask=loss_mask)
        if self.kl_loss_coef:
            assert ref_log_probs is not None
            kl_T = kl_estimate(
                log_probs=log_probs,
                ref_log_probs=ref_log_probs,
                loss_mask=loss_mask,
                kind=self.kl_loss_type,
                behaviour_log_probs=rollout_log_probs if self._kl_needs_rollout else None,
            )
            metrics["kl_loss"] = kl_T.detach().double().sum()
            loss_T = loss_T + self.kl_loss_coef * kl_T
        return loss_T, metrics

    def _surrogate(
        self,
        *,
        log_probs: Tensor,
        base: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        row_T: Tensor,
        num_rows: int,
    ) -> tuple[Tensor, Metrics]:
        if self.objective == "sao_dis":
            return sao_dis(
                log_probs=log_probs,
                rollout_log_probs=base,
                advantages=advantages,
                loss_mask=loss_mask,
                eps_clip=self.eps_clip,
                eps_clip_high=_high(self.eps_clip, self.eps_clip_high),
                ratio_grad=self.ratio_grad,
            )
        shared = {
            "log_probs": log_probs,
            "old_log_probs": base,
            "advantages": advantages,
            "loss_mask": loss_mask,
        }
        if self.objective == "gspo":
            return gspo(
                **shared, row_T=row_T, num_rows=num_rows, eps_clip=self.eps_clip, eps_clip_high=self.eps_clip_high
            )
        if self.objective == "cispo":
            return cispo(**shared, eps_clip=self.eps_clip, eps_clip_high=self.eps_clip_high)
        return ppo_clip(**shared, eps_clip=self.eps_clip, eps_clip_high=self.eps_clip_high, dual_clip=self.dual_clip)


_PER_TOKEN_FRACTIONS = {
    "clipped": "clip_fraction",
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "dual_clipped": "dual_clip_fraction",
    "rejected": "sao_dis_rejectfrac",
    "rejected_low": "sao_dis_low_rejectfrac",
    "rejected_high": "sao_dis_high_rejectfrac",
    "correction_rejected": "correction_reject_fraction",
    "correction_bounded": "correction_bounded_fraction",
    "correction_weight": "correction_weight_mean",
    "opsm_dropped": "opsm_drop_fraction",
    "ratio": "ratio_mean",
    "approx_kl": "approx_kl",
    "entropy": "entropy",
    "policy_loss": "policy_loss",
    "kl_loss": "kl_loss",
}


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Figures to log from the summed metrics of a whole batch: means over trainable tokens, extremes as they are.

    `ess` becomes the mean over rows. Names that `sums` has not are left out.
    """
    tokens = sums["tokens"]
    figures = {name: sums[key] / tokens for key, name in _PER_TOKEN_FRACTIONS.items() if key in sums and tokens}
    figures |= {name: number for name, number in sums.items() if name.endswith(("_max", "_min"))}
    if sums.get("ess_rows"):
        figures["ess"] = sums["ess"] / sums["ess_rows"]
    return figures
