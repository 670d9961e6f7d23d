"""Value head: decoding, targets, losses and the statistics explained variance is made of."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked

EV_STATS = ("_ev_n", "_ev_returns_sum", "_ev_returns_sq_sum", "_ev_residual_sum", "_ev_residual_sq_sum")
MIN_TARGET_VARIANCE = 1e-8  # at or below it explained variance is undefined


def support(*, num_bins: int, reward_range: Sequence[float], like: Tensor) -> Tensor:
    """The values the bins stand for: linspace(LOW, HIGH, num_bins), [B], on `like`'s device in at least float32."""
    low, high = reward_range
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.linspace(low, high, num_bins, dtype=dtype, device=like.device)


def value_from_logits(*, logits_TB: Tensor, loss_type: str, reward_range: Sequence[float]) -> Tensor:
    """Values [..., T] from the head's output [..., T, B], float32.

    "mse": the head is one wide and its output is the value. "classification": softmax(logits) . support. Values are
    never divided by a sampling temperature.

    Raises:
        ValueError: unknown loss type, or a head width that does not go with it.
    """
    width = logits_TB.shape[-1]
    if loss_type == "mse":
        if width != 1:
            raise ValueError(f"value_loss_type mse needs a head of width 1, got {width}")
        return logits_TB.squeeze(-1).float()
    if loss_type != "classification":
        raise ValueError(f"unknown value_loss_type {loss_type!r}, expected mse or classification")
    if width < 2:
        raise ValueError(f"value_loss_type classification needs a head of at least 2 bins, got {width}")
    support_B = support(num_bins=width, reward_range=reward_range, like=logits_TB)
    return (torch.softmax(logits_TB.to(support_B.dtype), dim=-1) * support_B).sum(-1).float()


def two_hot_targets(*, returns_T: Tensor, num_bins: int, reward_range: Sequence[float]) -> Tensor:
    """Probabilities [T, B] with the mass split between the two bins around the return, so that the mean is the return.

    Returns are clamped to the range; a return on a bin gives that bin everything.
    """
    low, high = reward_range
    support_B = support(num_bins=num_bins, reward_range=reward_range, like=returns_T)
    position_T = (returns_T.to(support_B.dtype).clamp(low, high) - low) / (high - low) * (num_bins - 1)
    lower_T = position_T.floor()
    fraction_T = position_T - lower_T
    lower_index_T = lower_T.nan_to_num().long().clamp(0, num_bins - 1)
    targets_TB = position_T.new_zeros(*position_T.shape, num_bins)
    targets_TB.scatter_add_(-1, lower_index_T.unsqueeze(-1), (1.0 - fraction_T).unsqueeze(-1))
    upper_index_T = (lower_index_T + 1).clamp(max=num_bins - 1)
    targets_TB.scatter_add_(-1, upper_index_T.unsqueeze(-1), fraction_T.unsqueeze(-1))
    return targets_TB


def hl_gauss_targets(
    *, returns_T: Tensor, num_bins: int, reward_range: Sequence[float], sigma_ratio: float = 0.75
) -> Tensor:
    """Probabilities [T, B]: a Gaussian around the return, integrated over bins, renormalised (arXiv 2403.03950).

    Bin centres lie ON the ends of the range, so the outer edges stick out by half a bin; sigma = `sigma_ratio` bin
    widths. Hence a return of 0 in [0, 1] with 51 bins decodes to .0074, not to 0. Returns are clamped to the range.
    """
    low, high = reward_range
    support_B = support(num_bins=num_bins, reward_range=reward_range, like=returns_T)
    width = (high - low) / (num_bins - 1)
    edges_E = torch.cat([support_B - width / 2, support_B[-1:] + width / 2])
    mean_T1 = returns_T.to(support_B.dtype).clamp(low, high).unsqueeze(-1)
    cdf_TE = torch.erf((edges_E - mean_T1) / (sigma_ratio * width * math.sqrt(2.0)))
    mass_TB = (cdf_TE[..., 1:] - cdf_TE[..., :-1]) / 2
    return mass_TB / mass_TB.sum(-1, keepdim=True).clamp(min=1e-8)


