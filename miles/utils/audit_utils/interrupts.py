"""Ctrl-C and SIGTERM before a program has anything to clean up: one line, no traceback."""

import signal
import sys
from typing import NoReturn


def end_in_one_line(program: str) -> None:
    """From here on Ctrl-C and SIGTERM end the process with one line and exit code 130 or 143.

    Called before the imports of an entry program, which take a second; `miles.ray.program` takes over later.
    """

    def interrupted(signum: int, frame: object) -> NoReturn:
        # The terminal and a supervisor may both send one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"{program}: interrupted before a device was reserved", file=sys.stderr)
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
