"""Read a value data set once: hash its bytes and validate its rows, in parallel processes where it is large.

One process reads the file into a ring of shared memory, hashes what it read, and hands whole lines to workers, which
parse those very bytes: what was hashed is what was parsed. Memory grows with the number of rows, not their length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from multiprocessing.connection import Connection, Pipe
from typing import NoReturn

from miles.contracts.value_schema import ValueObjective
from miles.data import value_sample
from miles.data.value_sample import has_long_number, row_reader

# Lines are handed over in parts of about this size; the room beyond it is for long rows, and untouched without them.
PART_BYTES = 1 << 20
SLOT_BYTES = 4 << 20
SLOTS_PER_WORKER = 4
MAX_WORKERS = 8
PARALLEL_FROM_BYTES = 64 << 20


@dataclass
class ScannedRows:
    """What is kept of each row, and of all: 32 bytes a row, typecodes as `array` has them.

    Attributes:
        offsets: int64, where the row's line begins in the file.
        digests: 8 bytes of the SHA-256 of the row's line, its newline included.
        id_digests: 8 bytes of the SHA-256 of the sample_id.
        labels: float64, the one return at active tokens; NaN where there are several.
        bad_row: file offset of the first row that breaks a rule; None where all hold.
    """

    offsets: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    id_digests: array[int] = field(default_factory=lambda: array("Q"))
    labels: array[float] = field(default_factory=lambda: array("d"))
    max_tokens: int = 0
    bad_row: int | None = None

    def extend(self, later: ScannedRows) -> None:
        """Append the rows of a later part of the file."""
        self.offsets += later.offsets
        self.digests += later.digests
        self.id_digests += later.id_digests
        self.labels += later.labels
        self.max_tokens = max(self.max_tokens, later.max_tokens)
        self.bad_row = later.bad_row if self.bad_row is None else self.bad_row


def digest64(data: bytes) -> int:
    """Return the first 8 bytes of the SHA-256 of `data`, as an integer."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], sys.byteorder)


def scan_lines(
    data: bytes | mmap.mmap, start: int, stop: int, *, offset: int, objective: ValueObjective
) -> ScannedRows:
    """Validate the rows of the whole lines in `data[start:stop]`; stops at the first bad one.

    Args:
        offset: where `data[start]` stands in its file.
    """
    rows, reader, sha256 = ScannedRows(), row_reader(objective), hashlib.sha256
    with memoryview(data) as view, view[start:stop] as part:
        # One look at the part saves one at each row; a row that fills a part by itself is looked at anyway.
        long_numbers = stop - start > SLOT_BYTES or has_long_number(part)
    offset -= start
    while start < stop:
        end = data.find(b"\n", start, stop) + 1 or stop
        line = data[start:end]
        if not line.isspace():
            try:
                facts = reader.facts(line, long_numbers=long_numbers)
            except ValueError:
                rows.bad_row = offset + start
                return rows
            rows.offsets.append(offset + start)
            rows.digests.frombytes(sha256(line).digest()[:8])
            rows.id_digests.frombytes(sha256(facts.sample_id.encode("utf-8", "surrogatepass")).digest()[:8])
            rows.labels.append(facts.label)
            rows.max_tokens = max(rows.max_tokens, facts.num_tokens)
        start = end
    return rows


def scan_file(stream: BufferedReader, *, size: int, objective: ValueObjective) -> tuple[ScannedRows, str]:
    """Read `stream` to its end and return its rows and the SHA-256 of its bytes.

    After a bad row the rest is only hashed.

    Args:
        size: expected number of bytes; decides only how many processes parse.

    Raises:
        ChildProcessError: a parsing process ended, killed for memory perhaps.
    """
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0))) if size >= PARALLEL_FROM_BYTES else 0
    slots = max(1, workers * SLOTS_PER_WORKER)
    digest = hashlib.sha256()
    rows = ScannedRows()
    pending: deque[Callable[[], ScannedRows]] = deque()

    with (
        _ring(slots * SLOT_BYTES, shared=workers > 0) as (descriptor, ring),
        _workers(workers, descriptor, objective) as pool,
    ):
        turn = 0
        for base, length, offset, long_line in _chunks(stream, ring, slots, digest):
            while len(pending) > max(0, slots - 2):
                rows.extend(pending.popleft()())
            if rows.bad_row is not None:
                continue
            if pool and long_line is None:
                pool[turn].send((base, length, offset))
                pending.append(pool[turn].receive)
                turn = (turn + 1) % len(pool)
            else:
                part = (ring, base, base + length) if long_line is None else (long_line, 0, len(long_line))
                found = scan_lines(*part, offset=offset, objective=objective)
                pending.append(lambda found=found: found)
        while pending:
            found = pending.popleft()()
            if rows.bad_row is None:
                rows.extend(found)
    return rows, digest.hexdigest()


