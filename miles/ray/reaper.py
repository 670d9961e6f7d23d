"""Ends what a killed driver leaves of its local Ray cluster. A process of its own: `python reaper.py DRIVER_PID`.

Ray's daemons follow a driver that is killed outright, but some only after a minute. This process holds one end of a
pipe to the driver; when the other end closes, whatever still runs of the processes it saw below the driver is killed.
"""

import os
import select
import signal
import sys
import time

import psutil

_LOOK_EVERY_S = 2.0
_STARTING_S, _LOOK_AT_START_EVERY_S = 30.0, 0.25
"""While Ray starts, a process that is not seen at once may have lost its parent, and then is nobody's."""
_GRACE_S = 5.0
"""What a proper end takes; only a driver that could not end properly leaves processes longer."""


def watch(driver_pid: int) -> None:
    """Remember the driver's descendants until standard input closes, then end those that are left."""
    seen: set[psutil.Process] = set()
    try:
        driver = psutil.Process(driver_pid)
        began, every_s = time.monotonic(), _LOOK_AT_START_EVERY_S
        while not select.select([sys.stdin], [], [], every_s)[0]:
            if time.monotonic() - began > _STARTING_S:
                every_s = _LOOK_EVERY_S
            seen = {process for process in seen if process.is_running()} | set(driver.children(recursive=True))
    except psutil.NoSuchProcess:
        pass
    seen = {process for process in seen if process.pid != os.getpid()}
    _, left = psutil.wait_procs(seen, timeout=_GRACE_S)
    for process in left:
        try:
            for child in process.children(recursive=True):
                child.kill()
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    # Ctrl-C in the terminal is for the driver; this process ends after it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]))
