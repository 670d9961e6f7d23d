"""TCP ports that stay ours from the moment they are chosen until a server listens on them."""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

# Below the kernel's ephemeral range, so that no connect() or bind(0) of anybody takes one, and above the range in
# which Ray places its workers by default.
_LOWEST = 20000


def _highest() -> int:
    try:
        ephemeral_low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral_low = 32768
    return ephemeral_low - 1 if ephemeral_low > _LOWEST + 1000 else 32767


class ReservedPort:
    """A port that belongs to this process until `release()`, or until the process ends.

    A server may listen on it while it is held. Two sockets do the holding: one bound to the port with address reuse,
    which lets in only a listener that asks for reuse too (uvicorn and torch's TCPStore do), and one in Linux's
    abstract socket namespace, which keeps out every other reservation of ours.
    """

    def __init__(self, port: int, holders: Sequence[socket.socket]):
        self.port = port
        self._holders = tuple(holders)

    def release(self) -> None:
        """Give the port up; may be called twice."""
        for holder in self._holders:
            holder.close()

    def __enter__(self) -> "ReservedPort":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _hold(port: int, host: str) -> ReservedPort:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0miles-reserved-port-{port}")
        # Without reuse, connections of a server that has just ended would block its port for a minute.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
    except BaseException:
        holder.close()
        lock.close()
        raise
    return ReservedPort(port, (holder, lock))


def reserve_port(port: int | None = None, *, host: str = "127.0.0.1", avoid: Sequence[int] = ()) -> ReservedPort:
    """Reserve `port`, or a free port of our own choice outside `avoid`.

    Raises:
        ValueError: `port` is taken, may not be bound by this user, or `host` is no address of this machine.
        RuntimeError: no free port was found.
    """
    if port is not None:
        if not 1 <= port <= 65535:
            raise ValueError(f"port {port} is out of range, expected 1 to 65535")
        try:
            return _hold(port, host)
        except OSError as error:
            raise ValueError(f"port {port} on {host} cannot be used: {error.strerror}") from None
    # SystemRandom: processes that seeded `random` alike must not walk through the same ports.
    for candidate in random.SystemRandom().sample(range(_LOWEST, _highest() + 1), 200):
        if candidate in avoid:
            continue
        try:
            return _hold(candidate, host)
        except OSError:
            continue
    raise RuntimeError(f"no free TCP port on {host} between {_LOWEST} and {_highest()} in 200 tries")
