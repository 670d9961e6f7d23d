"""What a Hugging Face model folder says of itself without torch: is it there, whole, and of one piece."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.contracts.canonical import parse_json, read_json

_DAMAGED = "damaged or truncated"

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class HfFolder:
    """Facts of a model folder.

    Attributes:
        config: the model's own section of config.json.
        num_parameters: numbers in the weight files together.
    """

    path: Path
    config: dict[str, Any]
    num_parameters: int

    def number(self, key: str) -> int | None:
        """An integer of the config, None where it is absent."""
        value = self.config.get(key)
        return value if isinstance(value, int) else None


def inspect_hf_folder(folder: str | Path) -> HfFolder:
    """Check a model folder's config, weight files and tokenizer, in milliseconds for all but large tokenizers.

    Raises:
        ValueError: something is missing, truncated or does not fit together; the line names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    config = read_model_config(folder)
    vocab_size = positive_integer(config, "vocab_size", folder / "config.json")
    _check_special_ids(config, vocab_size, folder / "config.json")
    if (generation := folder / "generation_config.json").exists():
        _check_special_ids(read_json_object(generation), vocab_size, generation)
    count = 0
    for file in weight_files(folder):
        for entry in read_safetensors_header(file).values():
            count += math.prod(entry["shape"])
    for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
        if (folder / name).exists():
            read_json_object(folder / name)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        highest = highest_token_id(tokenizer)
        if highest < 0:
            raise ValueError(f"{tokenizer}: its vocabulary is empty")
        if highest >= vocab_size:
            raise ValueError(
                f"{tokenizer} does not fit the model: it has id {highest}, config.json has vocab_size {vocab_size}"
            )
    elif not (folder / "tokenizer.model").exists():
        raise ValueError(f"model folder {folder} has no tokenizer (tokenizer.json or tokenizer.model)")
    return HfFolder(path=folder, config=config, num_parameters=count)


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """The model's own section of a folder's config.json: `text_config` where it has one, else the whole.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = Path(folder) / "config.json"
    whole = read_json_object(path)
    own = whole.get("text_config", whole)
    if not isinstance(own, dict):
        raise ValueError(f"{path}: text_config is {own!r}, expected an object")
    return own


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder holds a chat template, in any of the places where transformers looks for one."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((folder / name).exists() for name in files):
        return True
    path = folder / TOKENIZER_CONFIG
    return path.exists() and bool(read_json_object(path).get("chat_template"))


def positive_integer(config: dict[str, Any], key: str, path: Path) -> int:
    """An integer above zero of the config in `path`.

    Raises:
        ValueError: it is missing or something else.
    """
    value = config.get(key)
    # A JSON true is an int to isinstance.
    if type(value) is not int or value < 1:
        state = f"is {value!r}" if key in config else "is missing"
        raise ValueError(f"{path}: {key} {state}, expected an integer above 0")
    return value


def _check_special_ids(config: dict[str, Any], vocab_size: int, path: Path) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            # Old Llama folders say -1 for no padding.
            lowest = -1 if key == "pad_token_id" else 0
            if type(token) is not int or not lowest <= token < vocab_size:
                raise ValueError(f"{path}: {key} is {value!r}, expected ids below the model's vocab_size {vocab_size}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index lists, or the single one.

    Raises:
        ValueError: there is none, or the index cannot be read or lists one that is missing.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).is_file():
            raise ValueError(f"model folder {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: expected a 'weight_map' of tensor names to files")
    files = sorted({folder / str(name) for name in listed.values()})
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index}: lists {file.name}, which is missing")
    return files


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor entries ('dtype', 'shape', 'data_offsets') of a file whose size is what they promise.

    A file is 8 bytes of header length, the header as JSON, then the data, whose end the header names.

    Raises:
        ValueError: the file is truncated or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or 8 + length > size:
            raise ValueError(f"{path}: truncated: {size} bytes do not hold a safetensors header")
        try:
            header = parse_json(file.read(length), where=path)
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            complete = all(
                isinstance(entry["shape"], list)
                and all(type(length) is int and length >= 0 for length in entry["shape"])
                for entry in header.values()
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            complete, end = False, size
    if not complete:
        raise ValueError(f"{path}: damaged: its safetensors header cannot be read")
    if size != end:
        state = "truncated" if size < end else "longer than its header says"
        raise ValueError(f"{path}: {state}: {size} bytes, its header asks for {end}")
    return header


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ValueError: it is missing, damaged, or holds something else.
    """
    try:
        content = read_json(path, fault=_DAMAGED)
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise ValueError(f"{path}: {_DAMAGED}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def highest_token_id(path: Path) -> int:
    """The highest id that a tokenizer.json gives, added tokens included; -1 where its vocabulary is empty.

    Raises:
        ValueError: it is damaged, or no tokenizer.
    """
    tokenizer = read_json_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        # Unigram models list their pieces; the others map pieces to ids.
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        return max(ids, default=-1)
    except (KeyError, TypeError):
        raise ValueError(f"{path}: not a tokenizer: no vocabulary in it, or one whose ids are no integers") from None
