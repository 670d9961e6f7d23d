"""A model folder whose config.json and weight files do not fit each other, or the backend, is refused; no torch."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.weight_rules import check_tensors
from miles.config.hf_folder import INDEX_FILE

CONFIG: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
}
LAYER = {
    "input_layernorm.weight": [8],
    "self_attn.q_proj.weight": [8, 8],
    "self_attn.k_proj.weight": [4, 8],
    "self_attn.v_proj.weight": [4, 8],
    "self_attn.o_proj.weight": [8, 8],
    "post_attention_layernorm.weight": [8],
    "mlp.gate_proj.weight": [12, 8],
    "mlp.up_proj.weight": [12, 8],
    "mlp.down_proj.weight": [8, 12],
}
OF_TYPE: dict[str, dict[str, list[int]]] = {
    "llama": {},
    "qwen2": {"self_attn.q_proj.bias": [8], "self_attn.k_proj.bias": [4], "self_attn.v_proj.bias": [4]},
    "qwen3": {"self_attn.q_norm.weight": [2], "self_attn.k_norm.weight": [2]},
}


def tensors_of(model_type: str) -> dict[str, list[int]]:
    layer = LAYER | OF_TYPE[model_type]
    return {
        "model.embed_tokens.weight": [10, 8],
        **{f"model.layers.{number}.{name}": shape for number in (0, 1) for name, shape in layer.items()},
        "model.norm.weight": [8],
        "lm_head.weight": [10, 8],
    }


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    entries, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write("llama", tensors={name: shape or None}, **config): a whole folder, changed so; None leaves a key out."""

    def make(kind: str, *, tensors: dict[str, list[int] | None] | None = None, **config: Any) -> Path:
        settings = {"model_type": kind, **CONFIG, **({"head_dim": 2} if kind == "qwen3" else {}), **config}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v != "absent"}))
        shapes = tensors_of(kind) | (tensors or {})
        write_header(tmp_path / "model.safetensors", {n: s for n, s in shapes.items() if s is not None})
        return tmp_path

    return make


def check(folder: Path, *, output_layer: bool = True) -> None:
    check_tensors(folder, Architecture.from_hf(folder), output_layer=output_layer)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_whole_folder_of_each_type_is_accepted(write: Callable[..., Path], model_type: str) -> None:
    check(write(model_type))
    check(write(model_type, tensors={"lm_head.weight": None}, tie_word_embeddings=True))
    check(write(model_type, tensors={"lm_head.weight": None}), output_layer=False)


def test_folder_in_shards_with_buffers_of_old_exports_is_accepted(write: Callable[..., Path]) -> None:
    folder = write("llama")
    names = list(shapes := tensors_of("llama") | {"model.layers.1.self_attn.rotary_emb.inv_freq": [1]})
    files = {f"model-{i + 1}-of-2.safetensors": names[i::2] for i in (0, 1)}
    for file, inside in files.items():
        write_header(folder / file, {name: shapes[name] for name in inside})
    (folder / "model.safetensors").unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {n: f for f, inside in files.items() for n in inside}}))
    check(folder)


@pytest.mark.parametrize(
    ("model_type", "tensors", "config", "message"),
    [
        ("llama", {}, {"hidden_size": 16}, "embed_tokens.weight has shape [10, 8], config.json asks for [10, 16]"),
        ("llama", {}, {"vocab_size": 11}, "embed_tokens.weight has shape [10, 8], config.json asks for [11, 8]"),
        ("llama", {}, {"intermediate_size": 6}, "gate_proj.weight has shape [12, 8], config.json asks for [6, 8]"),
        ("llama", {}, {"num_key_value_heads": 4}, "k_proj.weight has shape [4, 8], config.json asks for [8, 8]"),
        ("llama", {}, {"num_hidden_layers": 3}, "num_hidden_layers is 3, the weight files hold 2 layers"),
        ("llama", {}, {"num_hidden_layers": 1}, "num_hidden_layers is 1, the weight files hold 2 layers"),
        ("llama", {}, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, the weight files hold 2"),
        ("llama", {}, {"model_type": "qwen2"}, "tensor model.layers.0.self_attn.q_proj.bias is missing; a qwen2"),
        ("qwen2", {}, {"model_type": "llama"}, "layers.0.self_attn.k_proj.bias has no place in a llama model (and 5"),
        ("llama", {"lm_head.weight": None}, {}, "tensor lm_head.weight is missing; a llama model"),
        ("qwen3", {"model.layers.1.self_attn.k_norm.weight": [3]}, {}, "has shape [3], config.json asks for [2]"),
    ],
)
def test_weights_that_config_does_not_describe_are_refused_by_tensor_or_key(
    write: Callable[..., Path], model_type: str, tensors: Any, config: dict[str, Any], message: str
) -> None:
    folder = write(model_type, tensors=tensors, **config)
    with pytest.raises(ValueError, match=r".") as refused:
        check(folder)
    assert message in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported; expected one of llama, qwen2, qwen3"),
        ("llama", {"hidden_size": "x"}, "hidden_size is 'x', expected an integer above 0"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer above 0"),
        ("llama", {"intermediate_size": -1}, "intermediate_size is -1, expected an integer above 0"),
        ("llama", {"max_position_embeddings": "absent"}, "max_position_embeddings is missing, expected an integer"),
        ("llama", {"num_attention_heads": 2.0}, "num_attention_heads is 2.0, expected an integer above 0"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ("llama", {"hidden_size": 9}, "num_attention_heads 4 does not divide hidden_size 9"),
        ("qwen2", {"hidden_size": 9}, "num_attention_heads 4 does not divide hidden_size 9"),
        ("qwen2", {"num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
        ("qwen3", {"head_dim": "absent"}, "head_dim is missing"),
        ("qwen3", {"head_dim": 3}, "head_dim is 3, expected an even number"),
        ("llama", {"rms_norm_eps": "absent"}, "rms_norm_eps is missing, expected a number above 0"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
        ("llama", {"rope_theta": "1e4"}, "rope_theta is '1e4', expected a number above 0"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta is None, expected a number above 0"),
        ("llama", {"rope_parameters": 3}, "rope_parameters = 3 is not supported; expected an object"),
        ("llama", {"rope_parameters": {}, "rope_scaling": {"type": "linear"}}, "rope_scaling of rope_type 'linear'"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ("llama", {"layer_types": 3}, "layer_types = 3 is not supported; expected full_attention"),
    ],
)
def test_config_that_cannot_be_run_is_refused_by_key(
    write: Callable[..., Path], model_type: str, config: dict[str, Any], message: str
) -> None:
    folder = write(model_type, **config)
    with pytest.raises(ValueError, match=r".") as refused:
        Architecture.from_hf(folder)
    assert str(refused.value).startswith(f"{folder / 'config.json'}: {message}")
