"""One program at a time writes a folder."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from miles.config.args import Args, Entry
from miles.config.groups import flag_of
from miles.config.rules import saved_to

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
"""Stays where it is: what counts is who holds it, and a file that is removed could be held twice."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_held: dict[Path, int] = {}


def hold_folders(args: Args, *, entry: Entry, make: bool) -> None:
    """Hold the folders that a program writes until this process ends, be it by SIGKILL.

    A program that this process starts holds nothing.

    Args:
        make: make those that are missing; False passes them over, for a start that may yet be refused.

    Raises:
        ValueError: another process holds one of them, which is named, or a folder cannot be written.
    """
    for field in ("run_dir", *saved_to(args, entry)):
        folder = getattr(args, field)
        if folder is None or not (make or Path(folder).is_dir()):
            continue
        path = Path(folder).resolve()
        if path not in _held:
            _held[path] = _hold(path, f"{flag_of(field)} {folder}")


def _hold(path: Path, name: str) -> int:
    """Return the descriptor of a lock; Python's descriptors close on exec."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A network file system locks files among all its machines, and folders on each alone.
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"{name}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise ValueError(f"{name} is being written by {holder or 'another process'}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks; let no other program write there", name)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
