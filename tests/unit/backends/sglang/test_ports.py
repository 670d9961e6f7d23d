"""Ports of engines on one host must never meet: random picks have, in every project of this kind."""

import multiprocessing
import socket
from pathlib import Path

import pytest

from miles.backends.sglang.ports import reserve_port


def listener(port: int, *, reuse: bool) -> socket.socket:
    sock = socket.socket()
    if reuse:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def _reserve_in_process(queue, release) -> None:
    with reserve_port() as port:
        queue.put(port.port)
        release.wait(20)


def test_reserve_port_in_eight_processes_gives_disjoint_ports():
    context = multiprocessing.get_context("fork")
    queue, release = context.Queue(), context.Event()
    processes = [context.Process(target=_reserve_in_process, args=(queue, release)) for _ in range(8)]
    for process in processes:
        process.start()
    ports = [queue.get(timeout=20) for _ in processes]
    release.set()
    for process in processes:
        process.join()
    assert len(set(ports)) == 8


def test_reserve_port_after_one_of_eight_restarts_stays_disjoint():
    held = [reserve_port() for _ in range(8)]
    held[3].release()
    with reserve_port() as again:
        others = {port.port for number, port in enumerate(held) if number != 3}
        assert again.port not in others
    for port in held:
        port.release()


def test_reserve_port_chooses_below_the_ephemeral_range():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with reserve_port() as port:
        assert 20000 <= port.port < low


def test_reserved_port_admits_a_reusing_listener_only():
    with reserve_port() as port:
        with pytest.raises(OSError, match="in use"):
            listener(port.port, reuse=False)
        listener(port.port, reuse=True).close()


def test_reserve_port_given_reserved_port_is_refused_until_released():
    first = reserve_port()
    with pytest.raises(ValueError, match=f"port {first.port} on 127.0.0.1 cannot be used"):
        reserve_port(first.port)
    first.release()
    reserve_port(first.port).release()


def test_reserve_port_given_listening_port_is_refused():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        with pytest.raises(ValueError, match="in use"):
            reserve_port(taken)


def test_reserve_port_right_after_a_server_with_connections_ended_succeeds():
    server = listener(0, reuse=True)
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    peer, _ = server.accept()
    # Closed first on the server's side: its end waits in TIME_WAIT.
    peer.close()
    client.close()
    server.close()
    reserve_port(port).release()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_reserve_port_out_of_range_is_refused(port):
    with pytest.raises(ValueError, match="out of range"):
        reserve_port(port)
