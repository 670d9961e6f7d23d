"""Who wrote an artifact: the process that drove the run."""

import getpass
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MainProcessIdentity:
    """The driver process of a run, as it is recorded and logged."""

    program: str = field(default_factory=lambda: os.path.basename(sys.argv[0]))
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    user: str = field(default_factory=lambda: _user())
    started: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """The identity as a JSON-safe dict."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.program}[{self.pid}]@{self.host}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a uid without a name.
        return str(os.getuid())
