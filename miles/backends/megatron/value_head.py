"""The critic's output layer: one fp32 linear on the last pipeline stage."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from miles.backends.megatron.parallel import ParallelState

_INITIAL_VALUE_STD = 0.1


class ValueHead(MegatronModule):
    """Linear map from a hidden state to one value, or to the logits of `width` return bins.

    The head is replicated over tensor-parallel ranks, drawn from one generator, so that every layout starts from the
    same numbers, and kept in fp32 whatever the model's dtype. It takes the place of GPTModel.output_layer and
    answers its call.
    """

    def __init__(self, config: TransformerConfig, *, width: int, seed: int, parallel: ParallelState) -> None:
        super().__init__(config=config)
        self.width = width
        self._tp_group = parallel.tp_group
        generator = torch.Generator().manual_seed(seed)
        # The final norm leaves hidden states with a norm near sqrt(hidden), so values start out with this deviation.
        std = _INITIAL_VALUE_STD / math.sqrt(config.hidden_size)
        self.weight = torch.nn.Parameter(torch.randn(width, config.hidden_size, generator=generator) * std)
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Map [s, b, hidden] to [s, b, width] in fp32; under sequence parallelism the sequence is gathered first."""
        assert weight is None, "a critic is built untied"
        if self.config.sequence_parallel:
            # Every rank computes the whole head, so the backward pass splits instead of summing.
            input_ = tensor_parallel.gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return torch.nn.functional.linear(input_.float(), self.weight, self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets=sharded_offsets
        )
