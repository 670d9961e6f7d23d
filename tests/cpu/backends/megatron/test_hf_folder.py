"""A model folder that cannot be used is refused in one line that names the file and the field or tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.hf_files import HFWeights, plan_files


@pytest.fixture
def copy(model_folder: Callable[..., str], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a model folder that a test may damage."""

    def make(kind: str) -> Path:
        return Path(shutil.copytree(model_folder(kind, tied=False), tmp_path / kind))

    return make


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_architecture_read_from_config_matches_what_was_built(kind: str, model_folder: Callable[..., str]) -> None:
    found = Architecture.from_hf(model_folder(kind, tied=True))
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size, found.vocab_size) == (2, 32, 48, 150)
    assert (found.num_attention_heads, found.num_query_groups) == (4, 2)
    assert found.head_dim == (16 if kind == "qwen3" else 8)
    assert found.tied_embeddings and not found.untied().tied_embeddings
    assert (found.qkv_bias, found.qk_norm) == (kind == "qwen2", kind == "qwen3")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_architecture_of_keys_left_out_is_what_transformers_fills_in(kind: str, copy: Callable[[str], Path]) -> None:
    from transformers import AutoConfig

    path = copy(kind) / "config.json"
    left_out = ["tie_word_embeddings", "hidden_act", "rope_parameters", "rope_theta"]
    left_out += ["num_key_value_heads", "head_dim"] if kind == "llama" else []
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in left_out}))
    found, filled = Architecture.from_hf(path.parent), AutoConfig.from_pretrained(path.parent)
    assert found.num_query_groups == filled.num_key_value_heads
    assert found.head_dim == getattr(filled, "head_dim", 32 // 4)
    assert (found.rope_theta, found.tied_embeddings) == (filled.rope_parameters["rope_theta"], False)
    assert (filled.hidden_act, filled.tie_word_embeddings) == ("silu", False)


@pytest.mark.parametrize(("tensor_size", "expected"), [(1, 256), (2, 256), (3, 384)])
def test_padded_vocabulary_is_a_multiple_of_128_per_rank(
    tensor_size: int, expected: int, model_folder: Callable[..., str]
) -> None:
    assert Architecture.from_hf(model_folder("llama", tied=True)).padded_vocab_size(tensor_size) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("llama", {"model_type": "mixtral"}, "model_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "use_sliding_window",
        ),
    ],
)
def test_architecture_unsupported_field_is_refused_by_name(
    kind: str, changes: dict[str, Any], field: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(kind)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=field) as refused:
        Architecture.from_hf(folder)
    assert str(folder / "config.json") in str(refused.value)


def test_architecture_missing_folder_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Architecture.from_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match="damaged or truncated"):
        Architecture.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [((3, 1), "num_attention_heads"), ((4, 1), "num_query_groups"), ((1, 4), "num_layers")],
)
def test_layout_that_does_not_divide_the_model_is_refused_by_field(
    sizes: tuple[int, int], field: str, model_folder: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match=field):
        Architecture.from_hf(model_folder("llama", tied=True)).check_layout(
            tensor_size=sizes[0], pipeline_size=sizes[1]
        )


def test_layout_that_a_critic_cannot_have_is_refused_by_its_own_flag(model_folder: Callable[..., str]) -> None:
    architecture = Architecture.from_hf(model_folder("llama", tied=True))
    with pytest.raises(ValueError, match=r"^--critic-pipeline-model-parallel-size 4 does not divide"):
        architecture.check_layout(tensor_size=1, pipeline_size=4, role="critic")


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_weights_truncated_file_is_refused_by_name(keep: int, copy: Callable[[str], Path]) -> None:
    path = copy("llama") / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError, match="truncated") as refused:
        HFWeights(path.parent)
    assert str(path) in str(refused.value)


def test_weights_missing_file_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        HFWeights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-1-of-2.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists model-1-of-2\.safetensors, which is missing"):
        HFWeights(folder)


def test_weights_wrong_shape_or_missing_tensor_is_refused_by_name(model_folder: Callable[..., str]) -> None:
    with HFWeights(model_folder("llama", tied=False)) as weights:
        with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[32\], config\.json asks for \[33\]"):
            weights.read("model.norm.weight", (33,))
        with pytest.raises(ValueError, match=r"tensor model\.layers\.9\.bias is missing"):
            weights.read("model.layers.9.bias", (1,))


def test_worker_refuses_tensor_that_the_architecture_does_not_know(copy: Callable[[str], Path], ranks: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy("qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    (found,) = ranks("load", world_size=1, role="actor", settings={"hf_checkpoint": str(folder)}, forward_only=True)
    assert "model.layers.0.extra.weight has no place in a qwen2 model" in found["error"]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        pytest.param({"context_parallel_size": 2}, "--context-parallel-size", id="cp"),
        pytest.param({"sequence_parallel": True}, "--sequence-parallel", id="sp_without_tp"),
        pytest.param({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size", id="too_few_ranks"),
        pytest.param({"device": "cuda"}, "--device cuda", id="no_gpu"),
    ],
)
def test_worker_refuses_settings_by_flag(
    settings: dict[str, Any], flag: str, ranks: Any, model_folder: Callable[..., str]
) -> None:
    wanted = {"hf_checkpoint": model_folder("llama", tied=True), **settings}
    (message,) = ranks("refused_construction", world_size=1, role="actor", settings=wanted)
    assert flag in message


def test_plan_files_groups_in_order_within_the_limit() -> None:
    sizes = [("a", 5), ("b", 5), ("c", 1), ("d", 20), ("e", 2)]
    assert plan_files(sizes, max_bytes=10) == [["a", "b"], ["c"], ["d"], ["e"]]
