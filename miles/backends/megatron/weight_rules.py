"""Which Hugging Face tensors each Megatron parameter is made of, and whether a folder has them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.backends.megatron.architecture import Architecture
from miles.config.hf_folder import read_safetensors_header, weight_files

Kind = Literal["copy", "columns", "qkv", "gate_up", "vocab"]

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
_LAYERS = "model.layers."
# Buffers that old exports carry and nobody loads.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made of Hugging Face tensors.

    `kind`: "copy" replicates over tensor-parallel ranks; "columns" splits dimension 1; "qkv" and "gate_up" merge
    several tensors as `weights` says in its first lines; "vocab" splits dimension 0 after padding.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each Hugging Face tensor."""
    kind: Kind
    stage: int
    """Pipeline stage that holds the parameter."""


def build_rules(
    architecture: Architecture, *, pipeline_size: int, fused_norms: bool = False, output_layer: bool = True
) -> list[Rule]:
    """Rules of the whole model in a fixed order, the same on every rank.

    Args:
        fused_norms: Transformer Engine's names, where a norm's weight belongs to the linear layer after it.
        output_layer: Whether an untied model's language-model head is included; a critic has none.
    """
    a = architecture
    head, hidden, ffn = a.head_dim, a.hidden_size, a.ffn_hidden_size
    queries, keys = a.num_attention_heads * head, a.num_query_groups * head
    per_stage = a.num_layers // pipeline_size
    last = pipeline_size - 1
    rules = [Rule("embedding.word_embeddings.weight", (EMBEDDING,), ((a.vocab_size, hidden),), "vocab", 0)]
    for layer in range(a.num_layers):
        stage, local = divmod(layer, per_stage)
        ours, theirs = f"decoder.layers.{local}.", f"{_LAYERS}{layer}."
        attention, mlp = ours + "self_attention.", ours + "mlp."
        their_attention, their_mlp = theirs + "self_attn.", theirs + "mlp."

        def add(megatron: str, hf: list[str], shapes: list[tuple[int, ...]], kind: Kind, stage: int = stage) -> None:
            rules.append(Rule(megatron, tuple(hf), tuple(shapes), kind, stage))

        input_norm = attention + "linear_qkv.layer_norm_weight" if fused_norms else ours + "input_layernorm.weight"
        mlp_norm = mlp + "linear_fc1.layer_norm_weight" if fused_norms else ours + "pre_mlp_layernorm.weight"
        projections = [their_attention + f"{x}_proj" for x in "qkv"]
        add(input_norm, [theirs + "input_layernorm.weight"], [(hidden,)], "copy")
        add(
            attention + "linear_qkv.weight",
            [name + ".weight" for name in projections],
            [(queries, hidden), (keys, hidden), (keys, hidden)],
            "qkv",
        )
        if a.qkv_bias:
            add(
                attention + "linear_qkv.bias",
                [name + ".bias" for name in projections],
                [(queries,), (keys,), (keys,)],
                "qkv",
            )
        if a.qk_norm:
            for x in "qk":
                add(attention + f"{x}_layernorm.weight", [their_attention + f"{x}_norm.weight"], [(head,)], "copy")
        add(attention + "linear_proj.weight", [their_attention + "o_proj.weight"], [(hidden, queries)], "columns")
        add(mlp_norm, [theirs + "post_attention_layernorm.weight"], [(hidden,)], "copy")
        add(
            mlp + "linear_fc1.weight",
            [their_mlp + "gate_proj.weight", their_mlp + "up_proj.weight"],
            [(ffn, hidden), (ffn, hidden)],
            "gate_up",
        )
        add(mlp + "linear_fc2.weight", [their_mlp + "down_proj.weight"], [(hidden, ffn)], "columns")
    rules.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), "copy", last))
    if output_layer and not a.tied_embeddings:
        rules.append(Rule("output_layer.weight", (OUTPUT,), ((a.vocab_size, hidden),), "vocab", last))
    return rules


def check_tensors(folder: str | Path, architecture: Architecture, *, output_layer: bool) -> None:
    """Compare the names and shapes in a Hugging Face folder's weight files with those of a model, in milliseconds.

    Args:
        output_layer: whether an untied model's language-model head must be there.

    Raises:
        ValueError: a file is missing, truncated or damaged, or a tensor is missing, unknown, or of another shape; the
            line names folder or file, and tensor.
    """
    config = Path(folder) / "config.json"
    file_of, shapes = dict[str, Path](), dict[str, tuple[int, ...]]()
    for path in weight_files(Path(folder)):
        for name, entry in read_safetensors_header(path).items():
            if not name.endswith(_IGNORED_SUFFIX):
                file_of[name], shapes[name] = path, tuple(entry["shape"])
    layers = {name.removeprefix(_LAYERS).split(".")[0] for name in shapes if name.startswith(_LAYERS)}
    if len(layers) != architecture.num_layers:
        raise ValueError(
            f"{config}: num_hidden_layers is {architecture.num_layers}, the weight files hold {len(layers)} layers"
        )
    rules = build_rules(architecture, pipeline_size=1, output_layer=output_layer)
    expected = {name: shape for rule in rules for name, shape in zip(rule.hf, rule.shapes, strict=True)}
    for name, shape in expected.items():
        if name not in shapes:
            kind = f"a {architecture.model_type} model as config.json describes it has one"
            raise ValueError(f"{folder}: tensor {name} is missing; {kind}")
        if shapes[name] != shape:
            raise ValueError(
                f"{file_of[name]}: tensor {name} has shape {list(shapes[name])}, config.json asks for {list(shape)}"
            )
    unknown = sorted(shapes.keys() - expected.keys() - {OUTPUT})
    if unknown:
        raise ValueError(
            f"{file_of[unknown[0]]}: tensor {unknown[0]} has no place in a {architecture.model_type} model"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else "")
        )
