"""Log-probability and entropy of tokens from logits whose vocabulary is split over tensor-parallel ranks.

Logits are the largest tensor of a training step: [tokens, vocabulary]. Here they are read in chunks of tokens,
computed with in at least fp32, and never copied as a whole: beside the logits live one to three chunks (three with the
entropy of logits below fp32), in the backward pass their gradient too, and none where it may take the logits' place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits in a chunk: on a CPU what its cache holds, on a GPU enough to keep it busy."""
_MIN_SHIFTED = -1e4
"""Logits further than this below the largest have probability 0; -inf would make 0 * -inf of the entropy."""


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def _read(logits_SV: torch.Tensor, rows: slice | torch.Tensor, columns: int) -> torch.Tensor:
    """A chunk's logits of real columns, a fresh tensor in at least fp32."""
    chunk = logits_SV[rows, :columns]
    return chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=isinstance(rows, slice))


def _shift_and_scale_(z_CV: torch.Tensor, offset_C: torch.Tensor, scale: float) -> torch.Tensor:
    """(z - offset) * scale in place; in this order what rounding takes from large logits is not scaled up."""
    z_CV.sub_(offset_C[:, None])
    return z_CV if scale == 1.0 else z_CV.mul_(scale)


class _LogProbEntropy(torch.autograd.Function):
    """Saves the logits and one number per token; the softmax is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_SV: torch.Tensor,
        targets_T: torch.Tensor,
        positions_T: torch.Tensor | None,
        first_column: int,
        columns: int,
        scale: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        chunk_tokens: int,
        reuse_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(targets_T)
        dtype = torch.promote_types(logits_SV.dtype, torch.float32)
        local_T = targets_T - first_column
        index_T = torch.where((local_T >= 0) & (local_T < columns), local_T, -1)
        max_T = logits_SV.new_full((num_tokens,), -torch.inf, dtype=dtype)
        # with y = (z - max) / temperature, per token: sum of exp(y), the target's y where it is ours, sum of exp(y) y
        sums_3T = logits_SV.new_zeros((3, num_tokens), dtype=dtype)
        for part in _chunks(num_tokens, chunk_tokens) if columns else ():
            z_CV = _read(logits_SV, part if positions_T is None else positions_T[part], columns)
            max_T[part] = z_CV.amax(dim=1)
            sums_3T[1, part] = z_CV.gather(1, index_T[part].clamp(min=0)[:, None]).squeeze(1)
            _shift_and_scale_(z_CV, max_T[part], scale)
            if with_entropy:
                shifted_CV = z_CV.clamp_(min=_MIN_SHIFTED)
                exp_CV = shifted_CV.exp()
                sums_3T[2, part] = torch.linalg.vecdot(exp_CV, shifted_CV)
            else:
                exp_CV = z_CV.exp_()
            sums_3T[0, part] = exp_CV.sum(dim=1)
        if group is not None:
            local_max_T = max_T.clone()
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
            # a rank that holds nothing but padding has no maximum, and adds zeros
            drop_T = ((local_max_T - max_T) * scale).clamp(min=_MIN_SHIFTED)
            sums_3T[2].addcmul_(drop_T, sums_3T[0]).mul_(drop_T.exp())
            sums_3T[0].mul_(drop_T.exp())
        sums_3T[1] = torch.where(index_T >= 0, (sums_3T[1] - max_T) * scale, 0.0)
        if group is not None:
            dist.all_reduce(sums_3T, group=group)
        log_sum_T = sums_3T[0].log()
        log_prob_T = sums_3T[1] - log_sum_T
        # H = log Z - E[y]
        entropy_T = log_sum_T - sums_3T[2] / sums_3T[0] if with_entropy else torch.zeros_like(log_prob_T)
        ctx.save_for_backward(logits_SV, positions_T, max_T + log_sum_T / scale, index_T, entropy_T)
        ctx.columns, ctx.scale, ctx.chunk_tokens, ctx.reuse_logits = columns, scale, chunk_tokens, reuse_logits
        ctx.consumed = False
        ctx.set_materialize_grads(False)
        return log_prob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        log_prob_grad_T, entropy_grad_T = grads
        nothing = (None,) * 9
        if log_prob_grad_T is None and entropy_grad_T is None:
            return None, *nothing
        assert not ctx.consumed, "the logits have become their gradient: there is no second backward pass"
        logits_SV, positions_T, offset_T, index_T, entropy_T = ctx.saved_tensors
        num_tokens, columns = len(offset_T), ctx.columns
        if ctx.reuse_logits:
            ctx.consumed = True
            grad_SV = logits_SV.detach()
            grad_SV[:, columns:] = 0.0
            if positions_T is not None:
                unread_S = torch.ones(len(grad_SV), dtype=torch.bool, device=grad_SV.device)
                unread_S[positions_T] = False
                grad_SV.masked_fill_(unread_S[:, None], 0.0)
        else:
            whole = positions_T is None and columns == logits_SV.shape[1]
            grad_SV = torch.empty_like(logits_SV) if whole else torch.zeros_like(logits_SV)
        for part in _chunks(num_tokens, ctx.chunk_tokens) if columns else ():
            rows = part if positions_T is None else positions_T[part]
            # log p
            grad_CV = _shift_and_scale_(_read(logits_SV, rows, columns), offset_T[part], ctx.scale)
            if entropy_grad_T is None:
                assert log_prob_grad_T is not None
                grad_CV.exp_().mul_(-log_prob_grad_T[part, None])
            else:
                # dH/dy = -p (log p + H)
                p_CV = grad_CV.exp()
                grad_CV.clamp_(min=_MIN_SHIFTED).add_(entropy_T[part, None]).mul_(-entropy_grad_T[part, None])
                if log_prob_grad_T is not None:
                    grad_CV.sub_(log_prob_grad_T[part, None])
                grad_CV.mul_(p_CV)
            if log_prob_grad_T is not None:
                index_C = index_T[part]
                ours_C = torch.where(index_C >= 0, log_prob_grad_T[part], 0.0)
                grad_CV.scatter_add_(1, index_C.clamp(min=0)[:, None], ours_C[:, None])
            if ctx.scale != 1.0:
                grad_CV.mul_(ctx.scale)
            grad_SV[rows, :columns] = grad_CV.to(grad_SV.dtype)
        return grad_SV, *nothing


def token_log_probs(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    temperature: float = 1.0,
    positions_T: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
    reuse_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets_T` and, if asked for, entropies, both [T], differentiable, in at least fp32.

    Memory beside the logits: one chunk; in the backward pass their gradient too, in their dtype, unless it takes their
    place.

    Args:
        logits_TV: This rank's columns, [T, columns], or [S, columns] with `positions_T`; rank r holds columns
            r * columns and on of the padded vocabulary. Any float dtype; bf16 is computed with in fp32.
        targets_T: Token ids.
        vocab_size: Tokens that exist; columns past it are padding and take no probability.
        rank, group: Tensor-parallel rank and group; None where one rank holds the whole vocabulary.
        temperature: Divides the logits, as sampling did.
        positions_T: Row of the logits that predicts each target, no row twice; spares a copy of the selected rows.
        chunk_tokens: Tokens computed at once; None takes a number that suits vocabulary and device. Changes no result.
        reuse_logits: Write the gradient over the logits. Nobody may read them after the backward pass, which happens
            once. They must not be a leaf.

    Returns:
        (log_probs_T, entropy_T); entropy_T is zero without `with_entropy`.
    """
    assert not (reuse_logits and logits_TV.is_leaf and logits_TV.requires_grad), "a leaf cannot become its gradient"
    columns = logits_TV.shape[1]
    first_column = rank * columns
    real = max(0, min(columns, vocab_size - first_column))
    if chunk_tokens is None:
        chunk_tokens = max(1, _CHUNK_ELEMENTS.get(logits_TV.device.type, 1 << 24) // max(real, 1))
    return _LogProbEntropy.apply(
        logits_TV,
        targets_T,
        positions_T,
        first_column,
        real,
        1.0 / temperature,
        with_entropy,
        group,
        chunk_tokens,
        reuse_logits,
    )


def gather_columns(logits_TV: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The columns of all tensor-parallel ranks side by side, [T, padded vocabulary]; not differentiable."""
    if group is None:
        return logits_TV
    parts = [torch.empty_like(logits_TV) for _ in range(group.size())]
    dist.all_gather(parts, logits_TV.contiguous(), group=group)
    return torch.cat(parts, dim=1)
