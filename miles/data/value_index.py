"""The validated index of a value data set: where its rows lie, and a cache of it beside the data.

A cache is believed only if it is whole (its own SHA-256), speaks of the bytes that were just hashed, of the same
objective, and was made by the same rules: it carries a digest of the source that holds them. It saves parsing, never
hashing. What it says of a row is checked again when the row is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from array import array
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miles.contracts import canonical
from miles.contracts.canonical import CHUNK_BYTES, canonical_json_bytes
from miles.contracts.publish import publish_bytes
from miles.contracts.value_schema import ValueObjective
from miles.data import value_sample, value_scan
from miles.data.value_scan import ScannedRows, scan_file

logger = logging.getLogger(__name__)

INDEX_SCHEMA = "miles.value-index.v1"
CACHE_FROM_BYTES = 32 << 20

_COLUMNS = (("offsets", "i8"), ("digests", "u8"), ("labels", "f8"))
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class ValueIndex:
    """Rows of a data set that holds every rule of A3 but the manifest's row count: 24 bytes a row.

    Attributes:
        offsets: int64 [rows], where the row's line begins.
        digests: uint64 [rows], 8 bytes of the SHA-256 of the line.
        labels: float64 [rows], the one return at active tokens; NaN where a row has several.
        max_tokens: number of tokens of the longest row.
    """

    offsets: np.ndarray
    digests: np.ndarray
    labels: np.ndarray
    max_tokens: int

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class Opened:
    """What one reading of a data file found.

    Attributes:
        sha256: digest of all bytes read.
        changed: the file was written to, or replaced, in the meantime.
        bad_row: file offset of the first row that breaks a rule.
        suspects: rows whose sample_id may occur twice, ascending.
        cached: the index was found in a cache; it speaks of the expected bytes, be they those that were read or not.
    """

    sha256: str
    changed: bool
    index: ValueIndex
    bad_row: int | None
    suspects: tuple[int, ...]
    cached: bool


def open_index(path: Path, *, sha256: str, objective: ValueObjective) -> Opened:
    """Read a data file once. Its rows are parsed only if no cache speaks of the expected bytes.

    Args:
        sha256: digest that the manifest expects; a cache for another one is not looked at.

    Raises:
        OSError: the file cannot be read.
    """
    known = _read_cache(path, sha256=sha256, objective=objective)
    with path.open("rb") as stream:
        before = os.fstat(stream.fileno())
        began = time.monotonic()
        if before.st_size >= CACHE_FROM_BYTES:
            verb = "hashing" if known is not None else "validating"
            logger.info("%s %s, %.2f GB", verb, path, before.st_size / 1e9)
        if known is not None:
            rows, digest = None, _hash(stream)
        else:
            rows, digest = scan_file(stream, size=before.st_size, objective=objective)
        after, named = os.fstat(stream.fileno()), os.stat(path)
    if before.st_size >= CACHE_FROM_BYTES:
        logger.info("%s: read in %.1f s", path, time.monotonic() - began)
    changed = any(_identity(other) != _identity(before) for other in (after, named))
    if rows is None:
        assert known is not None
        return Opened(digest, changed, known, None, (), cached=True)
    return Opened(digest, changed, _index_of(rows), rows.bad_row, _suspects(rows.id_digests), cached=False)


def _hash(stream: BufferedReader) -> str:
    digest, chunk = hashlib.sha256(), bytearray(CHUNK_BYTES)
    while got := stream.readinto(chunk):
        digest.update(memoryview(chunk)[:got])
    return digest.hexdigest()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _index_of(rows: ScannedRows) -> ValueIndex:
    columns = {name: np.frombuffer(getattr(rows, name), dtype=kind) for name, kind in _COLUMNS}
    return ValueIndex(**columns, max_tokens=rows.max_tokens)


def _suspects(id_digests: array[int]) -> tuple[int, ...]:
    ids = np.frombuffer(id_digests, dtype="u8")
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return tuple(np.flatnonzero(np.isin(ids, twice)).tolist()) if len(twice) else ()


# ---------------------------------------------------------------- cache


@cache
def rules_digest() -> str:
    """Return a digest of the source and the parser that decide whether a row is valid."""
    digest = hashlib.sha256(msgspec.__version__.encode())
    for module in (canonical, value_sample, value_scan, sys.modules[__name__]):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


def cache_places(path: Path, *, sha256: str) -> tuple[Path, Path]:
    """Return where the index of a data file may be cached: beside it, else in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return path.parent / f".{path.name}.value-index", Path(home) / "miles" / "value-index" / sha256


def _binding(*, sha256: str, objective: ValueObjective) -> dict[str, Any]:
    bounds = [objective.reward_low, objective.reward_high] if objective.loss_type == "classification" else None
    return {
        "schema": INDEX_SCHEMA,
        "rules_sha256": rules_digest(),
        "byteorder": sys.byteorder,
        "data_sha256": sha256,
        "returns_within": bounds,
    }


def _read_cache(path: Path, *, sha256: str, objective: ValueObjective) -> ValueIndex | None:
    wanted = _binding(sha256=sha256, objective=objective)
    for place in cache_places(path, sha256=sha256):
        try:
            data = place.read_bytes()
        except OSError:
            continue
        index = _decode(data, wanted)
        if index is not None:
            logger.debug("value index from %s", place)
            return index
    return None


def _encode(index: ValueIndex, binding: dict[str, Any]) -> bytes:
    facts = {"rows": len(index), "max_tokens": index.max_tokens}
    parts = [canonical_json_bytes({**binding, **facts}), *(getattr(index, name).data for name, _ in _COLUMNS)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def _decode(data: bytes, wanted: dict[str, Any]) -> ValueIndex | None:
    """Return the index that `data` holds if it is whole and bound to `wanted`."""
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        return None
    start = data.find(b"\n") + 1
    try:
        header = json.loads(data[:start])
        facts = [header.pop(name) for name in ("rows", "max_tokens")]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    if header != wanted or len(body) - start != 8 * len(_COLUMNS) * facts[0]:
        return None
    columns = {
        name: np.frombuffer(data, dtype=kind, count=facts[0], offset=start + 8 * facts[0] * place)
        for place, (name, kind) in enumerate(_COLUMNS)
    }
    return ValueIndex(**columns, max_tokens=facts[1])


def write_cache(index: ValueIndex, path: Path, *, sha256: str, objective: ValueObjective) -> Path | None:
    """Publish the index of a data set that was found valid; no room for it is no fault of the run.

    Returns:
        Where it lies, or None where neither place could be written.
    """
    data = _encode(index, _binding(sha256=sha256, objective=objective))
    problems: list[str] = []
    for place in cache_places(path, sha256=sha256):
        try:
            # The user's cache folder; the folder of the data is there.
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return publish_bytes(place, data)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
    logger.warning("the value index is not cached, the next start parses again: %s", "; ".join(problems))
    return None
