"""Rewards: loading a user's function, calling it under a time limit, and refusing what is no number."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from miles.data.sample import Sample, SampleStatus

logger = logging.getLogger(__name__)

_OF_A_FILE = "miles_hook_"
"""What the names of modules begin with that were loaded from a file."""

Policy = Literal["drop", "stop"]
Function = Callable[..., Any]
"""`reward(sample) -> number`, or `reward(samples) -> one number each`, plain or async: the parameter's name decides.
"""


class Reward(Protocol):
    """A reward function as `score_samples` calls it, wherever it runs."""

    name: str
    takes_all: bool

    async def __call__(self, samples: list[Sample], timeout_s: float) -> list[float]:
        """Rewards of all samples (of one sample, where the function takes no more); sets their metadata.

        Raises:
            BadReward: what the function returned is none.
            TimeoutError: it took longer than `timeout_s`, or raised this itself.
            Exception: it raised.
        """
        ...


class BadReward(ValueError):
    """A function returned what is no reward; the line names sample and function. Ends the run whatever the policy."""


class RewardFailed(Exception):
    """The function raised, or its process ended; the text says it in one line."""


def load_function(path: str, *, flag: str = "function path", arguments: int | None = None) -> Callable[..., Any]:
    """The function at "package.module:function" or "path/to/file.py:function".

    Args:
        flag: what the path was given as, for the message.
        arguments: how many it will be called with, by position; None does not ask.

    Raises:
        ValueError: malformed path, no such file, module or function, an error while the module was imported, or a
            function that cannot be called with so many arguments.
    """
    given = f"{flag} {path}"
    where, separator, name = path.rpartition(":")
    if not separator or not where or not name.isidentifier():
        raise ValueError(f"{given}: expected package.module:function or file.py:function")
    if where.endswith(".py"):
        module = _load_file(Path(where), given)
    else:
        try:
            module = importlib.import_module(where)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{given}: importing {where} failed: {describe(error)}") from error
    function = vars(module).get(name)
    if function is None:
        raise ValueError(f"{given}: {where} has no {name}")
    if not callable(function):
        raise ValueError(f"{given}: {name} is a {type(function).__name__}, not a function")
    if arguments is not None:
        _refuse_other_arguments(function, arguments, given)
    return function


def _refuse_other_arguments(function: Callable[..., Any], count: int, given: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some builtins do not tell.
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        what = "1 argument" if count == 1 else f"{count} arguments"
        raise ValueError(f"{given}: it is called with {what}, its signature is {signature}: {error}") from None


def _load_file(file: Path, given: str) -> Any:
    if not file.is_file():
        raise ValueError(f"{given}: there is no file {file}")
    # The full path in the name: two files may share their last part.
    file = file.resolve()
    module_name = _OF_A_FILE + "".join(c if c.isalnum() else "_" for c in str(file.with_suffix("")))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        # A script without a main guard would end this program too, and not even as a failure.
        del sys.modules[module_name]
        raise ValueError(f"{given}: importing {file} failed: {describe(error)}") from error
    return module


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
            except TimeoutError:
                unscored.extend(part)
                _fail(part, f"took more than {limit_s:g} s on", reward.name, on_timeout)
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


def function_name(function: Function) -> str:
    """As messages call it: "package.module:function" or "/path/to/file.py:function"."""
    module = str(getattr(function, "__module__", "?"))
    where = sys.modules[module].__file__ if module.startswith(_OF_A_FILE) else module
    return f"{where}:{getattr(function, '__qualname__', type(function).__qualname__)}"


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


def metadata_texts(samples: Sequence[Sample]) -> list[str]:
    """The metadata of each sample, to tell later what a function wrote there."""
    return [json.dumps(sample.metadata) for sample in samples]


def rewards_of(value: Any, samples: Sequence[Sample], texts: list[str], function: Function) -> list[float]:
    """The reward of each sample out of what the function returned.

    Args:
        texts: `metadata_texts` before the call.

    Raises:
        BadReward: no finite numbers, a wrong count, or metadata that cannot be kept as JSON.
    """
    name = function_name(function)
    if not takes_all(function):
        value = [value]
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
                json.dumps(sample.metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
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
    if not math.isfinite(value):
        raise BadReward(
            f"reward function {name} returned {float(value)} for sample {sample.index}, expected a finite number"
        )
    return float(value)


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, RewardFailed):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
