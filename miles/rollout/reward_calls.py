"""Where reward functions run: out of the way of whoever waits for them, so that a time limit is always kept.

A plain function is called in worker processes, which are killed at the limit: a thread that keeps the interpreter to
itself (a regular expression that backtracks) could be neither timed nor ended. An async function, which mostly waits
for others, shares an event loop in a thread of its own.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from miles.contracts.canonical import sha256_file
from miles.data.sample import Sample
from miles.rollout.functions import (
    Function,
    FunctionFailed,
    describe,
    function_name,
    is_async,
    load_function,
    source_file,
)
from miles.rollout.reward_worker import HEADER
from miles.rollout.rewards import BadReward, Scored, call_on, takes_all

_START_S = 300.0
"""The worker imports what the caller has imported just before."""
_BLOCKED_S = 1.0
"""An event loop that does not answer for so long, after a call was late, is given up."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from miles.rollout.reward_worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardFunction:
    """A user's reward function, as `score_samples` takes it. Samples change in reward and metadata alone.

    A plain function is imported again by each worker process, which is kept: what it holds in its module is kept
    there too, and is not shared. A worker that finds another file than this process did is refused (`BadReward`).
    `concurrency` bounds the workers, beside the number of cores.

    Raises:
        ValueError: nothing can be loaded from `path`, which was given as `flag`.
    """

    def __init__(self, path: str, *, concurrency: int, flag: str = "function path") -> None:
        file = source_file(path)
        # Before it is imported: what changes in between is told by the first process.
        source = None if file is None else sha256_file(file)
        function = load_function(path, flag=flag)
        self.name = function_name(function)
        self.takes_all = takes_all(function)
        if is_async(function):
            self._runner: _Workers | _LoopThread = _LoopThread(function)
        else:
            self._runner = _Workers((path, flag, source), min(concurrency, len(os.sched_getaffinity(0))))

    async def __call__(self, samples: list[Sample], timeout_s: float) -> list[float]:
        """See `Reward`."""
        rewards, metadata = await self._runner.call(samples, timeout_s)
        for sample, new in zip(samples, metadata, strict=True):
            sample.metadata = new
        return rewards

    def close(self) -> None:
        """End idle workers; those at work end with their calls."""
        self._runner.close()


class _Workers:
    """Processes that are started as they are needed, kept, and killed when a call is late or given up."""

    def __init__(self, function: tuple[str, str, str | None], size: int) -> None:
        """`function`: its path, how that was given, and the SHA-256 of its file."""
        self._function = function
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []

    async def call(self, samples: list[Sample], timeout_s: float) -> Scored:
        async with self._free:
            worker = await self._take()
            try:
                kind, *rest = await asyncio.wait_for(worker.ask(samples), timeout_s)
            except BaseException:
                worker.kill()
                raise
            self._idle.append(worker)
        if kind == "scored":
            return rest[0], rest[1]
        if kind == "late":
            raise TimeoutError(rest[0])
        if kind == "refused":
            raise BadReward(rest[0])
        error = FunctionFailed(rest[0])
        error.add_note(rest[1])
        raise error

    async def _take(self) -> "_Worker":
        while self._idle:
            if (worker := self._idle.pop()).alive:
                return worker
            worker.kill()
        worker = _Worker()
        try:
            kind, *rest = await asyncio.wait_for(worker.ask(self._function), _START_S)
            if kind != "ready":
                raise BadReward(rest[0])
        except TimeoutError:
            worker.kill()
            raise BadReward(f"a worker did not import {self._function[0]} within {_START_S:g} s") from None
        except BaseException:
            worker.kill()
            raise
        return worker

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


class _Worker:
    """One process of `miles.rollout.reward_worker`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._killed = False
        with theirs:
            # A session of its own: what the function itself starts ends with it, and Ctrl-C is for the program.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, request: Any) -> Any:
        """The worker's answer.

        Raises:
            FunctionFailed: the process ended.
        """
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
        reader, writer = self._streams
        data = pickle.dumps(request)
        try:
            writer.write(HEADER.pack(len(data)) + data)
            await writer.drain()
            header = await reader.readexactly(HEADER.size)
            return pickle.loads(await reader.readexactly(*HEADER.unpack(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            code = self._process.returncode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
            raise FunctionFailed(f"its process ended {how}") from None

    def kill(self) -> None:
        """End the process and what it started; once."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()


class _LoopThread:
    """An event loop in a daemon thread; one that a call blocks is left behind, with the calls on it."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, samples: list[Sample], timeout_s: float) -> Scored:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="miles-reward").start()
        loop = self._loop
        # What a call writes to its samples, in time or late, is its own: as it is in a worker.
        copies: list[Sample] = pickle.loads(pickle.dumps(samples))
        try:
            scoring = asyncio.run_coroutine_threadsafe(self._score(copies), loop)
            return await asyncio.wait_for(asyncio.wrap_future(scoring), timeout_s)
        except TimeoutError:
            await self._leave_if_blocked(loop)
            raise
        except asyncio.CancelledError:
            if (ours := asyncio.current_task()) is not None and ours.cancelling():
                raise
            # The function's own, as of a scope of its HTTP client: nobody gave the call up.
            raise FunctionFailed("it was cancelled") from None

    async def _score(self, samples: list[Sample]) -> Scored:
        argument, scored = call_on(self._function, samples)
        try:
            value = await self._function(argument)
        except TimeoutError as error:
            raise TimeoutError(describe(error)) from error
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            # These would end the loop.
            raise FunctionFailed(describe(error)) from error
        return scored(value)

    async def _leave_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        answered = asyncio.Event()
        loop.call_soon_threadsafe(asyncio.get_running_loop().call_soon_threadsafe, answered.set)
        try:
            await asyncio.wait_for(answered.wait(), _BLOCKED_S)
        except TimeoutError:
            if self._loop is loop:
                self.close()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
