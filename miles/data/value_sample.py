"""One row of value-pretraining data and its rules (formulas A3).

Two readers that must agree: `parse_value_row` decides and says why; `RowReader` vouches for an ordinary row several
times faster and makes no object per token. It never accepts what the other refuses; what it does not vouch for goes
there.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Any, NamedTuple

import msgspec

from miles.contracts.canonical import UTF8_BOM, StrictJsonError, parse_strict_json, require_int
from miles.contracts.value_schema import ValueObjective

MAX_ROW_BYTES = 64 << 20
MAX_TOKEN_ID = 2**31 - 1

_INT = {int}
_MASK_TYPES = {int, bool}
_NUMBER_TYPES = {int, float}


@dataclass(frozen=True)
class ValueSample:
    """One row: prompt and response tokens, and a target and a mask for each of the `response_length` last tokens."""

    sample_id: str
    tokens: tuple[int, ...]
    response_length: int
    returns: tuple[float, ...]
    loss_mask: tuple[int, ...]


class RowFacts(NamedTuple):
    """What an index keeps of a valid row; `label` is the one return at active tokens, NaN where there are several."""

    sample_id: str
    num_tokens: int
    label: float


def parse_value_row(line: bytes, *, objective: ValueObjective, location: str) -> ValueSample:
    """Parse and validate one JSONL row (formulas A3). White space around it is what JSON allows, a CR included.

    Raises:
        ValueError: beginning with `location`; a byte-order mark, NaN, duplicate keys and bytes that are not UTF-8 too.
    """
    try:
        return _exact_row(line, objective)
    except StrictJsonError as error:
        raise ValueError(f"{location}: invalid JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


def _one_label(returns: Iterable[float]) -> float:
    # Adding zero turns -0.0 into 0.0.
    distinct = set(returns)
    return distinct.pop() + 0.0 if len(distinct) == 1 else math.nan


def _exact_row(line: bytes, objective: ValueObjective) -> ValueSample:
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"row is longer than {MAX_ROW_BYTES} bytes")
    if line.startswith(UTF8_BOM):
        raise ValueError("starts with a byte-order mark; expected plain UTF-8")
    # Without the line's end, or a message would speak of a second line.
    row = parse_strict_json(line.removesuffix(b"\n"))
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object")
    sample_id = row.get("sample_id")
    if not isinstance(sample_id, str) or not sample_id:
        raise ValueError(f"sample_id must be a non-empty string, got {sample_id!r}")
    tokens = row.get("tokens")
    # Types are compared as a set: a bool is an int to isinstance, and a loop over a million tokens is slow.
    if not isinstance(tokens, list) or len(tokens) < 2 or set(map(type, tokens)) != _INT or min(tokens) < 0:
        raise ValueError("tokens must be a list of at least two non-negative integers")
    if max(tokens) > MAX_TOKEN_ID:
        raise ValueError(f"tokens must be at most {MAX_TOKEN_ID}, got {max(tokens)}")
    length = require_int(row.get("response_length"), field="response_length", minimum=1)
    if length >= len(tokens):
        raise ValueError(f"response_length {length} must leave at least one prompt token of {len(tokens)} tokens")
    raw_returns = row.get("returns")
    if not isinstance(raw_returns, list) or len(raw_returns) != length:
        raise ValueError(f"returns must be a list of response_length={length} finite numbers")
    if not set(map(type, raw_returns)) <= _NUMBER_TYPES:
        raise ValueError("returns must be finite numbers")
    try:
        returns = tuple(map(float, raw_returns))
    except OverflowError:
        raise ValueError("returns must be finite numbers, got an integer too large for float64") from None
    if not all(map(math.isfinite, returns)):
        raise ValueError("returns must be finite numbers")
    if objective.loss_type == "classification":
        low, high = objective.reward_low, objective.reward_high
        if min(returns) < low or max(returns) > high:
            worst = min(returns) if min(returns) < low else max(returns)
            raise ValueError(f"classification returns must stay inside [{low}, {high}], got {worst}")
    mask = row.get("loss_mask", [1] * length)
    if not isinstance(mask, list) or len(mask) != length:
        raise ValueError(f"loss_mask must be a list of response_length={length} zeros and ones")
    mask_values = set(mask) if set(map(type, mask)) <= _MASK_TYPES else {2}
    if not mask_values <= {0, 1}:
        raise ValueError("loss_mask values must be 0, 1, false or true")
    if 1 not in mask_values:
        raise ValueError("loss_mask must select at least one target token")
    return ValueSample(sample_id, tuple(tokens), length, returns, tuple(map(int, mask)))


_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_TEN_DIGITS = b"0" * 10
_BLOCK = 16 << 10


class _Row(msgspec.Struct):
    """A row whose lists stay raw: their syntax is checked, no more."""

    sample_id: Annotated[str, msgspec.Meta(min_length=1)]
    tokens: msgspec.Raw
    response_length: Annotated[int, msgspec.Meta(ge=1)]
    returns: msgspec.Raw
    loss_mask: msgspec.Raw = msgspec.Raw()


class RowReader:
    """Validates rows of one objective, the ordinary ones without making an object of each number."""

    def __init__(self, objective: ValueObjective) -> None:
        self._objective = objective
        within = msgspec.Meta()
        if objective.loss_type == "classification":
            within = msgspec.Meta(ge=objective.reward_low, le=objective.reward_high)
        numbers: Any = list[Annotated[float, within]]
        self._decode_row = msgspec.json.Decoder(_Row).decode
        self._decode_returns = msgspec.json.Decoder(numbers).decode

    def facts(self, line: bytes, *, long_numbers: bool = True) -> RowFacts:
        """Validate a row and return what an index keeps of it.

        Args:
            long_numbers: False where the row is known to hold no ten digits in a row.

        Raises:
            ValueError: the row breaks a rule; `parse_value_row` says where and which.
        """
        facts = self.quick_facts(line, long_numbers=long_numbers)
        if facts is None:
            row = _exact_row(line, self._objective)
            facts = RowFacts(row.sample_id, len(row.tokens), _one_label(compress(row.returns, row.loss_mask)))
        return facts

    def quick_facts(self, line: bytes, *, long_numbers: bool = True) -> RowFacts | None:
        """Return the facts of a row that is valid beyond doubt, else None."""
        if len(line) > MAX_ROW_BYTES:
            return None
        try:
            row = self._decode_row(line)
            length = row.response_length
            mask = bytes(row.loss_mask)
            tokens = bytes(row.tokens)
            num_tokens = tokens.count(b",") + 1
            if not 1 <= length < num_tokens or not _is_list_of_digits(tokens):
                return None
            if long_numbers and _TEN_DIGITS in tokens.translate(_DIGITS_TO_ZERO):
                return None
            if mask and not _is_mask(mask, length):
                return None
            label = self._label(bytes(row.returns), mask, length)
        except (ValueError, RecursionError):
            return None
        # As many strings as there are fields, and the id: no key came twice, and none is unknown.
        if line.count(b'"') != (12 if mask else 10) and not _keys_are_unique(line):
            return None
        return None if label is None else RowFacts(row.sample_id, num_tokens, label)

    def _label(self, returns: bytes, mask: bytes, length: int) -> float | None:
        """Return the label of `returns`, None where they may break a rule; raises ValueError there too."""
        first = returns[1:-1].split(b",", 1)[0].strip()
        repeated = b"[" + (first + b",") * (length - 1) + first + b"]"
        if returns == repeated or returns.replace(b" ", b"") == repeated:
            return self._decode_returns(b"[" + first + b"]")[0] + 0.0
        values = self._decode_returns(returns)
        if len(values) != length:
            return None
        return _one_label(compress(values, json.loads(mask)) if mask else values)


row_reader = functools.lru_cache(maxsize=8)(RowReader)


def has_long_number(data: bytes | memoryview) -> bool:
    """Return whether ten digits stand in a row anywhere; fewer make no number above `MAX_TOKEN_ID`."""
    # Refused command lines import this module and need not wait for numpy.
    import numpy as np

    signs = np.frombuffer(data, np.uint8)
    # Blocks that fit the first cache, each with the nine signs that follow it.
    for start in range(0, len(signs), _BLOCK):
        digit = signs[start : start + _BLOCK + 9] - np.uint8(48) < 10
        two = digit[:-1] & digit[1:]
        four = two[:-2] & two[2:]
        eight = four[:-4] & four[4:]
        if (eight[:-2] & two[8:]).any():
            return True
    return False


def _is_list_of_digits(value: bytes) -> bool:
    """Return whether a valid JSON value is a flat list of non-negative integers: nothing in it needs other signs."""
    return value[:1] == b"[" and not (
        value.find(b"[", 1) >= 0
        or b"-" in value
        or b"." in value
        or b"e" in value
        or b"E" in value
        or b"n" in value
        or b'"' in value
        or b"{" in value
    )


def _is_mask(mask: bytes, length: int) -> bool:
    if b"e" in mask:
        mask = mask.replace(b"true", b"1").replace(b"false", b"0")
    # `length` elements of one digit each have one comma less; nothing is left over but spaces.
    return (
        b"1" in mask
        and mask.translate(None, b"01 ]") == b"[" + b"," * (length - 1)
        and len(mask) == 2 * length + 1 + mask.count(b" ")
    )


_NUMBER_LIST = re.compile(rb"\[[-+.,eE\d\s]*\]")
_HUGE_NUMBER = re.compile(rb"\d{4000}")


def _keys_are_unique(line: bytes) -> bool:
    """Prove what the decoder skips in unknown keys: UTF-8, and keys that come once, at any depth.

    Lists of numbers are emptied first, which can make two keys equal but never two equal keys different.
    """
    if _HUGE_NUMBER.search(line):
        return False
    try:
        parse_strict_json(_NUMBER_LIST.sub(b"[]", line))
    except StrictJsonError:
        return False
    return True