def mse_value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(V - R)^2 per token; with `old_values` PPO's max((V - R)^2, (clip(V, old +- value_clip) - R)^2). No factor 1/2.

    Args:
        values: with gradient. All tensors have one shape; `returns` and `old_values` are constants.

    Returns:
        loss per token (0 outside the mask) and metric sums: `tokens`, `value_loss`, `value_clipped`.

    Raises:
        ValueError: only one of `old_values` and `value_clip` given.
    """
    if (old_values is None) != (value_clip is None):
        raise ValueError("old_values and value_clip belong together: give both or neither")
    values = masked(values.float(), mask=loss_mask)
    returns = masked(returns.detach().float(), mask=loss_mask)
    loss = (values - returns).square()
    num_clipped = torch.zeros((), dtype=torch.float64, device=loss.device)
    if old_values is not None and value_clip is not None:
        old_values = masked(old_values.detach().float(), mask=loss_mask)
        clipped_loss = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
        num_clipped = (clipped_loss > loss).sum().double()
        loss = torch.maximum(loss, clipped_loss)
    metrics = {
        "tokens": loss_mask.bool().sum().double(),
        "value_loss": loss.detach().double().sum(),
        "value_clipped": num_clipped,
    }
    return loss, metrics


def classification_value_loss(
    *,
    logits_TB: Tensor,
    returns_T: Tensor,
    loss_mask_T: Tensor,
    reward_range: Sequence[float],
    target_type: str,
    sigma_ratio: float = 0.75,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy per token between the head's bins and the target distribution of the return.

    Args:
        logits_TB: head output [..., T, B] with gradient. returns_T, loss_mask_T: [..., T].
        target_type: "hl_gauss" (uses `sigma_ratio`) or "two_hot".

    Returns:
        loss per token (0 outside the mask) and metric sums: `tokens`, `value_loss`, `value_accuracy` (its argmax is
        the target's), `value_entropy` (nats), `value_confidence` (largest probability).
    """
    num_bins = logits_TB.shape[-1]
    mask_T = loss_mask_T.bool()
    logits_TB = masked(logits_TB.float(), mask=mask_T.unsqueeze(-1).expand_as(logits_TB))
    returns_T = masked(returns_T.detach().float(), mask=mask_T)
    if target_type == "hl_gauss":
        targets_TB = hl_gauss_targets(
            returns_T=returns_T, num_bins=num_bins, reward_range=reward_range, sigma_ratio=sigma_ratio
        )
    elif target_type == "two_hot":
        targets_TB = two_hot_targets(returns_T=returns_T, num_bins=num_bins, reward_range=reward_range)
    else:
        raise ValueError(f"unknown value_target_type {target_type!r}, expected hl_gauss or two_hot")
    log_probs_TB = torch.log_softmax(logits_TB, dim=-1)
    loss_T = masked(-(targets_TB * log_probs_TB).sum(-1), mask=mask_T)
    with torch.no_grad():
        probs_TB = log_probs_TB.exp()
        hits_T = probs_TB.argmax(-1) == targets_TB.argmax(-1)
        entropy_T = -(probs_TB * log_probs_TB).sum(-1)
        metrics = {
            "tokens": mask_T.sum().double(),
            "value_loss": loss_T.double().sum(),
            "value_accuracy": (hits_T & mask_T).sum().double(),
            "value_entropy": masked(entropy_T, mask=mask_T).double().sum(),
            "value_confidence": masked(probs_TB.amax(-1), mask=mask_T).double().sum(),
        }
    return loss_T, metrics


def explained_variance_stats(*, values: Tensor, returns: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Additive sufficient statistics of explained variance over the masked-in tokens, float64 scalars.

    residual = return - value. Keys `EV_STATS`. Sum them over micro-batches and ranks, never average a ratio.
    """
    active = loss_mask.bool()
    returns_A = returns.detach()[active].double()
    residual_A = returns_A - values.detach()[active].double()
    numbers = (
        active.sum().double(),
        returns_A.sum(),
        returns_A.square().sum(),
        residual_A.sum(),
        residual_A.square().sum(),
    )
    return dict(zip(EV_STATS, numbers, strict=True))


def explained_variance_from_stats(stats: Mapping[str, float | Tensor]) -> float | None:
    """1 - Var(residual) / Var(return) of summed statistics, or None where it is undefined.

    Undefined: fewer than two targets, or targets that do not vary (variance <= 1e-8, or below what float64 sums can
    resolve at that magnitude). A constant bias does not lower it: look at the mean residual as well.
    """
    n, returns_sum, returns_sq_sum, residual_sum, residual_sq_sum = (float(stats[name]) for name in EV_STATS)
    if n < 2:
        return None
    target_variance = returns_sq_sum / n - (returns_sum / n) ** 2
    residual_variance = max(residual_sq_sum / n - (residual_sum / n) ** 2, 0.0)
    resolution = 1e-14 * returns_sq_sum / n
    if target_variance <= max(MIN_TARGET_VARIANCE, resolution):
        return None
    return 1.0 - residual_variance / target_variance


def explained_variance(*, values: Tensor, returns: Tensor, loss_mask: Tensor | None = None) -> float | None:
    """1 - Var(return - value) / Var(return) over the masked-in tokens, two-pass in float64; None where undefined.

    Without a mask every token counts. Free of the cancellation that sums of squares suffer when the mean is far from
    zero: prefer it wherever all values are in one place.
    """
    active = ... if loss_mask is None else loss_mask.bool()
    returns_A = returns.detach()[active].double()
    if len(returns_A) < 2:
        return None
    target_variance = float(returns_A.var(correction=0))
    if target_variance <= MIN_TARGET_VARIANCE:
        return None
    residual_A = returns_A - values.detach()[active].double()
    return 1.0 - float(residual_A.var(correction=0)) / target_variance
