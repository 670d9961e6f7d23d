"""Rewards: a user's function called under a time limit, and what is no number refused."""

import asyncio
import inspect
import json
import logging
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from miles.data.sample import Sample, SampleStatus
from miles.rollout.functions import Function, describe, function_name

logger = logging.getLogger(__name__)

LARGEST_REWARD = 1e18
"""The square of a larger one, in a variance or a value loss, is no float32."""

Policy = Literal["drop", "stop"]


class Reward(Protocol):
    """A reward function as `score_samples` calls it, wherever it runs.

    The user's is `reward(sample) -> number`, or `reward(samples) -> one number each`, plain or async: the parameter's
    name decides.
    """

    name: str
    takes_all: bool

    async def __call__(self, samples: list[Sample], timeout_s: float) -> list[float]:
        """Rewards of all samples (of one sample, where the function takes no more); sets their metadata.

        Raises:
            BadReward: what the function returned is none.
            TimeoutError: it took longer than `timeout_s`, without a text; or raised this itself, which is the text.
            Exception: it raised.
        """
        ...


class BadReward(ValueError):
    """A function returned what is no reward; the line names sample and function. Ends the run whatever the policy."""


async def score_samples(
    samples: Sequence[Sample],
    reward: Reward,
    *,
    timeout_s: float,
    concurrency: int = 64,
    on_timeout: Policy = "drop",
    on_error: Policy = "stop",
) -> list[Sample]:
    """Set `reward` of every sample; returns those that were not scored.

    Such a sample gets status FAILED, no reward and a warning that names it; the others are not held up. The time of a
    sample counts from its own call. A function of all samples has `timeout_s` for every `concurrency` of them.

    Args:
        concurrency: calls at once.
        on_timeout, on_error: "drop" goes on as above when a call is late or raises; "stop" raises.

    Raises:
        ValueError: the function was late or raised where that stops, or returned no finite number, or a wrong count;
        the line names sample and function.
    """
    gate = asyncio.Semaphore(concurrency)
    unscored: list[Sample] = []

    async def score(part: list[Sample], limit_s: float) -> None:
        async with gate:
            try:
                rewards = await reward(part, limit_s)
            except TimeoutError as late:
                unscored.extend(part)
                # Its own has a text, of a judge that did not answer.
                what = f"ran out of time ({late}) on" if str(late) else f"took more than {limit_s:g} s on"
                _fail(part, what, reward.name, on_timeout)
                return
            except BadReward:
                raise
            except Exception as error:
                unscored.extend(part)
                _fail(part, "failed on", reward.name, on_error, error)
                return
        for sample, value in zip(part, rewards, strict=True):
            sample.reward = value

    if reward.takes_all:
        if samples:
            await score(list(samples), timeout_s * math.ceil(len(samples) / concurrency))
        return unscored
    try:
        async with asyncio.TaskGroup() as group:
            for sample in samples:
                group.create_task(score([sample], timeout_s))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return unscored


def takes_all(function: Function) -> bool:
    """Whether a function wants all samples at once: its first parameter is called `samples`."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "samples"


def _fail(part: list[Sample], what: str, name: str, policy: Policy, error: Exception | None = None) -> None:
    """Leave samples without a reward, or stop.

    Raises:
        ValueError: the policy is to stop.
    """
    end = "" if error is None else f": {describe(error)}"
    if policy == "stop":
        span = f"sample {part[0].index}" if len(part) == 1 else f"samples {part[0].index} to {part[-1].index}"
        raise ValueError(f"reward function {name} {what} {span}{end}") from error
    for sample in part:
        sample.reward = None
        sample.status = SampleStatus.FAILED
        sample.metadata["failure"] = f"reward function {name} {what} sample {sample.index}{end}"
        logger.warning("%s; the sample is not trained on", sample.metadata["failure"])


Scored = tuple[list[float], list[dict[str, Any]]]
"""Reward and metadata of each sample."""


def call_on(function: Function, samples: list[Sample]) -> tuple[Any, Callable[[Any], Scored]]:
    """What a function is to be called with for these samples, and what makes `Scored` of its result.

    The latter raises `BadReward`: no finite numbers, a wrong count, a list of samples that the function changed, or
    metadata that cannot be kept as JSON.
    """
    texts, given = [json.dumps(sample.metadata) for sample in samples], list(samples)

    def scored(value: Any) -> Scored:
        rewards = _rewards_of(value, samples, texts, function, given=given)
        return rewards, [sample.metadata for sample in samples]

    return given if takes_all(function) else given[0], scored


def _rewards_of(
    value: Any, samples: Sequence[Sample], texts: list[str], function: Function, *, given: Sequence[Sample]
) -> list[float]:
    name = function_name(function)
    if [id(sample) for sample in given] != [id(sample) for sample in samples]:
        raise BadReward(
            f"reward function {name} changed the list of samples it was given, so nobody knows which reward is whose: "
            "sort a copy, and return the rewards in the order of the list as it was"
        )
    if not takes_all(function):
        value = [value]
    elif getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        # Of NumPy or torch.
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadReward(
            f"reward function {name} must return a list of {len(samples)} rewards, got {type(value).__name__}"
        )
    if len(value) != len(samples):
        raise BadReward(
            f"reward function {name} returned {len(value)} rewards for {len(samples)} samples "
            f"({samples[0].index} to {samples[-1].index})"
        )
    for sample, text in zip(samples, texts, strict=True):
        if not isinstance(sample.metadata, dict):
            raise BadReward(
                f"reward function {name} replaced the metadata of sample {sample.index} by "
                f"{type(sample.metadata).__name__}, expected a dict"
            )
        try:
            if json.dumps(sample.metadata) != text:
                written = json.dumps(sample.metadata, allow_nan=False, ensure_ascii=False).encode()
                # As a resumed run has it, out of its save.
                sample.metadata = json.loads(written)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadReward(
                f"reward function {name} wrote to the metadata of sample {sample.index} what JSON cannot hold: {error}"
            ) from None
    return [_number(one, sample, name) for one, sample in zip(value, samples, strict=True)]


def _number(value: Any, sample: Sample, name: str) -> float:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        # Which is no number to Python, as its own bool is.
        value = bool(value)
    if not isinstance(value, numbers.Real):
        raise BadReward(
            f"reward function {name} returned {value!r} ({type(value).__name__}) for sample {sample.index}, "
            "expected a number"
        )
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= LARGEST_REWARD:
        raise BadReward(
            f"reward function {name} returned {reward:g} for sample {sample.index}, expected a finite number of at "
            f"most {LARGEST_REWARD:g} either way"
        )
    return reward