@contextlib.contextmanager
def _ring(size: int, *, shared: bool) -> Iterator[tuple[int, mmap.mmap]]:
    descriptor = os.memfd_create("miles-value-rows") if shared else -1
    try:
        if shared:
            os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as ring:
            yield descriptor, ring
    finally:
        if shared:
            os.close(descriptor)


def _chunks(
    stream: BufferedReader, ring: mmap.mmap, slots: int, digest: hashlib._Hash
) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Yield (place in the ring, length, file offset, None) of whole lines, slot after slot.

    A line that fills a slot comes as bytes in the fourth place, cut after the longest that a row may be.
    """
    carry, offset, number = b"", 0, 0
    ended = False
    while not ended:
        base = number % slots * SLOT_BYTES
        ring[base : base + len(carry)] = carry
        filled, cut = len(carry), 0
        with memoryview(ring) as view:
            while not ended and cut <= 0 and filled < SLOT_BYTES:
                until = min(SLOT_BYTES, filled + PART_BYTES)
                with view[base + filled : base + until] as space:
                    got = stream.readinto(space)
                    digest.update(space[:got])
                ended = got == 0
                cut = ring.rfind(b"\n", base + filled, base + filled + got) + 1 - base
                filled += got
        if ended:
            cut = filled
        if cut > 0:
            carry = ring[base + cut : base + filled]
            yield base, cut, offset, None
            offset, number = offset + cut, number + 1
        elif not ended:
            begin = ring[base : base + filled]
            rest = stream.readline(value_sample.MAX_ROW_BYTES + 1 - filled)
            digest.update(rest)
            yield base, 0, offset, begin + rest
            offset += len(begin) + len(rest)
            while not rest.endswith(b"\n") and (rest := stream.readline(SLOT_BYTES)):
                digest.update(rest)
                offset += len(rest)
            carry = b""


class _Worker:
    """A process that validates the parts of the ring it is told of, in order."""

    def __init__(self, descriptor: int, objective: ValueObjective) -> None:
        self._pipe, theirs = Pipe()
        # A plain program rather than multiprocessing: it neither imports the caller's main module nor forks threads.
        code = (
            "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from miles.data.value_scan import serve; serve()"
        )
        words = [json.dumps(sys.path), str(descriptor), str(theirs.fileno()), json.dumps(objective.to_dict())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                pass_fds=(descriptor, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def send(self, part: tuple[int, int, int]) -> None:
        try:
            self._pipe.send(part)
        except OSError:
            self._fail()

    def receive(self) -> ScannedRows:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._fail()

    def _fail(self) -> NoReturn:
        raise ChildProcessError(
            f"a process that parses value rows ended with status {self._process.wait(timeout=10)}"
        ) from None

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _workers(count: int, descriptor: int, objective: ValueObjective) -> Iterator[list[_Worker]]:
    pool: list[_Worker] = []
    try:
        for _ in range(count):
            pool.append(_Worker(descriptor, objective))
        yield pool
    finally:
        for worker in pool:
            worker.close()


def serve() -> None:
    """Be a worker: descriptors and objective stand in the command line. Ends when the parent does."""
    # Ctrl-C reaches the whole group; the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    objective = ValueObjective.from_dict(json.loads(sys.argv[4]))
    with mmap.mmap(int(sys.argv[2]), 0, prot=mmap.PROT_READ) as ring, Connection(int(sys.argv[3])) as pipe:
        while True:
            try:
                base, length, offset = pipe.recv()
                pipe.send(scan_lines(ring, base, base + length, offset=offset, objective=objective))
            except (EOFError, OSError):
                return
