"""The rendezvous of a training group."""

import pytest

from miles.backends.sglang.ports import reserve_port
from miles.ray.actor_group import TrainRank


def test_reserved_rendezvous_ports_stay_apart_until_they_are_used() -> None:
    # faults.md row 56: a port that was only probed is anybody's until the rendezvous listens on it
    ranks = [object.__new__(TrainRank) for _ in range(8)]
    for rank in ranks:
        rank._reserved = None
    ports = [rank.reserve_address()[1] for rank in ranks]
    assert len(set(ports)) == len(ports)
    for port in ports:
        with pytest.raises(ValueError, match=f"port {port} .* cannot be used"):
            reserve_port(port)
    second = ranks[0].reserve_address()[1]
    assert second not in ports[1:]
    reserve_port(ports[0]).release()
