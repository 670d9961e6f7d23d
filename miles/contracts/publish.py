"""Files and folders appear whole or not at all: temporary name in the same folder, fsync, then one rename or link."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles.contracts.canonical import canonical_json_bytes, readable_json_bytes


@contextlib.contextmanager
def _speaking_of(target: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the file system name what the caller asked for: not a temporary name, and not nothing (full disk)."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        # The number decides the class.
        raise OSError(error.errno, error.strerror, os.fspath(target)) from error


def _fsync(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> None:
    with _speaking_of(path):
        descriptor = os.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names inside `folder` durable."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _write_temporary(temporary: Path, data: bytes, *, exclusive: bool, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
    descriptor = os.open(temporary, flags, mode)
    try:
        _write_all(descriptor, data)
    finally:
        os.close(descriptor)


def publish_bytes(
    path: str | os.PathLike[str],
    data: bytes,
    replace: bool = True,
    *,
    temporary_name: str | None = None,
    mode: int = 0o644,
) -> Path:
    """Write `data` to `path` so that no reader ever sees a part of it.

    Args:
        replace: True renames over an earlier file; False links, so an existing name is never replaced.
        temporary_name: fixed temporary name in the same folder; a leftover of a killed run is overwritten.
        mode: permission bits of a new file.

    Raises:
        FileExistsError: `replace` is False and `path` exists, be it a dangling link.
        OSError: the disk is full, or another error of the file system, and names `path`; nothing is left behind.
    """
    path = Path(path)
    temporary = path.parent / (temporary_name or f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "already exists and is never replaced", str(path))
    with _speaking_of(path):
        try:
            _write_temporary(temporary, data, exclusive=temporary_name is None, mode=mode)
            if replace:
                os.replace(temporary, path)
            else:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    raise FileExistsError(errno.EEXIST, "already exists and is never replaced") from None
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                temporary.unlink()
        fsync_folder(path.parent)
    return path


def publish_json(
    path: str | os.PathLike[str], value: Any, replace: bool = True, *, readable: bool = False, mode: int = 0o644
) -> bytes:
    """Publish `value` as canonical JSON (or indented, when `readable`) and return the bytes written."""
    data = readable_json_bytes(value) if readable else canonical_json_bytes(value)
    publish_bytes(path, data, replace, mode=mode)
    return data


def fsync_tree(folder: str | os.PathLike[str]) -> None:
    """Make every file and name below `folder` durable."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _fsync(os.path.join(parent, name))
        fsync_folder(parent)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step (Linux renameat2); False where system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_working_folder, rename_exchange = -100, 2
    return renameat2(at_working_folder, os.fsencode(left), at_working_folder, os.fsencode(right), rename_exchange) == 0


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def publish_folder(temporary: str | os.PathLike[str], final: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """Rename a finished folder to its final name on the same file system, after fsync of all it holds.

    Args:
        replace: swap with an earlier folder of that name, in one step where the file system can, and delete that.

    Raises:
        FileExistsError: `final` exists, is not an empty folder, and `replace` is False.
        OSError: another error of the file system; names `final`.
    """
    with _speaking_of(final):
        return _publish_folder(Path(temporary), Path(final), replace=replace)


def _publish_folder(temporary: Path, final: Path, *, replace: bool) -> Path:
    fsync_tree(temporary)
    occupied = os.path.lexists(final) and (final.is_symlink() or not final.is_dir() or any(final.iterdir()))
    if occupied and not replace:
        raise FileExistsError(errno.EEXIST, "already exists and is never replaced", str(final))
    if not occupied:
        os.rename(temporary, final)
    elif _exchange(temporary, final):
        _delete(temporary)
    else:
        aside = final.parent / f".{final.name}.replaced.{os.getpid()}.{secrets.token_hex(4)}"
        os.rename(final, aside)
        os.rename(temporary, final)
        _delete(aside)
    fsync_folder(final.parent)
    return final
