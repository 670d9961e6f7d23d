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
    `cu_seqlens_q` attends to itself only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        assert config.attention_dropout == 0.0, "SdpaCoreAttention has no dropout"
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
            attention_mask: None (causal); True where a pair may not attend, [b or 1, 1, s, s].

        Returns:
            [s, b, n*d], or [t, n*d] when packed.
        """
        assert attention_bias is None, "attention bias is not supported"
        if packed_seq_params is None:
            allowed = None if attention_mask is None else ~attention_mask
            out = self._attend(query, key, value, allowed)
            return out.reshape(query.shape[0], query.shape[1], -1)

        assert packed_seq_params.cu_seqlens_q is not None
        groups, order = _packing_plan(tuple(packed_seq_params.cu_seqlens_q.diff().tolist()))
        pieces = []
        for token, real in groups:
            flat = token.flatten().to(query.device)
            q, k, v = (x.index_select(0, flat).unflatten(0, token.shape) for x in (query, key, value))
            out = self._attend(q, k, v, None).flatten(0, 1)
            pieces.append(out.index_select(0, real.to(query.device)))
        return torch.cat(pieces).index_select(0, order.to(query.device)).flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of [s, b, n, d] tensors; [s, b, n, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[-2] != key.shape[-2],
        )
        return out.permute(2, 0, 1, 3)


@functools.lru_cache(maxsize=4)
def _packing_plan(lengths: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """How to attend to packed sequences of these lengths a few batches at a time, without a loop over sequences.

    Sequences of similar length share a batch, so little of it is padding. Every layer asks anew, hence the cache.

    Returns:
        For each batch: `token` [longest, sequences], the packed position of each of its places (0 where a sequence has
        ended), and `real`, the flattened places that hold a token. And the order that takes the concatenated real
        tokens of all batches back to their packed positions.
    """
    length_N = np.asarray(lengths)
    start_N = np.cumsum(length_N) - length_N
    by_length = np.argsort(-length_N, kind="stable")
    groups, seen = [], []
    while len(by_length):
        longest = int(length_N[by_length[0]])
        count = int((length_N[by_length] * _LENGTH_SPREAD >= longest).sum())
        members, by_length = by_length[:count], by_length[count:]
        place_S1 = np.arange(longest)[:, None]
        inside = place_S1 < length_N[members]
        token = np.where(inside, start_N[members] + place_S1, 0)
        real = np.flatnonzero(inside)
        groups.append((torch.from_numpy(token), torch.from_numpy(real)))
        seen.append(token.reshape(-1)[real])
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
