"""Which modules a decoder layer is made of.

With CUDA and Transformer Engine installed the layers are Megatron's Transformer Engine spec. Everywhere else they are
Megatron's local spec with two pieces of ours: an RMSNorm that may run under sequence parallelism, and an attention
core on `torch.nn.functional.scaled_dot_product_attention` that also takes packed sequences.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron.context_parallel import gather_sequence, token_owners
from miles.backends.megatron.device import Device

# Packed sequences within this ratio of the longest share a batch.
_LENGTH_SPREAD = 1.5


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for gradient summation over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron's gradient finalisation reads this attribute from the parameter.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SdpaCoreAttention(MegatronModule):
    """Causal attention on PyTorch's SDPA: padded [s, b, n, d] or packed [t, n, d] queries, keys and values.

    Right padding needs no mask: under a causal mask no token sees what follows it. In the packed form each sequence of
    `cu_seqlens_q` attends to itself only. Under context parallelism the tokens are this rank's share of every sequence
    (see context_parallel); keys and values of all ranks are gathered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        assert config.attention_dropout == 0.0, "SdpaCoreAttention has no dropout"
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, n, d], or [t, n, d] with `packed_seq_params`.
            key, value: The same with the number of key/value heads in place of n.
            attention_mask: None (causal), the only one supported.

        Returns:
            [s, b, n*d], or [t, n*d] when packed.
        """
        assert attention_bias is None and attention_mask is None, "only causal attention is supported"
        rank, size = 0, 1
        if self._cp_group is not None:
            rank, size = self._cp_group.rank(), self._cp_group.size()
            key, value = (gather_sequence(x, group=self._cp_group) for x in (key, value))
        if packed_seq_params is None:
            allowed = None
            if size > 1:
                ((_, key_place, allowed, _),), _ = _packing_plan((query.shape[0] * size,), rank, size)
                key, value = (x.index_select(0, key_place.flatten().to(x.device)) for x in (key, value))
            return self._attend(query, key, value, allowed).flatten(2)

        assert packed_seq_params.cu_seqlens_q is not None
        groups, order = _packing_plan(tuple(packed_seq_params.cu_seqlens_q.diff().tolist()), rank, size)
        pieces = []
        for query_place, key_place, allowed, real in groups:
            q, k, v = (
                x.index_select(0, place.flatten().to(x.device)).unflatten(0, place.shape)
                for x, place in ((query, query_place), (key, key_place), (value, key_place))
            )
            out = self._attend(q, k, v, allowed).flatten(0, 1)
            pieces.append(out.index_select(0, real.to(query.device)))
        return torch.cat(pieces).index_select(0, order.to(query.device)).flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of [s, b, n, d] tensors, causal where `allowed` is None; [s, b, n, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if allowed is None else allowed.to(q.device),
            is_causal=allowed is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[-2] != key.shape[-2],
        )
        return out.permute(2, 0, 1, 3)


_Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


@functools.lru_cache(maxsize=4)
def _packing_plan(lengths: tuple[int, ...], rank: int, size: int) -> tuple[list[_Group], torch.Tensor]:
    """How to attend to packed sequences of these lengths a few batches at a time, without a loop over sequences.

    Sequences of similar length share a batch, so little of it is padding. Every layer asks anew, hence the cache.

    Args:
        rank, size: Of the context-parallel group, whose ranks share every sequence.

    Returns:
        For each batch: `query_place` [queries, sequences], this rank's token for each of its places (0 where a
        sequence has ended); `key_place` [keys, sequences], the same among the tokens of all ranks in rank order;
        `allowed` [sequences, 1, queries, keys], None where places are positions (one rank); and `real`, the flattened
        query places that hold a token. And the order that takes the concatenated real tokens of all batches back to
        their packed positions.
    """
    length_N = np.asarray(lengths)
    start_N = np.cumsum(length_N) - length_N
    total = int(length_N.sum()) // size
    owner, place = token_owners(length_N, size=size) if size > 1 else (0, np.arange(total))
    in_rank_order = owner * total + place
    by_length = np.argsort(-length_N, kind="stable")
    groups: list[_Group] = []
    seen = []
    while len(by_length):
        longest = int(length_N[by_length[0]])
        count = int((length_N[by_length] * _LENGTH_SPREAD >= longest).sum())
        members, by_length = by_length[:count], by_length[count:]
        key_S1 = np.arange(longest)[:, None]
        key_inside = key_S1 < length_N[members]
        key_place = np.where(key_inside, in_rank_order[np.where(key_inside, start_N[members] + key_S1, 0)], 0)
        query_S1 = np.arange(longest // size)[:, None]
        inside = query_S1 < length_N[members] // size
        query_place = np.where(inside, start_N[members] // size + query_S1, 0)
        allowed = None
        if size > 1:
            chunk = length_N[members] // (2 * size)
            position = query_S1 + np.where(query_S1 < chunk, rank * chunk, (2 * size - 2 - rank) * chunk)
            # Places past a sequence's end attend to its first token, so that their softmax is of something.
            position = np.where(inside, position, 0)
            allowed = torch.from_numpy(position.T[:, None, :, None] >= np.arange(longest))
        real = np.flatnonzero(inside)
        groups.append((torch.from_numpy(query_place), torch.from_numpy(key_place), allowed, torch.from_numpy(real)))
        seen.append(query_place.reshape(-1)[real])
    return groups, torch.from_numpy(np.argsort(np.concatenate(seen)))


def transformer_engine_in_use(device: Device) -> bool:
    """Whether layers are built from Transformer Engine modules on this device."""
    return device.is_cuda and importlib.util.find_spec("transformer_engine") is not None


def decoder_spec(config: TransformerConfig, device: Device) -> ModuleSpec | TransformerBlockSubmodules:
    """The layer spec of a dense decoder for this device, for this pipeline stage."""
    if transformer_engine_in_use(device):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = cast(Any, layer.submodules)
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=cast(Any, RMSNorm)
    )
