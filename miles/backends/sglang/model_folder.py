"""What can be seen of a Hugging Face model folder without loading it: is it there, whole, and of one piece."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's config.json that the engine's side needs."""

    architecture: str
    vocab_size: int
    context_length: int | None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"model folder {path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): the file is damaged or truncated") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _check_safetensors(path: Path) -> None:
    """Compare the file's size with what its header announces (8-byte length, JSON header, data)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = struct.unpack("<Q", file.read(8))[0]
            if header_size > size - 8:
                raise ValueError("its header is cut off")
            header = json.loads(file.read(header_size))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        raise ValueError(f"weight file {path} is missing, though the model's index names it") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weight file {path} is damaged or truncated: {error}") from None
    if size != 8 + header_size + end:
        raise ValueError(f"weight file {path} is truncated or damaged: {size} bytes, expected {8 + header_size + end}")


def _highest_token_id(tokenizer: dict[str, Any]) -> int:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    return max(ids, default=-1)


def check_model_folder(folder: str | Path) -> ModelFacts:
    """Check config, weight files' sizes and the tokenizer's range, in milliseconds.

    Raises:
        ValueError: something is missing, truncated or does not fit; the line names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist" if not folder.exists() else f"{folder} is not a folder"
        )
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config", config)
    if not isinstance(text_config.get("vocab_size"), int):
        raise ValueError(f"{folder / 'config.json'} names no vocab_size")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in _read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model folder {folder} has no *.safetensors weight file")
    for file in files:
        _check_safetensors(file)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists() and not (folder / "tokenizer.model").exists():
        raise ValueError(f"model folder {folder} has no tokenizer (tokenizer.json or tokenizer.model)")
    if tokenizer.exists() and (highest := _highest_token_id(_read_json(tokenizer))) >= text_config["vocab_size"]:
        raise ValueError(
            f"{tokenizer} does not fit the model: token id {highest}, but vocab_size in config.json is "
            f"{text_config['vocab_size']}"
        )
    architectures = config.get("architectures") or ["unknown"]
    return ModelFacts(architectures[0], text_config["vocab_size"], text_config.get("max_position_embeddings"))
