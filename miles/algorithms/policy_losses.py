"""Policy losses per token."""

import torch
from torch import Tensor

from miles.algorithms.aggregation import masked
from miles.algorithms.kl import log_ratio


def ppo_clip(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) with r = exp(log ratio).

    The log-ratio is clamped to +-20 and taken in float32 (arXiv 1707.06347).

    Args:
        log_probs: of the policy being trained, with gradient. All four tensors have one shape.
        old_log_probs, advantages: constants; gradients are stopped here.
        eps_clip_high: upper band, default `eps_clip`.

    Returns:
        loss per token (0 outside the mask) and detached metric scalars to be put together with
        `aggregation.add_metrics`: `clipped` (tokens whose clipped branch is the larger), `approx_kl` (sum of
        r - 1 - log r, an estimate of KL(old || new)), `tokens`, and `ratio_max` / `ratio_min` (absent without tokens).
        Divide the first two by `tokens` for means.
    """
    eps_clip_high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio_T = log_ratio(log_probs=log_probs, base_log_probs=old_log_probs.detach(), loss_mask=loss_mask)
    advantages = masked(advantages.detach().float(), loss_mask)
    ratio = torch.exp(log_ratio_T)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    with torch.no_grad():
        metrics = {
            "tokens": loss_mask.bool().sum().double(),
            "clipped": (clipped > plain).sum().double(),
            "approx_kl": (ratio - 1 - log_ratio_T).double().sum(),
        }
        active = ratio[loss_mask.bool()]
        if active.numel():
            metrics["ratio_max"] = active.max().double()
            metrics["ratio_min"] = active.min().double()
    return torch.maximum(plain, clipped), metrics
