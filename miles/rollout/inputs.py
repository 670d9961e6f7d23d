"""What a run reads of files that others may change: digests, taken at its start and compared when it goes on."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles.backends.megatron.checkpoint_identity import find_checkpoint
from miles.config import Args
from miles.config.choices import is_hook
from miles.config.groups import flag_of
from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME
from miles.contracts.canonical import sha256_file

_MODEL_FILES = frozenset({".json", ".jinja", ".model", ".txt", ".safetensors"})
_WHOLE_BYTES = 8 << 20
_NUM_BLOCKS, _BLOCK_BYTES = 64, 64 << 10


def run_inputs(args: Args) -> dict[str, str]:
    """A digest of what lies behind each setting of an online run that names a file or folder of the user's.

    Of `--prompt-data` the saved state of the prompts has its own, of kept rollouts nothing is held. A function is its
    file, without what that imports.

    Raises:
        OSError: a file cannot be read.
        ValueError: `--ref-load` holds no checkpoint.
    """
    digests: dict[str, Callable[[Any], str | None]] = {"hf_checkpoint": _of_model}
    if not args.rollout_only:
        if args.needs_reference:
            digests["ref_load"] = _of_reference
        if is_hook(args.advantage_estimator):
            digests["advantage_estimator"] = _of_function
    if args.load_rollouts is None:
        digests |= {"custom_rm_path": _of_function, "dynamic_sampling_filter_path": _of_function}
        if not args.rollout_only:
            digests["eval_prompt_data"] = lambda _: _together([sha256_file(one.path) for one in args.eval_sets()])
    given = {name: value for name in digests if (value := getattr(args, name))}
    found = {name: digests[name](value) for name, value in given.items()}
    return {name: digest for name, digest in found.items() if digest is not None}


def refuse_changed_inputs(args: Args, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Compare the digests of a save with today's.

    Raises:
        ValueError: a line for each setting whose content differs and that `allow_config_change` does not name.
    """
    lines = [
        f"--resume: {flag_of(name)} {getattr(args, name)} has another content than when the run began; give it that "
        f"again, or pass --allow-config-change {name}"
        for name, digest in now.items()
        if then.get(name, digest) != digest and name not in args.allow_config_change
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _together(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_model(folder: str) -> str:
    """Of a Hugging Face folder: names and digests of what a model and a tokenizer are read from."""
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in _MODEL_FILES and path.is_file())
    return _together([f"{path.name} {_of_large_file(path)}" for path in files])


def _of_reference(folder: str) -> str:
    if (Path(folder) / "config.json").is_file():
        return _of_model(folder)
    return sha256_file(find_checkpoint(folder) / CHECKPOINT_MANIFEST_NAME)


def _of_function(path: str) -> str | None:
    where = path.rpartition(":")[0]
    spec = None if where.endswith(".py") else importlib.util.find_spec(where)
    file = where if spec is None else spec.origin
    return sha256_file(file) if file is not None and Path(file).is_file() else None


def _of_large_file(path: Path) -> str:
    """SHA-256 of the size and of blocks all over a file; of all bytes where these are few.

    A model of a hundred gigabytes is looked at in a second. Other weights differ in every block.
    """
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
