"""How an entry program ends: one clear line, an exit code, no process left behind."""

import asyncio
import logging
import re
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from miles.ray.cluster import disconnect
from miles.utils.tracking_utils.tracking import finish_tracking

logger = logging.getLogger(__name__)


def run_program(name: str, work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` and leave the cluster; an error is one line and exit code 1, Ctrl-C 130, SIGTERM 143."""
    with reported(name):
        asyncio.run(work)


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Report an error of the body as one line and exit; a traceback too where the log level is DEBUG."""
    received = signal.SIGINT

    def terminate(signum: int, frame: object) -> None:
        nonlocal received
        received = signal.Signals(signum)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, terminate)
    # asyncio turns Ctrl-C into a cancellation only where Python's own handler stands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"{name}: interrupted; published checkpoints stand, an unfinished save counts as none", file=sys.stderr)
        raise SystemExit(128 + received) from None
    except (Exception, asyncio.CancelledError) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        # A second one must not stop the cleaning up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        finish_tracking()
        disconnect()
        signal.signal(signal.SIGTERM, previous)


def one_line(error: BaseException) -> str:
    """The reason of an error, without Ray's wrapping and without a traceback."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return one_line(cause) if isinstance(cause, BaseException) else str(error).splitlines()[-1]
    if isinstance(error, RayActorError):
        reason = " ".join(str(error).split())
        which = re.search(r"class_name: (\w+)", reason)
        if which is None or error.actor_init_failed:
            return f"a process of the run died: {reason[:400]}"
        # Of a process that was killed Ray only guesses why, at length.
        return f"the process {which[1]} of the run died, which nothing replaces; published checkpoints stand"
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | RuntimeError | FloatingPointError) and text:
        return text
    # No mistake of the user: say where it happened, for the report of a bug.
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return f"{type(error).__name__}{': ' * bool(text)}{text}{where}; --log-level DEBUG shows the whole trace"
