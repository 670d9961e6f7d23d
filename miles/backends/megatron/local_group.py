"""A training group of local processes that stay up, for tests, benchmarks and checks; production groups are Ray's."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Task = Callable[..., Any]
"""task(rank, world_size, port, **arguments) -> picklable result; importable by name in a fresh process."""


class LocalGroup:
    """Processes that run tasks together, as ranks 0 to n-1 of a group that listens on a port of this machine.

    Importing torch and megatron-core takes seconds, so a process is started once and used for many tasks; each task
    joins a torch.distributed group of its own and has to leave it. A context manager that ends its processes.
    """

    def __init__(self, size: int, *, environment: dict[str, str] | None = None, threads: int = 1) -> None:
        """Start `size` processes with `environment` on top of this process's, each with `threads` compute threads."""
        context = multiprocessing.get_context("spawn")
        extra = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        extra |= environment or {}
        before = {name: os.environ.get(name) for name in extra}
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        os.environ.update(extra)
        try:
            for _ in range(size):
                ours, theirs = context.Pipe()
                # Not daemons: Megatron starts processes of its own while it saves.
                process = context.Process(target=_serve, args=(theirs,))
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def run(self, task: Task, *, world_size: int, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """Run `task` on the first `world_size` processes at once; their results in rank order.

        Raises:
            RuntimeError: A rank raised (its traceback is the message), died, or did not answer in time; the group is
                closed then, as the other ranks may wait for ever.
        """
        port = free_port()
        connections = self._connections[:world_size]
        assert len(connections) == world_size, f"the group has {len(self._connections)} processes"
        for rank, connection in enumerate(connections):
            connection.send((task, rank, world_size, port, arguments))
        results: list[Any] = [None] * world_size
        waiting = dict(enumerate(connections))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=timeout_s)
            if not ready:
                self.close()
                raise RuntimeError(f"ranks {sorted(waiting)} did not answer within {timeout_s:.0f} s")
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    succeeded, result = waiting.pop(rank).recv()
                except EOFError:
                    succeeded, result = False, "the process died"
                if not succeeded:
                    self.close()
                    raise RuntimeError(f"rank {rank}: {result}")
                results[rank] = result
        return results

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._processes = [], []


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Connection) -> None:
    """Answer tasks until the other end closes."""
    while True:
        try:
            task, rank, world_size, port, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, task(rank, world_size, port, **arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
