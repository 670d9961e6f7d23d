"""A damaged model folder is named in milliseconds, not after half a minute of start-up."""

import json
import struct

import pytest

from miles.backends.sglang.model_folder import check_model_folder


def write_safetensors(path, *, size: int = 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


@pytest.fixture
def folder(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 8}}, "added_tokens": [{"id": 9, "content": "<eos>"}]})
    )
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_whole_folder_gives_the_models_facts(folder):
    facts = check_model_folder(folder)
    assert (facts.architecture, facts.vocab_size, facts.context_length) == ("LlamaForCausalLM", 10, 32)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        check_model_folder(tmp_path / "nowhere")


def test_file_in_place_of_the_folder_is_named(folder):
    with pytest.raises(ValueError, match=r"config.json is not a folder"):
        check_model_folder(folder / "config.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{folder}.* has no .*{name.split('.')[-1]}"):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 5, -1])
def test_truncated_file_is_named(folder, name, keep):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=rf"{name}.*(damaged|truncated)"):
        check_model_folder(folder)


def test_missing_shard_of_an_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"model-2.safetensors is missing"):
        check_model_folder(folder)


def test_tokenizer_beyond_the_vocabulary_is_refused(folder):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 10}}}))
    with pytest.raises(ValueError, match=r"tokenizer.json does not fit .* token id 10, but vocab_size .* is 10"):
        check_model_folder(folder)
