"""Log-probability and entropy of tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _LogProbEntropy(torch.autograd.Function):
    """log p(target) and entropy per row; saves the logits and recomputes the softmax in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        first_column: int,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = logits_TV.shape[1]
        if columns:
            max_T = logits_TV.max(dim=1).values
        else:
            max_T = logits_TV.new_full((logits_TV.shape[0],), -torch.inf)
        if group is not None:
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV - max_T[:, None]
        exp_TV = shifted_TV.exp()
        local_T = targets_T - first_column
        owned_T = (local_T >= 0) & (local_T < columns)
        index_T = torch.where(owned_T, local_T, 0)
        if columns:
            target_T = torch.where(owned_T, shifted_TV.gather(1, index_T[:, None]).squeeze(1), 0.0)
        else:
            target_T = torch.zeros_like(max_T)
        sums = [exp_TV.sum(dim=1), target_T]
        if with_entropy:
            sums.append((exp_TV * shifted_TV).sum(dim=1))
        stacked = torch.stack(sums)
        if group is not None:
            dist.all_reduce(stacked, group=group)
        log_sum_T = stacked[0].log()
        log_prob_T = stacked[1] - log_sum_T
        # H = log Z - E[z], with z the logits minus their maximum
        entropy_T = log_sum_T - stacked[2] / stacked[0] if with_entropy else torch.zeros_like(log_prob_T)
        ctx.save_for_backward(logits_TV, max_T + log_sum_T, index_T, owned_T, entropy_T)
        ctx.with_entropy = with_entropy
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits_TV, log_z_T, index_T, owned_T, entropy_T = ctx.saved_tensors
        log_prob_grad_T, entropy_grad_T = grads
        log_p_TV = logits_TV - log_z_T[:, None]
        p_TV = log_p_TV.exp()
        grad_TV = -p_TV * log_prob_grad_T[:, None]
        if logits_TV.shape[1]:
            grad_TV.scatter_add_(1, index_T[:, None], torch.where(owned_T, log_prob_grad_T, 0.0)[:, None])
        if ctx.with_entropy:
            # dH/dz = -p (log p + H)
            grad_TV -= p_TV * (log_p_TV + entropy_T[:, None]) * entropy_grad_T[:, None]
        return grad_TV, None, None, None, None


def token_log_probs(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets_T` and, if asked for, entropies, both fp32 [T] and differentiable.

    Args:
        logits_TV: This rank's columns, [T, columns]; rank r holds columns r*columns and on of the padded vocabulary.
        vocab_size: Tokens that exist; columns past it are padding and take no probability.
        rank, group: Tensor-parallel rank and group; None where one rank holds the whole vocabulary.

    Returns:
        (log_probs_T, entropy_T); entropy_T is zero without `with_entropy`.
    """
    first_column = rank * logits_TV.shape[1]
    real = max(0, min(logits_TV.shape[1], vocab_size - first_column))
    log_prob_T, entropy_T = _LogProbEntropy.apply(
        logits_TV[:, :real].float(), targets_T, first_column, with_entropy, group
    )
    return log_prob_T, entropy_T


def gather_columns(logits_TV: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The columns of all tensor-parallel ranks side by side, [T, padded vocabulary]; not differentiable."""
    if group is None:
        return logits_TV
    parts = [torch.empty_like(logits_TV) for _ in range(group.size())]
    dist.all_gather(parts, logits_TV.contiguous(), group=group)
    return torch.cat(parts, dim=1)
