"""Canonical bytes, strict reading and seals."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.contracts.canonical import (
    StrictJsonError,
    canonical_json_bytes,
    check_seal,
    is_sha256,
    parse_json,
    parse_strict_json,
    read_json,
    require_finite,
    require_int,
    sealed,
    sha256_file,
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(JSON_VALUES)
def test_canonical_json_read_back_gives_the_same_value_and_bytes(value):
    try:
        data = canonical_json_bytes(value)
    except UnicodeEncodeError:  # A lone surrogate is no UTF-8.
        return
    assert parse_strict_json(data) == value
    assert canonical_json_bytes(parse_strict_json(data)) == data


def test_canonical_json_sorts_keys_and_keeps_unicode():
    assert canonical_json_bytes({"b": [1, 2.5], "a": "λ"}) == '{"a":"λ","b":[1,2.5]}\n'.encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":', "Expecting value: line 1 column 6"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "nested too deeply$"),
    ],
)
def test_json_that_cannot_be_parsed_is_told_by_its_place_and_reason(data, reason, tmp_path):
    with pytest.raises(ValueError, match=f"^a line: not valid JSON: {reason}"):
        parse_json(data, where="a line")
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{path}: damaged: {reason}"):
        read_json(path, fault="damaged")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_canonical_json_non_finite_is_refused(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json_bytes({"x": number})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a":1,"a":2}', "duplicate key 'a'"),
        (b'{"x":{"a":1,"b":2,"a":2}}', "duplicate key 'a'"),
        (b'{"a":NaN}', "NaN is not valid JSON"),
        (b"[-Infinity]", "-Infinity is not valid JSON"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b'{"a":"\xff"}', "not UTF-8: byte 0xff at offset 6"),
        (b"{}{}", "Extra data"),
        (b"", "Expecting value"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "integer string conversion"),
    ],
)
def test_strict_json_refuses_and_says_why(data, message):
    with pytest.raises(StrictJsonError, match=message):
        parse_strict_json(data)


@pytest.mark.parametrize("body", [{2: 1, 10: 3}, {"a": 1, 10: 3}, {"a": (1, 2)}, {"a": {1.5: None, True: "x"}}])
def test_seal_is_of_what_is_read_back(body: dict[Any, Any]) -> None:
    check_seal(json.loads(json.dumps(sealed({"held": body}))))


def test_seal_detects_any_change_of_contents():
    record = sealed({"a": 1, "b": [1.5]})
    check_seal(json.loads(canonical_json_bytes(record)))
    with pytest.raises(ValueError, match="was changed after it was written"):
        check_seal({**record, "a": 2})
    with pytest.raises(ValueError, match="has no seal_sha256"):
        check_seal({"a": 1})
    assert sealed(record) == record


def test_sha256_file_equals_hashlib_and_reports_bytes(tmp_path):
    data = bytes(range(256)) * 40_000
    (tmp_path / "f").write_bytes(data)
    seen = []
    assert sha256_file(tmp_path / "f", progress=seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data)


@pytest.mark.parametrize("text", ["a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", 5])
def test_is_sha256_only_64_lower_case_hex_digits(text):
    assert is_sha256("0123456789abcdef" * 4)
    assert not is_sha256(text)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_require_int_refuses_what_is_no_int(value):
    with pytest.raises(ValueError, match="steps must be an integer"):
        require_int(value, field="steps")


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), "1", 10**400])
def test_require_finite_refuses_what_is_no_finite_number(value):
    with pytest.raises(ValueError, match="x must be a finite number"):
        require_finite(value, field="x")
