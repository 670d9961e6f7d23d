"""One reading of a file finds the same rows whatever the number of processes and the size of a part."""

import hashlib
import io
import json
import os
import random
import signal

import pytest

from miles.contracts.value_schema import ValueObjective
from miles.data import value_scan
from miles.data.value_scan import ScannedRows, scan_file

OBJECTIVE = ValueObjective()


def make_rows(count, *, seed=0):
    rng = random.Random(seed)
    lines = []
    for number in range(count):
        length = rng.choice([1, 5, 40, 400])
        row = {
            "sample_id": f"row-{number}",
            "tokens": [rng.randrange(1000) for _ in range(length + 3)],
            "response_length": length,
            "returns": [float(number % 2)] * length,
        }
        lines.append(json.dumps(row).encode() + b"\n")
        if rng.random() < 0.1:
            lines.append(rng.choice([b"\n", b" \t\r\n"]))
    return lines


def scan(data: bytes) -> tuple[ScannedRows, str]:
    with io.BufferedReader(io.BytesIO(data), buffer_size=64) as stream:  # type: ignore[arg-type]
        return scan_file(stream, size=len(data), objective=OBJECTIVE)


def by_hand(lines):
    """Offsets, digests, labels and lengths from json and hashlib alone."""
    offset, found = 0, []
    for line in lines:
        if line.strip():
            row = json.loads(line)
            digest = int.from_bytes(hashlib.sha256(line).digest()[:8], "little")
            found.append((offset, digest, row["returns"][0], len(row["tokens"])))
        offset += len(line)
    return found


def assert_equals(rows, lines):
    expected = by_hand(lines)
    assert rows.bad_row is None
    assert list(rows.offsets) == [row[0] for row in expected]
    assert list(rows.digests) == [row[1] for row in expected]
    assert list(rows.labels) == [row[2] for row in expected]
    assert rows.max_tokens == max(row[3] for row in expected)
    assert len(set(rows.id_digests)) == len(expected)


@pytest.mark.parametrize(("part_bytes", "slot_bytes"), [(7, 97), (97, 97), (100, 3000), (1000, 1000), (1 << 20,) * 2])
@pytest.mark.parametrize("last_newline", [True, False])
def test_scan_in_one_process_finds_every_row(monkeypatch, part_bytes, slot_bytes, last_newline):
    monkeypatch.setattr(value_scan, "PART_BYTES", part_bytes)
    monkeypatch.setattr(value_scan, "SLOT_BYTES", slot_bytes)
    lines = make_rows(60)
    data = b"".join(lines) if last_newline else b"".join(lines).rstrip()
    if not last_newline:
        lines = [line + b"\n" for line in data.split(b"\n")[:-1]] + [data.split(b"\n")[-1]]
    rows, digest = scan(data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert_equals(rows, lines)


@pytest.fixture(scope="module")
def parallel_rows():
    return make_rows(400, seed=3)


@pytest.fixture
def in_parallel(monkeypatch):
    monkeypatch.setattr(value_scan, "PARALLEL_FROM_BYTES", 0)
    monkeypatch.setattr(value_scan, "PART_BYTES", 500)
    monkeypatch.setattr(value_scan, "SLOT_BYTES", 2000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_scan_in_parallel_finds_every_row_and_the_first_bad_one(in_parallel, parallel_rows, monkeypatch):
    started = []
    worker_class = value_scan._Worker

    def start(*words):
        started.append(worker_class(*words))
        return started[-1]

    monkeypatch.setattr(value_scan, "_Worker", start)
    rows, digest = scan(b"".join(parallel_rows))
    assert len(started) == 2
    assert digest == hashlib.sha256(b"".join(parallel_rows)).hexdigest()
    assert_equals(rows, parallel_rows)

    # Two bad rows, far apart: one in a line longer than a slot, which the reading process parses by itself.
    broken = list(parallel_rows)
    first = next(i for i in range(150, 400) if len(broken[i]) > 2500)
    broken[first] = broken[first].replace(b'"response_length": 400', b'"response_length": 401')
    broken[-1] = b"{}\n"
    rows, digest = scan(b"".join(broken))
    assert rows.bad_row == sum(map(len, broken[:first]))
    assert digest == hashlib.sha256(b"".join(broken)).hexdigest()
    assert all(worker._process.poll() is not None for worker in started), "a process is left"


def test_scan_whose_worker_is_killed_says_so(in_parallel, parallel_rows, monkeypatch):
    worker_class = value_scan._Worker

    def start_and_kill(*words):
        worker = worker_class(*words)
        worker._process.send_signal(signal.SIGKILL)
        return worker

    monkeypatch.setattr(value_scan, "_Worker", start_and_kill)
    with pytest.raises(ChildProcessError, match="a process that parses value rows ended with status -9"):
        scan(b"".join(parallel_rows))


def test_worker_ends_when_its_parent_does():
    with value_scan._ring(4096, shared=True) as (descriptor, _):
        worker = value_scan._Worker(descriptor, OBJECTIVE)
        worker._pipe.close()  # As the kernel does for a parent that was killed.
        assert worker._process.wait(timeout=60) == 0
        worker.close()
