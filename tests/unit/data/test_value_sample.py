"""The quick reader of a value row never accepts what the exact one refuses, and sees the same row."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.contracts.value_schema import ValueObjective
from miles.data.value_sample import has_long_number, parse_value_row, row_reader

CLASSIFICATION = ValueObjective()
MSE = ValueObjective(loss_type="mse")
ROW = {
    "sample_id": "task-1/a",
    "tokens": [11, 2, 30, 4],
    "response_length": 2,
    "returns": [0.5, 0.5],
    "loss_mask": [1, 0],
}


def line_of(separators=(",", ":"), **changes):
    row = {**ROW, **changes}
    return json.dumps({k: v for k, v in row.items() if v is not ...}, separators=separators).encode() + b"\n"


def judge(line, objective):
    """What plain Python says of a row: (id, number of tokens, label), or None for a row that is refused."""
    try:
        sample = parse_value_row(line, objective=objective, location="x")
    except ValueError:
        return None
    labels = {r for r, m in zip(sample.returns, sample.loss_mask, strict=True) if m}
    return sample.sample_id, len(sample.tokens), labels.pop() if len(labels) == 1 else None


def assert_quick_agrees(line, objective):
    facts = row_reader(objective).quick_facts(line, long_numbers=bool(line) and has_long_number(line))
    if facts is not None:
        label = None if math.isnan(facts.label) else facts.label
        assert (facts.sample_id, facts.num_tokens, label) == judge(line, objective), line


@pytest.mark.parametrize(
    "line",
    [
        line_of(),
        line_of(separators=(", ", ": ")),
        line_of()[:-1] + b"\r\n",
        line_of()[:-1],
        b" \t" + line_of(),
        line_of(loss_mask=...),
        line_of(loss_mask=[True, False]),
        line_of(returns=[0, 1]),
        line_of(returns=[0.25, 0.5], loss_mask=...),
        line_of(sample_id='Zürich "quoted" \\ 😀'),
        line_of(reward=1.0, metadata={"task": "é", "parts": [1, 2], "more": {"a": [], "b": None}}),
    ],
)
def test_quick_reader_vouches_for_ordinary_rows(line):
    assert row_reader(CLASSIFICATION).quick_facts(line) is not None
    assert_quick_agrees(line, CLASSIFICATION)


BASE = line_of()[:-1]
SUSPECT = [
    (b"[11,2,30,4]", b"[11,2,30,2147483648]", "tokens must be at most 2147483647"),
    (b"[11,2,30,4]", b"[11,2,30,4.0]", "tokens must be a list of at least two non-negative integers"),
    (b"[11,2,30,4]", b"[11,2,30,4e0]", "tokens must be a list"),
    (b"[11,2,30,4]", b"[11,2,30,-4]", "tokens must be a list"),
    (b"[11,2,30,4]", b"[[11],2,30,4]", "tokens must be a list"),
    (b"[11,2,30,4]", b'["11",2,30,4]', "tokens must be a list"),
    (b"[11,2,30,4]", b"[11,2,30,true]", "tokens must be a list"),
    (b"[11,2,30,4]", b"1123", "tokens must be a list"),
    (b"[11,2,30,4]", b"[]", "tokens must be a list"),
    (b"[11,2,30,4]", b"[11,2]", "must leave at least one prompt token"),
    (b"[11,2,30,4]", b"[11,2,30,04]", "invalid JSON: Expecting ',' delimiter"),
    (b"[11,2,30,4]", b"[11,2,,4]", "invalid JSON: Expecting value"),
    (b"[11,2,30,4]", b"[11,2,30,4,]", "invalid JSON: "),
    (b"[11,2,30,4]", b"[11 2,30,4]", "invalid JSON: Expecting ',' delimiter"),
    (b"[1,0]", b"[1,2]", "loss_mask values must be"),
    (b"[1,0]", b"[11,0]", "loss_mask values must be"),
    (b"[1,0]", b"[1.0,0]", "loss_mask values must be"),
    (b"[1,0]", b'["1",0]', "loss_mask values must be"),
    (b"[1,0]", b"[0,0]", "must select at least one target"),
    (b"[1,0]", b"[1]", "loss_mask must be a list of response_length=2"),
    (b"[1,0]", b"null", "loss_mask must be a list"),
    (b"[1,0]", b'""', "loss_mask must be a list"),
    (b"[0.5,0.5]", b"[0.5,1.5]", "classification returns must stay inside"),
    (b"[0.5,0.5]", b"[1.5,1.5]", "classification returns must stay inside"),
    (b"[0.5,0.5]", b"[NaN,NaN]", "NaN is not valid JSON"),
    (b"[0.5,0.5]", b"[Infinity,0.5]", "Infinity is not valid JSON"),
    (b"[0.5,0.5]", b"[1e999,1e999]", "returns must be finite numbers"),
    (b"[0.5,0.5]", b"[" + b"9" * 400 + b",0.5]", "an integer too large for float64"),
    (b"[0.5,0.5]", b"[true,true]", "returns must be finite numbers"),
    (b"[0.5,0.5]", b'["0.5","0.5"]', "returns must be finite numbers"),
    (b"[0.5,0.5]", b"[[0.5],0.5]", "returns must be finite numbers"),
    (b"[0.5,0.5]", b"[0.5]", "returns must be a list of response_length=2"),
    (b"[0.5,0.5]", b"0.5", "returns must be a list"),
    (b'"response_length":2', b'"response_length":2.0', "response_length must be an integer"),
    (b'"response_length":2', b'"response_length":true', "response_length must be an integer"),
    (b'"response_length":2', b'"response_length":0', "response_length must be an integer of at least 1"),
    (b'"task-1/a"', b'""', "sample_id must be a non-empty string"),
    (b'"task-1/a"', b"17", "sample_id must be a non-empty string"),
    (b'"task-1/a"', b'"\xff"', "not UTF-8: byte 0xff at offset 14"),
    (b'"task-1/a"', b'"\xed\xa0\x80"', "not UTF-8: byte 0xed"),
    (b'"task-1/a"', b'"\x01"', "invalid JSON: Invalid control character"),
    (b'"task-1/a"', b'"a","sample_id":"b"', "duplicate key 'sample_id'"),
    (b"[1,0]}", b'[1,0],"tokens":[1,2,3]}', "duplicate key 'tokens'"),
    (b',"loss_mask":[1,0]', b',"\\u0074okens":[1,2,3]', "duplicate key 'tokens'"),
    (b',"loss_mask":[1,0]', b',"returns":[0.5,0.5]', "duplicate key 'returns'"),
    (b"[1,0]}", b'[1,0],"x":1,"x":2}', "duplicate key 'x'"),
    (b"[1,0]}", b'[1,0],"x":[{"a":[1],"a":[2]}]}', "duplicate key 'a'"),
    (b"[1,0]}", b'[1,0],"x":"\xff"}', "not UTF-8"),
    (b"[1,0]}", b'[1,0],"x":[NaN]}', "NaN is not valid JSON"),
    (b"[1,0]}", b'[1,0],"x":[' + b"1" * 5000 + b"]}", "integer string conversion"),
    (b'{"sample_id"', b'\xef\xbb\xbf{"sample_id"', "starts with a byte-order mark"),
    (b"[1,0]}", b"[1,0]}\x0b", "invalid JSON: Extra data"),
    (b"[1,0]}", b"[1,0]}{}", "invalid JSON: Extra data"),
    (b"[1,0]}", b"[1,0]", "invalid JSON: Expecting ',' delimiter"),
]


@pytest.mark.parametrize(("old", "new", "message"), SUSPECT)
def test_quick_reader_leaves_a_bad_row_to_the_exact_one(old, new, message):
    line = BASE.replace(old, new, 1) + b"\n"
    assert line != BASE + b"\n"
    assert row_reader(CLASSIFICATION).quick_facts(line) is None
    with pytest.raises(ValueError):
        row_reader(CLASSIFICATION).facts(line)
    with pytest.raises(ValueError, match=rf"^rows:7: .*{message}"):
        parse_value_row(line, objective=CLASSIFICATION, location="rows:7")


@pytest.mark.parametrize(
    ("old", "new", "label"),
    [
        (b'"task-1/a"', b'"\\ud800"', 0.5),
        (b"[11,2,30,4]", b"[11,2,30,-0]", 0.5),
        (b"[11,2,30,4]", b"[11,\t2,30,4]", 0.5),
        (b"[0.5,0.5]", b"[-0.0,1]", 0.0),
        (b"[1,0]", b"[1,\t0]", 0.5),
        (b"[0.5,0.5]", b"[0.50,5e-1]", 0.5),
    ],
)
def test_unusual_but_valid_row_is_accepted(old, new, label):
    facts = row_reader(CLASSIFICATION).facts(BASE.replace(old, new, 1))
    assert (facts.num_tokens, facts.label) == (4, label)
    assert math.copysign(1, facts.label) == 1


@pytest.mark.parametrize("number", [1, 123456789, 1234567890, 9999999999, 10**30])
@pytest.mark.parametrize("before", [b"", b"123456789,", b"x" * 7, b"9" * 8 + b"."])
def test_long_number_is_ten_digits_in_a_row(number, before):
    assert has_long_number(before + str(number).encode() + b",1") == (number >= 10**9)


def test_token_of_ten_digits_is_looked_at_wherever_it_stands():
    for place in range(4):
        tokens = [1, 2, 3, 4]
        for token, valid in ((2**31 - 1, True), (2**31, False)):
            tokens[place] = token
            line = line_of(tokens=tokens)
            assert has_long_number(line)
            assert row_reader(CLASSIFICATION).quick_facts(line) is None
            assert (judge(line, CLASSIFICATION) is not None) == valid


def test_label_is_the_one_return_at_active_tokens():
    for returns, mask, label in (([0.0, 1.0], [0, 1], 1.0), ([0.0, 1.0], [1, 1], None), ([0.2, 0.2], ..., 0.2)):
        line = line_of(returns=returns, loss_mask=mask)
        found = row_reader(CLASSIFICATION).facts(line).label
        assert math.isnan(found) if label is None else found == label
        assert_quick_agrees(line, CLASSIFICATION)


NUMBERS = st.one_of(
    st.integers(-3, 2**31 + 3), st.booleans(), st.floats(), st.none(), st.text(max_size=2), st.just([1])
)
FIELDS = {
    "sample_id": st.one_of(st.text(max_size=4), st.integers(), st.none()),
    "tokens": st.one_of(
        st.lists(st.integers(0, 10**5), min_size=2, max_size=6), st.lists(NUMBERS, max_size=5), NUMBERS
    ),
    "response_length": st.one_of(st.integers(0, 4), NUMBERS),
    "returns": st.one_of(st.lists(st.sampled_from([0, 1, 0.5, 1.0]), max_size=4), st.lists(NUMBERS, max_size=4)),
    "loss_mask": st.one_of(st.lists(st.sampled_from([0, 1, True, False]), max_size=4), st.lists(NUMBERS, max_size=4)),
    "extra": st.dictionaries(st.text(max_size=2), NUMBERS, max_size=2),
}


@settings(max_examples=100, deadline=None)
@given(
    row=st.fixed_dictionaries({}, optional=FIELDS),
    base=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " : ")]),
    ascii_only=st.booleans(),
    objective=st.sampled_from([CLASSIFICATION, MSE]),
)
def test_quick_reader_agrees_on_any_row(row, base, separators, ascii_only, objective):
    row = {**ROW, **row} if base else row
    text = json.dumps(row, separators=separators, ensure_ascii=ascii_only)
    assert_quick_agrees(text.encode("utf-8", "surrogatepass") + b"\n", objective)


def test_quick_reader_agrees_on_damaged_bytes():
    """Rows with a few bytes deleted, inserted or replaced: mostly broken, some still rows."""
    rng = random.Random(20)
    lines = [line_of(), line_of(separators=(", ", ": "), extra={"k": [1, 2]}), line_of(loss_mask=...)]
    alphabet = b'0123456789-+.eE,:[]{}" \t\r\\untrfalsNI\x00\x1f\x80\xc3\xa9\xff'
    accepted = 0
    for _ in range(12_000):
        damaged = bytearray(rng.choice(lines))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(damaged))
            edit = rng.randrange(4)
            if edit == 0:
                del damaged[place : place + rng.randint(1, 9)]
            elif edit == 1:
                damaged.insert(place, rng.choice(alphabet))
            elif edit == 2:
                damaged[place] = rng.choice(alphabet)
            else:
                piece = damaged[place : place + rng.randint(1, 25)]
                damaged[place:place] = piece
            damaged = damaged or bytearray(b"{")
        line = bytes(damaged)
        assert_quick_agrees(line, CLASSIFICATION)
        accepted += row_reader(CLASSIFICATION).quick_facts(line) is not None
    assert accepted > 100, "the damage is too coarse to find a row that is accepted wrongly"
