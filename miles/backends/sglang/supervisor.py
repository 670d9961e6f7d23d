"""Parent process of an SGLang server: whatever ends the process that asked for the server ends the server's whole
tree.

Run as a script by `SGLangServer` with nothing but the standard library, so that it is up at once:

    supervisor.py PARENT_PID SCRATCH_FOLDER COMMAND...

Standard input is a pipe that the asking process holds open. End of file on it, a new parent, SIGTERM or the server's
own end all lead to the same place: every descendant is killed and reaped, the scratch folder and the shared-memory
files of the server are removed, and the server's exit status is passed on. The kernel kills the server if this process
is killed.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.25


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    # The command's name stands in parentheses and may hold anything.
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def _shared_memory_files(pids: list[int]) -> set[str]:
    """Files of SGLang under /dev/shm that the processes have mapped; a killed server leaves them behind."""
    files = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                files.update(line.split(maxsplit=5)[5].strip() for line in file if "/dev/shm/sglang" in line)
        except OSError:
            continue
    return {file for file in files if not file.endswith("(deleted)")}


def _kill_everything() -> None:
    """Kill and reap until this process, which inherits every orphan of the tree, has no child left."""
    me = os.getpid()
    while True:
        for pid in _descendants(me):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    """Run the command until somebody ends it; return its exit status, 128 + signal where a signal ended it."""
    parent, scratch, command = int(arguments[0]), arguments[1], arguments[2:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked_to_stop = False

    def stop(signum: int, frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    status, shared_memory, next_look = None, set(), 0.0
    while status is None and not asked_to_stop and os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 1):
            break
        if time.monotonic() >= next_look:
            shared_memory |= _shared_memory_files(_descendants(os.getpid()))
            next_look = time.monotonic() + 5.0
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == server.pid:
                    status = os.waitstatus_to_exitcode(wait_status)
    shared_memory |= _shared_memory_files(_descendants(os.getpid()))
    _kill_everything()
    for file in shared_memory:
        with contextlib.suppress(OSError):
            os.unlink(file)
    shutil.rmtree(scratch, ignore_errors=True)
    if status is None:
        return 0
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
