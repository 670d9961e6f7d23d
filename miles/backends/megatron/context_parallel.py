"""Sequences shared by context-parallel ranks: who holds which token, and how tokens come together again.

As in Megatron, a sequence of a length that 2 * size divides is cut into 2 * size chunks, and rank r holds chunks r and
2 * size - 1 - r, so that every rank has as much causal attention to compute. A rank keeps its tokens in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def token_owners(lengths: np.ndarray, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the tokens of sequences that follow one another lie.

    Args:
        lengths: Tokens of each sequence, multiples of 2 * size.
        size: Context-parallel ranks.

    Returns:
        For each token, in order: the rank that holds it, and its place among that rank's tokens; both [sum(lengths)].
    """
    assert not (lengths % (2 * size)).any(), "context parallelism needs sequences filled to 2 * size chunks"
    start_N = np.cumsum(lengths) - lengths
    chunk = np.repeat(lengths // (2 * size), lengths)
    within = np.arange(len(chunk)) - np.repeat(start_N, lengths)
    number = within // np.maximum(chunk, 1)
    second_half = number >= size
    owner = np.where(second_half, 2 * size - 1 - number, number)
    place = np.repeat(start_N // size, lengths) + within - number * chunk + second_half * chunk
    return owner, place


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_L: torch.Tensor, place_L: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(place_L)
        whole_T = x_L.new_zeros(total, *x_L.shape[1:])
        whole_T[place_L] = x_L
        dist.all_reduce(whole_T, group=group)
        return whole_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place_L,) = ctx.saved_tensors
        return grads[0].index_select(0, place_L), None, None, None


def join_tokens(x_L: torch.Tensor, place_L: torch.Tensor, *, total: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tokens [T, ...] of all ranks of `group`, the same on each, from this rank's [L, ...].

    Every rank goes on to compute the same loss of all tokens, so the backward pass hands each its own tokens'
    gradient, once.

    Args:
        place_L: Where this rank's tokens go among the T = `total`.
    """
    return _JoinTokens.apply(x_L, place_L, total, group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        # gloo has no reduce-scatter
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def gather_sequence(x: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    """Keys or values [s, ...] of all ranks, [size * s, ...] in rank order; each rank's queries add to the gradient."""
    return _GatherSequence.apply(x, group)
