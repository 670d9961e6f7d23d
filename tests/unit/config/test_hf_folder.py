"""A model folder is refused when it is missing, truncated or not of one piece; the line names the file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from miles.config.hf_folder import INDEX_FILE, has_chat_template, inspect_hf_folder, read_model_config


def test_whole_folder_is_described(hf_folder: Path) -> None:
    found = inspect_hf_folder(hf_folder)
    assert found.num_parameters == 8
    assert (found.number("vocab_size"), found.number("absent"), found.number("model_type")) == (8, None, None)


def test_nested_text_config_is_read(hf_folder: Path) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps({"model_type": "wrapped", "text_config": config}))
    assert inspect_hf_folder(hf_folder).number("num_hidden_layers") == 2
    assert read_model_config(hf_folder) == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b'{"vocab_size": 8', "config.json: damaged or truncated"),
        ("config.json", b"[]", "config.json: expected a JSON object, got list"),
        ("config.json", b"{}", "config.json: vocab_size is missing, expected an integer above 0"),
        ("config.json", b'{"vocab_size": true}', "config.json: vocab_size is True, expected an integer above 0"),
        ("model.safetensors", None, "has neither model.safetensors nor model.safetensors.index.json"),
        ("model.safetensors", b"", "truncated: 0 bytes do not hold a safetensors header"),
        ("model.safetensors", struct.pack("<Q", 99) + b"{}", "truncated: 10 bytes do not hold a safetensors header"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "damaged: its safetensors header cannot be read"),
        ("model.safetensors", struct.pack("<Q", 7) + b'{"w":1}', "damaged: its safetensors header cannot be read"),
        ("tokenizer.json", None, "has no tokenizer (tokenizer.json or tokenizer.model)"),
        ("tokenizer.json", b"{", "tokenizer.json: damaged or truncated"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer: no vocabulary in it"),
        ("tokenizer.json", b'{"model": {"vocab": {}}}', "tokenizer.json: its vocabulary is empty"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": 8}}}',
            "does not fit the model: it has id 8, config.json has vocab_size 8",
        ),
        (
            "tokenizer.json",
            b'{"model": {"vocab": [["a", 0]]}, "added_tokens": [{"id": 9}]}',
            "does not fit the model: it has id 9, config.json has vocab_size 8",
        ),
        (INDEX_FILE, b'{"weight_map": {"w": "a.safetensors"}}', "lists a.safetensors, which is missing"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": "1", "b": 2}}}', "no vocabulary in it, or one whose ids are"),
        ("config.json", b'{"text_config": null}', "config.json: text_config is None, expected an object"),
        ("config.json", b"[" * 100_000, "config.json: damaged or truncated: nested too deeply"),
        ("tokenizer_config.json", b'{"chat_template": ', "tokenizer_config.json: damaged or truncated"),
        (
            "model.safetensors",
            struct.pack("<Q", 54) + b'{"w":{"dtype":"F32","shape":["4"],"data_offsets":[0,0]}'[:54],
            "damaged: its safetensors header cannot be read",
        ),
        (INDEX_FILE, b"{}", "expected a 'weight_map'"),
    ],
)
def test_damage_is_named(hf_folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is None:
        (hf_folder / name).unlink()
    else:
        (hf_folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r".") as error:
        inspect_hf_folder(hf_folder)
    assert message in str(error.value)
    assert str(hf_folder) in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("eos_token_id", 8), ("bos_token_id", 9), ("pad_token_id", 8), ("eos_token_id", [1, 8])),
        *(("eos_token_id", "<eos>"), ("eos_token_id", -1), ("pad_token_id", -2)),
    ],
)
def test_special_token_outside_the_vocabulary_is_named(hf_folder: Path, name: str, key: str, value: Any) -> None:
    path = hf_folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {key: value}))
    with pytest.raises(ValueError, match=r".") as error:
        inspect_hf_folder(hf_folder)
    assert str(error.value) == f"{path}: {key} is {value!r}, expected ids below the model's vocab_size 8"


def test_special_tokens_of_the_vocabulary_are_accepted(hf_folder: Path) -> None:
    ids = {"bos_token_id": None, "eos_token_id": [1, 7], "pad_token_id": -1}
    (hf_folder / "generation_config.json").write_text(json.dumps(ids))
    inspect_hf_folder(hf_folder)


@pytest.mark.parametrize(("extra", "state"), [(-1, "truncated"), (1, "longer than its header says")])
def test_file_of_another_size_than_its_header_promises_is_named(hf_folder: Path, extra: int, state: str) -> None:
    file = hf_folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:extra] if extra < 0 else data + b"\0")
    with pytest.raises(ValueError, match=f"{state}: {len(data) + extra} bytes, its header asks for {len(data)}"):
        inspect_hf_folder(hf_folder)


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        inspect_hf_folder(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("tokenizer_config.json", '{"eos_token": "a"}', False),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("chat_template.jinja", "{{ messages }}", True),
    ],
)
def test_chat_template_is_found_where_transformers_looks(
    hf_folder: Path, name: str, content: str, found: bool
) -> None:
    (hf_folder / name).write_text(content)
    assert has_chat_template(hf_folder) is found
