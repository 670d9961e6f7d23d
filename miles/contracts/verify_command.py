"""`miles verify PATH`: one line per link of the chain, exit code 1 at a broken one. No torch, no GPU, no model."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable

from miles.contracts.chain import Link, first_broken, verify_chain

HELP = "verify manifest, data, contract, checkpoint files, evaluation report and run, without loading a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `miles verify` to `parser`."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run folder, a critic folder, a checkpoint folder, an evaluation report, a contract or a manifest",
    )


class _Progress:
    """Bytes hashed so far, on one line of standard error, on a terminal only."""

    def __init__(self) -> None:
        self._bytes, self._start, self._shown = 0, time.monotonic(), 0.0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if now - self._shown > 0.1:
                self._shown = now
                rate = self._bytes / max(now - self._start, 1e-9) / 1e6
                sys.stderr.write(f"\r\033[K  hashing: {self._bytes / 1e6:,.0f} MB at {rate:,.0f} MB/s")
                sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")


def _line(link: Link, paint: Callable[[str, str], str]) -> str:
    verdict = paint("ok    ", "32") if link.ok else paint("BROKEN", "31;1")
    return f"{verdict}  {link.name:<17}  {link.path}  {paint(link.detail, '2' if link.ok else '31')}"


def run(ns: argparse.Namespace) -> int:
    """Print the chain of `ns.path`. Return 0 when every link holds, 1 at a broken link, 2 for a path that is none."""

    def paint(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text

    progress = _Progress() if sys.stderr.isatty() else None
    try:
        links = verify_chain(ns.path, progress=progress)
    except (ValueError, OSError) as error:
        print(f"miles verify: {error}", file=sys.stderr)
        return 2
    finally:
        if progress is not None:
            progress.clear()
    for link in links:
        print(_line(link, paint))
    broken = first_broken(links)
    if broken is None:
        print(paint(f"verified: {len(links)} {'link holds' if len(links) == 1 else 'links hold'}", "32"))
        return 0
    print(paint(f"first broken link: {broken.name}: {broken.path}: {broken.detail}", "31;1"))
    return 1
