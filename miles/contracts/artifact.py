"""Checkpoint manifests: every file of a folder with its size and SHA-256, written last."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from miles.contracts.canonical import (
    StrictJsonError,
    canonical_json_bytes,
    check_seal,
    parse_strict_json,
    require_file,
    require_int,
    require_sha256,
    sealed,
    sha256_bytes,
    sha256_file,
)
from miles.contracts.publish import publish_bytes

CHECKPOINT_MANIFEST_NAME = "checkpoint_manifest.json"
CHECKPOINT_MANIFEST_SCHEMA = "miles.checkpoint-manifest.v1"


def _regular_files(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    names: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        for name in folders + files:
            path = Path(parent, name)
            if path.is_symlink():
                raise ValueError(f"{path}: a symbolic link cannot be part of a checkpoint")
        for name in files:
            path = Path(parent, name)
            if not path.is_file():
                raise ValueError(f"{path}: is not a regular file")
            names.append(path.relative_to(folder).as_posix())
    return sorted(name for name in names if name != CHECKPOINT_MANIFEST_NAME)


def in_parallel(jobs: Sequence[tuple[int, Callable[[], Any]]]) -> list[Future[Any]]:
    """Run jobs, each with its size, on all cores, the largest first; return their finished futures in order.

    Hashing leaves Python's lock, so threads do. An interrupt drops the jobs that have not begun and waits for none.
    """
    pool = ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1, len(jobs))))
    futures: dict[int, Future[Any]] = {}
    try:
        for i in sorted(range(len(jobs)), key=lambda i: -jobs[i][0]):
            futures[i] = pool.submit(jobs[i][1])
        wait(futures.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [futures[i] for i in range(len(jobs))]


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, all hashed side by side.

    Raises:
        OSError: a file cannot be read.
    """
    jobs = [(path.stat().st_size, partial(sha256_file, path)) for path in paths]
    return [future.result() for future in in_parallel(jobs)]


def write_checkpoint_manifest(folder: str | os.PathLike[str], **facts: Any) -> dict[str, Any]:
    """Hash every file below `folder` and publish `checkpoint_manifest.json` there, last.

    Args:
        facts: what the checkpoint says of itself, JSON values only. `iteration` (int), `role` and `head` are the
            ones the chain compares where present.

    Returns:
        The manifest: schema, facts, files (path, size, sha256 each, sorted by path), seal_sha256.

    Raises:
        ValueError: the folder is empty or holds a symbolic link.
    """
    folder = Path(folder)
    names = _regular_files(folder)
    if not names:
        raise ValueError(f"{folder}: a checkpoint without files cannot have a manifest")
    sizes = [(folder / name).stat().st_size for name in names]
    digests = hash_files([folder / name for name in names])
    files = [{"path": n, "size": s, "sha256": d} for n, s, d in zip(names, sizes, digests, strict=True)]
    manifest = sealed({"schema": CHECKPOINT_MANIFEST_SCHEMA, "facts": facts, "files": files})
    publish_bytes(folder / CHECKPOINT_MANIFEST_NAME, canonical_json_bytes(manifest))
    return manifest


def read_checkpoint_manifest(folder: str | os.PathLike[str], *, expected_sha256: str | None = None) -> dict[str, Any]:
    """Read and validate `checkpoint_manifest.json` itself, without touching the files it lists.

    Raises:
        FileNotFoundError: there is no manifest, so the folder is no complete checkpoint.
        ValueError: the digest differs, or the manifest was changed after it was written.
    """
    path = Path(folder) / CHECKPOINT_MANIFEST_NAME
    try:
        require_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing, so this is not a complete checkpoint") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    data = path.read_bytes()
    actual = sha256_bytes(data)
    if expected_sha256 is not None and actual != expected_sha256:
        raise ValueError(f"{path}: checkpoint manifest SHA-256 mismatch: expected {expected_sha256}, got {actual}")
    try:
        manifest = parse_strict_json(data)
    except StrictJsonError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != CHECKPOINT_MANIFEST_SCHEMA:
        raise ValueError(f"{path}: schema must be {CHECKPOINT_MANIFEST_SCHEMA!r}")
    try:
        check_seal(manifest)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if canonical_json_bytes(manifest) != data:
        raise ValueError(f"{path}: not canonical JSON: the file was changed after it was written")
    files = manifest.get("files")
    if not isinstance(files, list) or not files or not isinstance(manifest.get("facts"), dict):
        raise ValueError(f"{path}: must hold facts and a non-empty list of files")
    for entry in files:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise ValueError(f"{path}: every file needs path, size and sha256")
        relative = entry["path"]
        if relative.startswith("/") or ".." in Path(relative).parts:
            raise ValueError(f"{path}: {relative!r} points outside the checkpoint")
        require_int(entry.get("size"), field=f"{path}: {relative}: size", minimum=0)
        require_sha256(entry.get("sha256"), field=f"{path}: {relative}: sha256")
    return manifest


def check_checkpoint_listing(folder: str | os.PathLike[str], *, expected_sha256: str | None = None) -> dict[str, Any]:
    """Check that just the listed files are there, each of its size, and return the manifest; nothing is hashed.

    Raises:
        FileNotFoundError: the manifest or a listed file is missing.
        ValueError: a file has another size, a file is there that the manifest does not list, or the manifest itself
            was changed. The message begins with the path of the first such file.
    """
    folder = Path(folder)
    manifest = read_checkpoint_manifest(folder, expected_sha256=expected_sha256)
    present = set(_regular_files(folder))
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if entry["path"] not in present:
            raise FileNotFoundError(f"{path}: listed in {CHECKPOINT_MANIFEST_NAME} but missing")
        size = path.stat().st_size
        if size != entry["size"]:
            raise ValueError(f"{path}: size mismatch: expected {entry['size']} bytes, got {size}")
    if unlisted := present - {entry["path"] for entry in manifest["files"]}:
        raise ValueError(f"{folder / min(unlisted)}: not listed in {CHECKPOINT_MANIFEST_NAME}")
    return manifest


def checkpoint_files(folder: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """Return the files of a checkpoint in the order of its manifest."""
    return [folder / entry["path"] for entry in manifest["files"]]


def check_checkpoint_digests(folder: Path, manifest: Mapping[str, Any], digests: Sequence[str]) -> None:
    """Raise ValueError naming the first file whose SHA-256 in `digests` is not the manifest's."""
    for entry, digest in zip(manifest["files"], digests, strict=True):
        if digest != entry["sha256"]:
            path = folder / entry["path"]
            raise ValueError(f"{path}: SHA-256 mismatch: expected {entry['sha256']}, got {digest}")
