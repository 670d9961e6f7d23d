"""What value pretraining makes of settings before it reserves devices."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config import Args
from miles.ray import placement_group
from miles.ray.cluster import Cluster
from miles.ray.placement_group import create_placement, one_update_a_step


def test_schedule_of_value_pretraining_has_one_update_a_step_whatever_a_shared_file_says() -> None:
    shared = {"num_rollout": 7, "num_critic_epochs": 2, "num_steps_per_rollout": 4}
    args = one_update_a_step(Args.from_values(shared, dict.fromkeys(shared, "file:shared.yaml"))).for_role("critic")
    assert args.num_rollout is not None
    assert args.num_rollout * args.num_steps_per_rollout * args.num_critic_epochs == 7


@pytest.fixture
def cluster_in_use(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[Any]]:
    """A large enough cluster of which two devices are free until `free_after` seconds; returns what is given back."""

    def use(free_after: float) -> list[Any]:
        now, given_back = 0.0, []

        def wait(seconds: float) -> bool:
            nonlocal now
            now = min(now + seconds, free_after)
            return now == free_after

        group = SimpleNamespace(wait=wait)
        stand_ins = {
            "connect": lambda args, *, devices: Cluster("cpu", "miles_device", single_machine=True),
            "placement_group": lambda bundles, *, strategy: group,
            "remove_placement_group": given_back.append,
            "time": SimpleNamespace(monotonic=lambda: now),
            "ray": SimpleNamespace(available_resources=lambda: {"miles_device": 2.0}),
            "_sorted_bundles": lambda cluster, group, total: list(range(total)),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(placement_group, name, stand_in)
        return given_back

    return use


def test_devices_that_others_hold_too_long_end_the_start_in_one_line(
    cluster_in_use: Callable[[float], list[Any]],
) -> None:
    given_back = cluster_in_use(1000.0)
    told = r"^4 devices \(3 actor \+ 1 rollout\) were not to be had within --placement-timeout-s 25: 2 of the Ray"
    with pytest.raises(RuntimeError, match=told):
        create_placement(Args.build(placement_timeout_s=25.0), {"actor": 3, "rollout": 1})
    assert len(given_back) == 1


@pytest.mark.parametrize("limit", [1001.0, None])
def test_devices_that_become_free_in_time_are_handed_out(
    limit: float | None, cluster_in_use: Callable[[float], list[Any]]
) -> None:
    given_back = cluster_in_use(1000.0)
    placement = create_placement(Args.build(placement_timeout_s=limit), {"actor": 3, "rollout": 1})
    assert placement.bundles == {"actor": [0, 1, 2], "rollout": [3]}
    assert given_back == []


def test_cluster_that_ends_while_devices_are_waited_for_is_told_as_such(
    cluster_in_use: Callable[[float], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> bool:
        raise Exception("Placement group PlacementGroupID(8f) does not exist.")

    cluster_in_use(0.0)
    monkeypatch.setattr(placement_group, "placement_group", lambda bundles, *, strategy: SimpleNamespace(wait=wait))
    told = r"^the Ray cluster ended while 4 devices \(3 actor \+ 1 rollout\) were waited for: Placement group"
    with pytest.raises(ConnectionError, match=told):
        create_placement(Args.build(), {"actor": 3, "rollout": 1})
