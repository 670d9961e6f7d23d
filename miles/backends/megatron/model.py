"""From an architecture to a Megatron GPTModel on this rank."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.device import Device
from miles.backends.megatron.layer_spec import decoder_spec, transformer_engine_in_use
from miles.backends.megatron.parallel import ParallelState
from miles.backends.megatron.value_head import ValueHead
from miles.backends.megatron.weight_rules import build_rules

# Components of a module path that mark it as attention, for freezing a critic's attention.
ATTENTION_NAMES = frozenset({"attention", "attn", "cross_attention", "cross_attn", "self_attention", "self_attn"})


def transformer_config(
    architecture: Architecture,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
) -> TransformerConfig:
    """Megatron's configuration for `architecture` on this layout."""
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        context_parallel_size=parallel.cp_size,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in length, so stages exchange shapes, which Megatron allows with this dispatcher only.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Every weight is loaded afterwards, so none is drawn.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        batch_p2p_sync=device.is_cuda,
    )


def build_model(
    architecture: Architecture,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    value_width: int | None = None,
    seed: int = 1234,
) -> GPTModel:
    """Build this rank's part of the decoder, with uninitialised weights.

    Args:
        architecture: The decoder; `untied()` for a critic.
        value_width: None for a language model; for a critic the head's width (1 or the number of bins), and the last
            stage then ends in a freshly drawn ValueHead.
        seed: Seeds the value head.

    Raises:
        ValueError: The layout does not divide the model.
    """
    architecture.check_layout(tensor_size=parallel.tp_size, pipeline_size=parallel.pp_size)
    config = transformer_config(
        architecture, parallel=parallel, device=device, dtype=dtype, sequence_parallel=sequence_parallel
    )
    assert value_width is None or not architecture.tied_embeddings, "a critic is built untied"
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, device),  # type: ignore[arg-type]
        vocab_size=architecture.padded_vocab_size(parallel.tp_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
    )
    _mark_sharded(model, architecture, parallel=parallel, fused_norms=transformer_engine_in_use(device))
    if value_width is not None and parallel.is_last_stage:
        head = ValueHead(config, width=value_width, seed=seed, parallel=parallel)
        model.output_layer = cast(Any, head)  # GPTModel calls it as it calls its own output layer
    elif parallel.is_last_stage and not sequence_parallel:
        _make_rows_first(model.output_layer)
    return model.to(device.torch_device)


def _make_rows_first(output_layer: torch.nn.Module) -> None:
    """Let the output layer lay out logits as GPTModel returns them.

    It turns [sequence, rows, vocabulary] into a contiguous [rows, sequence, vocabulary]: for more than one row a
    second copy of the largest tensor of a training step, and two more of its gradient. Here the hidden states are
    turned before. With sequence parallelism they are whole only inside the layer, so there the copies stay.
    """

    def before(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return given[0].transpose(0, 1).contiguous(), *given[1:]

    def after(_: torch.nn.Module, given: Any, found: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return found[0].transpose(0, 1), *found[1:]

    output_layer.register_forward_pre_hook(before)
    output_layer.register_forward_hook(after)


def _mark_sharded(model: GPTModel, architecture: Architecture, *, parallel: ParallelState, fused_norms: bool) -> None:
    """Mark the parameters that are split over tensor-parallel ranks, as Megatron does only while it draws weights.

    Without the marks the gradient norm would count their parts on the first rank alone.
    """
    params = dict(model.named_parameters())
    rules = build_rules(architecture, pipeline_size=parallel.pp_size, fused_norms=fused_norms)
    for rule in rules:
        if rule.kind != "copy" and rule.stage == parallel.pp_rank:
            _mark(params[rule.megatron], dimension=1 if rule.kind == "columns" else 0)
    if architecture.tied_embeddings and "output_layer.weight" in params:
        _mark(params["output_layer.weight"], dimension=0)


def _mark(param: torch.nn.Parameter, *, dimension: int) -> None:
    # Attributes that Megatron's optimizer reads from the parameter.
    vars(param).update(tensor_model_parallel=True, partition_dim=dimension, partition_stride=1)


def freeze_attention(model: torch.nn.Module) -> dict[str, int]:
    """Exclude every attention parameter from training; a shared tensor counts once.

    Returns:
        {"tensors": ..., "elements": ...} frozen on this rank.

    Raises:
        RuntimeError: No module matched.
    """
    frozen: dict[int, torch.nn.Parameter] = {}
    for name, module in model.named_modules():
        if ATTENTION_NAMES.isdisjoint(name.lower().split(".")):
            continue
        for param in module.parameters():
            param.requires_grad_(False)
            frozen[id(param)] = param
    if not frozen:
        raise RuntimeError("critic attention freeze matched no parameters")
    return {"tensors": len(frozen), "elements": sum(param.numel() for param in frozen.values())}
