"""A process that calls one plain reward function: what holds the function up can be ended with it.

`miles.rollout.reward_calls` starts it. Over a socket it gets the function's path, how that was given and the SHA-256
of its file, and answers once that is imported; then each request is a list of samples. An answer is a kind and what
belongs to it:

    ("ready",)  ("scored", rewards, metadata of each sample)  ("late", error in one line)
    ("refused", line)  ("failed", error in one line, traceback)
"""

import ctypes
import os
import pickle
import signal
import socket
import struct
import traceback
from typing import Any, BinaryIO

from miles.contracts.canonical import sha256_file
from miles.data.sample import Sample
from miles.rollout.functions import Function, describe, load_function, source_file
from miles.rollout.rewards import BadReward, call_on

HEADER = struct.Struct("!Q")
"""Length of the pickle that follows it."""

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until its other end closes; the kernel ends this process with `parent`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        with socket.socket(fileno=descriptor) as ours, ours.makefile("rwb") as stream:
            _serve(stream)
    # The function may have left threads that would keep this process.
    os._exit(0)


def _serve(stream: Any) -> None:
    path, flag, source = _receive(stream)
    try:
        function = load_function(path, flag=flag)
        _refuse_other_source(path, flag, source)
    except ValueError as error:
        _send(stream, pickle.dumps(("refused", str(error))))
        return
    _send(stream, pickle.dumps(("ready",)))
    ours = os.getpid()
    while (samples := _receive(stream)) is not None:
        answer = _answer(function, samples)
        if os.getpid() != ours:
            # A child that the function forked and let return: its answer would be taken for that of the next sample.
            os._exit(0)
        _send(stream, answer)


def _refuse_other_source(path: str, flag: str, source: str | None) -> None:
    """Raise ValueError if the function's file is not the one that the first processes loaded."""
    file = source_file(path)
    if file is not None and sha256_file(file) != source:
        raise ValueError(
            f"{flag} {path}: {file} changed while the run went on, so it would score with two functions: put it back "
            "and go on with --resume, or accept the change with --allow-config-change custom_rm_path"
        )


def _answer(function: Function, samples: list[Sample]) -> bytes:
    try:
        argument, scored = call_on(function, samples)
        return pickle.dumps(("scored", *scored(function(argument))))
    except BadReward as error:
        return pickle.dumps(("refused", str(error)))
    except TimeoutError as error:
        return pickle.dumps(("late", describe(error)))
    except BaseException as error:
        return pickle.dumps(("failed", describe(error), traceback.format_exc()))


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(*HEADER.unpack(header))) if len(header) == HEADER.size else None


def _send(stream: BinaryIO, answer: bytes) -> None:
    stream.write(HEADER.pack(len(answer)) + answer)
    stream.flush()
