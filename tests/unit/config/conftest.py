"""A model folder and the least settings that pass every rule, without torch."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def write_hf_folder(folder: Path, **config: Any) -> Path:
    """A Hugging Face folder with one 4x2 float32 tensor and a tokenizer of three words."""
    folder.mkdir(parents=True)
    settings = {
        "model_type": "llama",
        "vocab_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]})
    )
    return folder


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model")


@pytest.fixture
def online(tmp_path: Path, hf_folder: Path) -> dict[str, Any]:
    """Settings of an online run that break no rule."""
    for name in ("train.jsonl", "heldout.jsonl", "reward.py"):
        (tmp_path / name).write_text("")
    return {
        "hf_checkpoint": str(hf_folder),
        "prompt_data": str(tmp_path / "train.jsonl"),
        "custom_rm_path": f"{tmp_path}/reward.py:score",
        "num_rollout": 3,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "save": str(tmp_path / "actor"),
    }


@pytest.fixture
def offline(tmp_path: Path, hf_folder: Path) -> dict[str, Any]:
    """Settings of a value-pretraining run that break no rule."""
    return {
        "hf_checkpoint": str(hf_folder),
        "value_pretrain_manifest": str(write_manifest(tmp_path / "manifest.json")),
        "global_batch_size": 4,
        "critic_save": str(tmp_path / "critic"),
    }


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    def write(**objective: Any) -> Path:
        return write_manifest(tmp_path / "other_manifest.json", **objective)

    return write


def write_manifest(path: Path, **objective: Any) -> Path:
    """A manifest of ten training rows; the data file it names is not there."""
    content = {
        "schema": "miles.value-pretrain.v1",
        "train": {"path": "train.jsonl", "sha256": "0" * 64, "num_samples": 10},
        "objective": {"loss_type": "classification", "num_bins": 11, **objective},
    }
    path.write_text(json.dumps(content))
    return path


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as words of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


@pytest.fixture(name="as_flags")
def as_flags_fixture() -> Callable[[dict[str, Any]], list[str]]:
    return as_flags
