"""Parent process of an SGLang server: whatever ends the process that asked for the server ends its whole tree.

Run as a script by `SGLangServer` with nothing but the standard library, so that it is up at once:

    supervisor.py ASKER_PID SCRATCH_FOLDER COMMAND...

Standard input is a pipe that the asker holds open. End of file on it, the asker's end, SIGTERM or the server's own end
all lead to the same place: every descendant is killed and reaped, the scratch folder and the shared-memory files of
the server are removed, and the server's exit status is passed on.

Two processes do this. The first is the asker's child and only waits; Ray, for one, kills the children of a worker that
ends. The second does the work and takes the end of the first as one more reason to clean up. The kernel kills the
server if the second is killed.
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
_TRACKER_PATIENCE_S = 3.0


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


def _is_resource_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _kill_everything() -> None:
    """Kill and reap until this process, which inherits every orphan of the tree, has no child left.

    Python's resource trackers are spared at first: they unlink the semaphores of the dead and end by themselves.
    """
    me, patience = os.getpid(), time.monotonic() + _TRACKER_PATIENCE_S
    while True:
        for pid in _descendants(me):
            if time.monotonic() > patience or not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _wait_for(worker: int) -> int:
    """The first process: pass SIGTERM on, and the worker's exit status back."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: os.kill(worker, signal.SIGTERM))
    # Only the worker shall hold the pipe's end.
    os.close(0)
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _supervise(asker: int, first: int, scratch: str, command: list[str]) -> int:
    """The second process: run the command until somebody ends it; its exit status, 128 + signal where one ended it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked_to_stop = False

    def stop(signum: int, frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    watched = [0]
    try:
        # A child that the asker forked may hold the pipe open beyond the asker's end.
        watched.append(os.pidfd_open(asker))
    except ProcessLookupError:
        asked_to_stop = True
    except OSError:
        pass  # A kernel before 5.3: the pipe has to do.

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    status, shared_memory, next_look = None, set(), 0.0
    while status is None and not asked_to_stop and os.getppid() == first:
        readable, _, _ = select.select(watched, [], [], _POLL_S)
        if len(watched) > 1 and watched[1] in readable:
            break
        if 0 in readable and not os.read(0, 1):
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


def main(arguments: list[str]) -> int:
    """Exit status of the command; see the module's text."""
    asker, scratch, command = int(arguments[0]), arguments[1], arguments[2:]
    first = os.getpid()
    worker = os.fork()
    if worker:
        return _wait_for(worker)
    return _supervise(asker, first, scratch, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
