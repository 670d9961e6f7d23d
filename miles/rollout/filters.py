"""Filters for `--dynamic-sampling-filter-path`: whether the samples of one prompt are worth training on."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from miles.data.sample import Sample
from miles.rollout.functions import describe_in, load_function

_FLAG = "--dynamic-sampling-filter-path"


def nonzero_reward_std(samples: Sequence[Sample]) -> bool:
    """Keep a group whose rewards differ: one that is all right or all wrong has no advantage (DAPO, 2503.14476)."""
    return len({sample.reward for sample in samples}) > 1


def load_filter(path: str, *, timeout_s: float) -> Callable[[list[Sample]], Awaitable[bool]]:
    """The filter at `path`. It is asked about copies, in a thread, so that it decides and changes or holds up nothing.

    Raises:
        ValueError: nothing can be loaded from there; later, when it is awaited, that it raised, took longer than
            `timeout_s` or did not return a bool, naming the group.
    """
    function = load_function(path, flag=_FLAG, arguments=1, awaited=False)

    def ask(group: list[Sample]) -> tuple[Any, BaseException | None]:
        try:
            return function(pickle.loads(pickle.dumps(group))), None
        except BaseException as error:
            # Some, as StopIteration, cannot be raised into a coroutine.
            return None, error

    async def keep(group: list[Sample]) -> bool:
        asked = f"{_FLAG} {path}, asked about group {group[0].group_index}"
        try:
            answer, error = await asyncio.wait_for(asyncio.to_thread(ask, group), timeout_s)
        except TimeoutError:
            raise ValueError(f"{asked}: no answer within --rm-timeout-s {timeout_s:g}") from None
        if error is not None:
            raise ValueError(f"{asked}: {describe_in(error, function)}") from error
        if not isinstance(answer, bool | np.bool_):
            raise ValueError(f"{asked}: returned {answer!r} ({type(answer).__name__}), expected True or False")
        return bool(answer)

    return keep
