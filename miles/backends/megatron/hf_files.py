"""Reading and writing Hugging Face model folders: safetensors only, one tensor at a time. Imports no Megatron."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles.config.hf_folder import INDEX_FILE, SINGLE_FILE, read_safetensors_header, weight_files
from miles.contracts.publish import publish_folder

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class HFWeights:
    """The tensors of a Hugging Face folder, read from disk when asked for; a context manager that closes its files.

    Opening reads the headers only, and compares each file's size with what its header promises, so that a truncated
    download is refused before anything is built.

    Raises:
        ValueError: No safetensors, a shard of the index is missing, or a file is truncated or damaged; names the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"model folder {self.folder} does not exist")
        self._file_of: dict[str, Path] = {}
        self._header: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._open: dict[Path, Any] = {}
        for path in weight_files(self.folder):
            for name, entry in read_safetensors_header(path).items():
                dtype = _DTYPES.get(entry["dtype"])
                if dtype is None:
                    raise ValueError(
                        f"{path}: tensor {name} has dtype {entry['dtype']}, expected a floating-point one"
                    )
                self._file_of[name] = path
                self._header[name] = (dtype, tuple(entry["shape"]))

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._open.clear()

    def names(self) -> set[str]:
        return set(self._header)

    def dtype(self, name: str) -> torch.dtype:
        return self._header[name][0]

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One whole tensor, in its own dtype.

        Raises:
            ValueError: The tensor is missing or does not have `shape`; names folder or file, and tensor.
        """
        if name not in self._header:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        path, found = self._file_of[name], self._header[name][1]
        if found != tuple(shape):
            raise ValueError(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        try:
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: tensor {name} cannot be read ({error})") from None


def plan_files(sizes: Iterable[tuple[str, int]], *, max_bytes: int) -> list[list[str]]:
    """Group tensor names, in order, into files of at most `max_bytes` (a larger tensor gets a file to itself)."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not files or size > room:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    return files


def write_folder(
    target: str | Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    *,
    sizes: Sequence[tuple[str, int]],
    source: str | Path,
    max_file_bytes: int = 4 << 30,
) -> Path:
    """Write a Hugging Face folder: `tensors` as safetensors, and config, tokenizer and other small files of `source`.

    The folder is built under a temporary name and appears whole, or not at all. An existing `target` is refused.

    Args:
        tensors: (name, tensor) in exactly the order of `sizes`, which holds their sizes in bytes.
    """
    target, source = Path(target), Path(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        files = plan_files(sizes, max_bytes=max_file_bytes)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            file_name = SINGLE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            contents: dict[str, torch.Tensor] = {}
            for expected in names:
                name, tensor = next(tensors)
                assert name == expected, f"tensor {name} came where {expected} was planned"
                contents[name] = tensor.contiguous()
            save_file(contents, temporary / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(names, file_name))
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
            (temporary / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != INDEX_FILE and not path.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(path, temporary / path.name)
        return publish_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
