"""What ran when within one step: spans by lane, and how long a lane or a stage was busy."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Timeline:
    """Spans (lane, name, start, end) in seconds since the timeline was made; spans may overlap."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.spans: list[tuple[str, str, float, float]] = []

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the body as one span; a body that raises leaves none."""
        start = self.now()
        yield
        self.spans.append((lane, name, start, self.now()))

    def seconds(self, name: str) -> float | None:
        """Seconds in which at least one span called `name` ran; None where there is none."""
        named = [(start, end) for _, other, start, end in self.spans if other == name]
        return _covered(named) if named else None

    def busy(self, lane: str) -> float:
        """Seconds in which the lane had at least one span."""
        return _covered((start, end) for other, _, start, end in self.spans if other == lane)

    def to_json(self) -> list[list[str | float]]:
        """[lane, name, start, end] of every span, to the millisecond, in the order of their starts."""
        return [
            [lane, name, round(start, 3), round(end, 3)]
            for lane, name, start, end in sorted(self.spans, key=lambda span: span[2:])
        ]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total = reached = 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
