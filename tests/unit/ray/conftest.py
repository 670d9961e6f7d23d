"""What tests of several modules of the Ray layer need to do without Ray."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A manager sets logging up for its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class Remote:
    """An object whose methods are called as those of a Ray actor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        async def call(*words: Any, **named: Any) -> Any:
            answer = getattr(self._target, name)(*words, **named)
            return await answer if inspect.isawaitable(answer) else answer

        return SimpleNamespace(remote=lambda *words, **named: asyncio.ensure_future(call(*words, **named)))


@pytest.fixture
def as_actor() -> Callable[[Any], Any]:
    """as_actor(target): its methods are called as those of a Ray actor."""
    return Remote
