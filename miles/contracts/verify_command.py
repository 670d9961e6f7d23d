"""`miles verify PATH`: one line per link of the chain, exit code 1 at a broken one. No torch, no GPU, no model."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable

from miles.contracts.canonical import error_text
from miles.contracts.chain import Link, first_broken, unchecked_checkpoints, verify_chain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `miles verify` to `parser`."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run folder, a critic folder, a checkpoint folder, an evaluation report, a contract or a manifest",
    )


class ProgressBar:
    """A bar over the bytes to hash, with rate and time left, on one line of standard error."""

    WIDTH = 30

    def __init__(self) -> None:
        self._done, self._total, self._start, self._shown = 0, 0, 0.0, 0.0
        self._lock = threading.Lock()

    def start(self, total_bytes: int) -> None:
        self._total, self._start = total_bytes, time.monotonic()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._shown > 0.1:
                self._shown = now
                sys.stderr.write(f"\r\033[K{self.line(now - self._start)}")
                sys.stderr.flush()

    def line(self, seconds: float) -> str:
        """The bar after `seconds` of hashing."""
        # A file may grow while it is read.
        share = min(self._done / max(self._total, 1), 1.0)
        rate = self._done / max(seconds, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        bar = ("#" * round(share * self.WIDTH)).ljust(self.WIDTH, ".")
        return (
            f"  [{bar}] {share:4.0%} of {self._total / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s, "
            f"{max(left, 0.0):,.0f} s left"
        )

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

    progress = ProgressBar() if sys.stderr.isatty() else None
    try:
        links = verify_chain(ns.path, progress=progress)
    except (ValueError, OSError) as error:
        print(f"miles verify: {error_text(error)}", file=sys.stderr)
        return 2
    finally:
        if progress is not None:
            progress.clear()
    for link in links:
        print(_line(link, paint))
    if others := unchecked_checkpoints(links):
        print(f"not part of the chain, not checked: {', '.join(map(str, others))}")
    broken = first_broken(links)
    if broken is None:
        print(paint(f"verified: {len(links)} {'link holds' if len(links) == 1 else 'links hold'}", "32"))
        return 0
    print(paint(f"first broken link: {broken.name}: {broken.path}: {broken.detail}", "31;1"))
    return 1
