"""What a run reads of files that others may change: digests, taken at its start and compared when it goes on."""

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from miles.backends.megatron.checkpoint_identity import find_checkpoint
from miles.config import Args
from miles.config.choices import is_hook
from miles.config.groups import flag_of
from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME
from miles.contracts.canonical import sha256_file
from miles.rollout.functions import source_file

_MODEL_SUFFIXES = frozenset({".json", ".jinja", ".model", ".py", ".safetensors", ".tiktoken"})
_MODEL_TEXTS = frozenset({"merges.txt", "vocab.txt"})
_WHOLE_BYTES = 8 << 20
_NUM_BLOCKS, _BLOCK_BYTES = 64, 64 << 10

Inputs = dict[str, dict[str, str]]
"""Digests of files by their names, by the setting that names them."""


def run_inputs(args: Args, *, without: Collection[str] = ()) -> Inputs:
    """Digests of what lies behind each setting of an online run that names a file or folder of the user's.

    Of `--prompt-data` the saved state of the prompts has its own. A function is its file, without what that imports;
    one of miles itself has none, for the versions of the code are recorded.

    Raises:
        OSError: a file cannot be read.
        ValueError: `--ref-load` holds no checkpoint.
    """
    digests: dict[str, Callable[[Any], dict[str, str]]] = {"hf_checkpoint": _of_model}
    if not args.rollout_only:
        if args.needs_reference:
            digests["ref_load"] = _of_reference
        if is_hook(args.advantage_estimator):
            digests["advantage_estimator"] = _of_function
    if args.load_rollouts is not None:
        digests["load_rollouts"] = lambda folder: _of_rollouts(folder, args.rollouts_to_run)
    else:
        digests |= {"custom_rm_path": _of_function, "dynamic_sampling_filter_path": _of_function}
        if not args.rollout_only:
            digests["eval_prompt_data"] = lambda _: {one.path: sha256_file(one.path) for one in args.eval_sets()}
    wanted = {name: digest for name, digest in digests.items() if name not in without}
    return {name: digest(value) for name, digest in wanted.items() if (value := getattr(args, name))}


def refuse_changed_inputs(args: Args, then: Inputs, now: Inputs) -> None:
    """Compare the digests of a save with today's.

    Raises:
        ValueError: a line for each setting whose content differs and that `allow_config_change` does not name.
    """
    lines = []
    for name in now.keys() & then.keys() - set(args.allow_config_change):
        before, today = then[name], now[name]
        if name == "load_rollouts":
            # A run may be given more or fewer of them.
            before, today = ({file: one[file] for file in then[name].keys() & now[name]} for one in (before, today))
        if changed := sorted(file for file in before | today if before.get(file) != today.get(file)):
            lines.append(
                f"--resume: {flag_of(name)} {getattr(args, name)} has another content than when the run began "
                f"({', '.join(changed)}); give it that again, or pass --allow-config-change {name}"
            )
    if lines:
        raise ValueError("\n".join(sorted(lines)))


def refuse_edited_inputs(args: Args, inputs: Inputs) -> None:
    """Compare digests once more when all that they are of has been read, but for kept rollouts, which come one by one.

    Raises:
        ValueError: a line for each setting whose files have changed since `inputs` were taken.
    """
    now = run_inputs(args, without={"load_rollouts"})
    lines = [
        f"{flag_of(name)} {getattr(args, name)}: changed while the run started; start it again"
        for name in now
        if now[name] != inputs[name]
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _of_model(folder: str) -> dict[str, str]:
    """Of a Hugging Face folder: the files that a model and a tokenizer are read from."""
    files = (path for path in Path(folder).iterdir() if path.suffix in _MODEL_SUFFIXES or path.name in _MODEL_TEXTS)
    return {path.name: _of_large_file(path) for path in sorted(files) if path.is_file()}


def _of_reference(folder: str) -> dict[str, str]:
    if (Path(folder) / "config.json").is_file():
        return _of_model(folder)
    manifest = find_checkpoint(folder) / CHECKPOINT_MANIFEST_NAME
    return {manifest.name: sha256_file(manifest)}


def _of_rollouts(folder: str, count: int | None) -> dict[str, str]:
    return {file.name: sha256_file(file) for file in sorted(Path(folder).glob("rollout_*.jsonl"))[:count]}


def _of_function(path: str) -> dict[str, str]:
    file = source_file(path)
    return {} if file is None else {file.name: sha256_file(file)}


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
