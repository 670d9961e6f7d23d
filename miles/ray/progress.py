"""One progress bar, on a terminal; plain lines now and then where there is none."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_EVERY_S = 10.0


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever reads the lines has gone; rich would end the program, and with it the work."""
        self.quiet = True


@contextmanager
def progress_bar(description: str, *, total: int, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Yield `advance(note)`, to be called after each of `total` steps; `done` of them lie behind already."""
    console = _Console(stderr=True)
    if not sys.stderr.isatty():
        yield _plain(console, description, total, done)
        return
    columns = (
        TextColumn(description),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(description, total=total, completed=done, note="")
        yield lambda note: progress.update(bar, advance=1, note=note)


def _plain(console: Console, description: str, total: int, done: int) -> Callable[[str], None]:
    state = {"done": done, "shown": time.monotonic()}

    def advance(note: str) -> None:
        state["done"] += 1
        if state["done"] == total or time.monotonic() - state["shown"] > _PLAIN_EVERY_S:
            state["shown"] = time.monotonic()
            console.print(f"{description}: {state['done']:.0f}/{total} {note}", highlight=False)

    return advance
