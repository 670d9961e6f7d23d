"""Canonical JSON, strict JSON reading, and digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

UTF8_BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 4 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")


class StrictJsonError(ValueError):
    """The bytes are not one strict JSON value; the message says why."""


def canonical_json_bytes(value: Any) -> bytes:
    """Return the one byte string that stands for `value`: sorted keys, no spaces, UTF-8, a final newline.

    Raises:
        ValueError: `value` holds NaN or an infinity, which JSON cannot say.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def readable_json_bytes(value: Any) -> bytes:
    """Return deterministic JSON for people: sorted keys, two spaces of indent, UTF-8, a final newline."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise StrictJsonError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> Any:
    raise StrictJsonError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates, parse_constant=_refuse_constant)
_LENIENT_DECODER = json.JSONDecoder(object_pairs_hook=_object_without_duplicates)


def parse_strict_json(data: bytes, *, allow_non_finite: bool = False) -> Any:
    """Parse UTF-8 JSON and refuse what Python's parser lets through.

    Args:
        allow_non_finite: let NaN and Infinity through, for a caller that looks at each number itself.

    Raises:
        StrictJsonError: not UTF-8, a byte-order mark, a duplicate key, NaN or Infinity, or not JSON at all.
    """
    if data.startswith(UTF8_BOM):
        raise StrictJsonError("starts with a byte-order mark; expected plain UTF-8")
    try:
        decoder = _LENIENT_DECODER if allow_non_finite else _DECODER
        return decoder.decode(data.decode("utf-8"))
    except StrictJsonError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJsonError(f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from error
    except RecursionError as error:
        raise StrictJsonError("nested too deeply") from error
    except ValueError as error:
        raise StrictJsonError(str(error)) from error


def parse_json(text: str | bytes, *, where: object, fault: str = "not valid JSON") -> Any:
    """Parse JSON as Python does, for what need not be strict: files of others, and our own that nothing pins.

    Raises:
        ValueError: `WHERE: FAULT: ` and why.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: {fault}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {fault}: {error}") from None


def read_json(path: Path, *, fault: str = "not valid JSON") -> Any:
    """Return what a JSON file holds, parsed as Python does.

    Raises:
        OSError: it cannot be read.
        ValueError: `PATH: FAULT: ` and why.
    """
    return parse_json(path.read_bytes(), where=path, fault=fault)


def sha256_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file's bytes; `progress` is told the size of each chunk read."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def require_file(path: Path) -> None:
    """Raise unless a regular file lies at `path`; to open a named pipe instead would wait for ever.

    Raises:
        FileNotFoundError: nothing lies there.
        ValueError: something else does.
        OSError: the system's own reason, such as a loop of links or no permission.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError("missing") from None
    if not stat.S_ISREG(mode):
        raise ValueError("is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file")


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` with its links resolved as far as they lead; at a loop of links `Path.resolve` raises."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        # A zero byte: no file has such a name.
        return Path(path)


def error_text(error: Exception, named: Mapping[str, str | os.PathLike[str] | None] | None = None) -> str:
    """Return an error as one line; one of the file system as `PATH: No such file or directory`.

    Args:
        named: flag -> the path it gave; the flag of the error's path is set before it.
    """
    if not isinstance(error, OSError) or not error.strerror or not isinstance(error.filename, str):
        return str(error)
    flags = [flag for flag, path in (named or {}).items() if path is not None and Path(path) == Path(error.filename)]
    return f"{' '.join([*flags[:1], error.filename])}: {error.strerror}"


def is_sha256(value: object) -> bool:
    """Return whether `value` is a string of exactly 64 lower-case hex digits."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def require_sha256(value: object, *, field: str) -> str:
    """Return `value` if it is a SHA-256 in lower-case hex, else raise ValueError naming `field`."""
    if not isinstance(value, str) or not is_sha256(value):
        raise ValueError(f"{field} must be a SHA-256 of 64 lower-case hex digits, got {value!r}")
    return value


def require_int(value: object, *, field: str, minimum: int | None = None) -> int:
    """Return `value` if it is an int (never a bool) of at least `minimum`, else raise ValueError naming `field`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{field} must be an integer of at least {minimum}, got {value!r}")
    return value


def require_number(value: object, *, field: str, kind: str = "number") -> float:
    """Return `value` as a float if it is an int or a float (never a bool), else raise ValueError naming `field`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field} must be a {kind}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{field} must be a {kind}, got an integer too large for float64") from None


def require_finite(value: object, *, field: str) -> float:
    """As `require_number`, but refuse NaN and the infinities too."""
    number = require_number(value, field=field, kind="finite number")
    if not math.isfinite(number):
        raise ValueError(f"{field} must be a finite number, got {value!r}")
    return number


def require_text(value: object, *, field: str) -> str:
    """Return `value` if it is a non-empty string, else raise ValueError naming `field`."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a non-empty string, got {value!r}")
    return value


SEAL_FIELD = "seal_sha256"


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `record` with `seal_sha256`: the digest of its canonical bytes without that field.

    A seal finds accidents and half-made edits in a file that nothing else pins yet; it is no signature.
    """
    body = {key: value for key, value in record.items() if key != SEAL_FIELD}
    # As it is read back: a key that is a number is a text there, and sorted as one.
    read_back = json.loads(json.dumps(body))
    return {**body, SEAL_FIELD: sha256_bytes(canonical_json_bytes(read_back))}


def read_sealed(path: Path, *, schema: str, hint: str = "") -> dict[str, Any]:
    """Return the object that a file holds, whose schema and seal are looked at.

    Args:
        hint: what the message of another schema ends with.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not the file that was written; the line begins with the path.
    """
    try:
        require_file(path)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: {error}") from None
    record = read_json(path)
    found = record.get("schema") if isinstance(record, dict) else None
    if found != schema:
        raise ValueError(f"{path}: schema must be {schema!r}, got {found!r}{hint}")
    try:
        check_seal(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return record


def check_seal(record: dict[str, Any]) -> None:
    """Raise ValueError unless `record` carries the seal of its own contents."""
    if SEAL_FIELD not in record:
        raise ValueError(f"has no {SEAL_FIELD}")
    if sealed(record)[SEAL_FIELD] != record[SEAL_FIELD]:
        raise ValueError(f"{SEAL_FIELD} does not match the contents: the file was changed after it was written")
