"""Rewards: loading a user's function, calling it under a time limit, and refusing what is no number."""

import asyncio
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from miles.data.sample import Sample, SampleStatus

logger = logging.getLogger(__name__)

Policy = Literal["drop", "stop"]
RewardFunction = Callable[..., Any]
"""`reward(sample) -> number`, or `reward(samples) -> one number each`, plain or async: the parameter's name decides.
"""


def load_function(path: str, *, flag: str = "function path") -> Callable[..., Any]:
    """The function at "package.module:function" or "path/to/file.py:function".

    Args:
        flag: what the path was given as, for the message.

    Raises:
        ValueError: malformed path, no such file, module or function, or an error while the module was imported.
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
        except Exception as error:
            raise ValueError(f"{given}: importing {where} failed: {_describe(error)}") from error
    function = vars(module).get(name)
    if function is None:
        raise ValueError(f"{given}: {where} has no {name}")
    if not callable(function):
        raise ValueError(f"{given}: {name} is a {type(function).__name__}, not a function")
    return function


def _load_file(file: Path, given: str) -> Any:
    if not file.is_file():
        raise ValueError(f"{given}: there is no file {file}")
    # The full path in the name: two files may share their last part.
    module_name = "miles_hook_" + "".join(c if c.isalnum() else "_" for c in str(file.resolve().with_suffix("")))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{given}: importing {file} failed: {_describe(error)}") from error
    return module


async def score_samples(
    samples: Sequence[Sample],
    reward_fn: RewardFunction,
    *,
    timeout_s: float,
    concurrency: int = 64,
    on_timeout: Policy = "drop",
    on_error: Policy = "stop",
) -> list[Sample]:
    """Set `reward` of every sample; returns those that were not scored.

    Such a sample gets status FAILED, no reward and a warning that names it; the others are not held up. All of it
    takes no longer than `timeout_s` for every `concurrency` samples. A plain function runs in a thread (which Python
    cannot end: it may go on in the background after its time), an async one in this loop. A function whose first
    parameter is called `samples` gets all of them at once and `timeout_s` times their number.

    Args:
        on_timeout, on_error: "drop" goes on as above when a call is late or raises; "stop" raises.

    Raises:
        ValueError: the function was late or raised where that stops, or returned no finite number, or a wrong count;
        the line names sample and function.
    """
    name = f"{getattr(reward_fn, '__module__', '?')}:{getattr(reward_fn, '__qualname__', repr(reward_fn))}"
    if _takes_all(reward_fn):
        return await _score_together(samples, reward_fn, name, timeout_s, on_timeout=on_timeout, on_error=on_error)
    gate = asyncio.Semaphore(concurrency)
    unscored: list[Sample] = []

    async def score(sample: Sample) -> None:
        async with gate:
            try:
                value = await asyncio.wait_for(_call(reward_fn, sample), timeout_s)
            except TimeoutError:
                _fail(sample, f"took more than {timeout_s:g} s on sample {sample.index}", name, on_timeout)
                unscored.append(sample)
                return
            except Exception as error:
                _fail(sample, f"failed on sample {sample.index}: {_describe(error)}", name, on_error, error)
                unscored.append(sample)
                return
        sample.reward = _number(value, sample, name)

    try:
        async with asyncio.TaskGroup() as group:
            for sample in samples:
                group.create_task(score(sample))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return unscored


async def _score_together(
    samples: Sequence[Sample],
    reward_fn: RewardFunction,
    name: str,
    timeout_s: float,
    *,
    on_timeout: Policy,
    on_error: Policy,
) -> list[Sample]:
    if not samples:
        return []
    try:
        values = await asyncio.wait_for(_call(reward_fn, list(samples)), timeout_s * len(samples))
    except TimeoutError:
        for sample in samples:
            _fail(sample, f"took more than {timeout_s * len(samples):g} s on sample {sample.index}", name, on_timeout)
        return list(samples)
    except Exception as error:
        if on_error == "stop":
            span = f"samples {samples[0].index} to {samples[-1].index}"
            raise ValueError(f"reward function {name} failed on {span}: {_describe(error)}") from error
        for sample in samples:
            _fail(sample, f"failed on sample {sample.index}: {_describe(error)}", name, on_error, error)
        return list(samples)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(
            f"reward function {name} must return a list of {len(samples)} rewards, got {type(values).__name__}"
        )
    if len(values) != len(samples):
        raise ValueError(
            f"reward function {name} returned {len(values)} rewards for {len(samples)} samples "
            f"({samples[0].index} to {samples[-1].index})"
        )
    for sample, value in zip(samples, values, strict=True):
        sample.reward = _number(value, sample, name)
    return []


def _takes_all(function: RewardFunction) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "samples"


def _call(function: RewardFunction, argument: Any) -> Awaitable[Any]:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return function(argument)
    return _call_in_thread(function, argument)


async def _call_in_thread(function: RewardFunction, argument: Any) -> Any:
    # Daemon threads, not an executor: an executor would wait at exit for a function that never returns.
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(argument)
        except StopIteration as stop:
            # asyncio refuses to carry this one.
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            # The loop ended long after this call's time was up: nobody waits.
            logger.debug("a late reward was dropped")

    threading.Thread(target=run, daemon=True, name="miles-reward").start()
    return await outcome


def _fail(sample: Sample, what: str, name: str, policy: Policy, error: Exception | None = None) -> None:
    """Leave a sample without a reward, or stop.

    Raises:
        ValueError: the policy is to stop.
    """
    reason = f"reward function {name} {what}"
    if policy == "stop":
        raise ValueError(reason) from error
    sample.reward = None
    sample.status = SampleStatus.FAILED
    sample.metadata["failure"] = reason
    logger.warning("%s; the sample is not trained on", reason)


def _number(value: Any, sample: Sample, name: str) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(
            f"reward function {name} returned {value!r} ({type(value).__name__}) for sample {sample.index}, "
            "expected a number"
        )
    if not math.isfinite(value):
        raise ValueError(
            f"reward function {name} returned {float(value)} for sample {sample.index}, expected a finite number"
        )
    return float(value)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
