"""What the user reads when a program ends early."""

import signal
from pathlib import Path

import pytest
from ray.exceptions import RayActorError, RayTaskError

from miles.ray.placement_group import _host_order
from miles.ray.program import one_line, reported


def test_one_line_mistake_inside_a_ray_actor_is_told_without_wrapping() -> None:
    error = RayTaskError("f", "a long trace", ValueError("critic.json: field seed is 7, expected 1"))
    assert one_line(error) == "critic.json: field seed is 7, expected 1"
    assert one_line(error.as_instanceof_cause()) == "critic.json: field seed is 7, expected 1"


def test_one_line_disk_full_names_the_file() -> None:
    assert one_line(OSError(28, "No space left on device", "/x/y")) == "[Errno 28] No space left on device: '/x/y'"


def test_one_line_process_that_nothing_replaces_is_named() -> None:
    died = RayActorError(actor_id=None, error_msg="The actor died.\n\tclass_name: RolloutManager\n\tpid: 3")
    assert one_line(died) == (
        "the process RolloutManager of the run died, which nothing replaces; published checkpoints stand"
    )
    unborn = RayActorError(actor_id=None, error_msg="KeyError: 'x' class_name: A", actor_init_failed=True)
    assert one_line(unborn) == "a process of the run died: KeyError: 'x' class_name: A"


def test_one_line_bug_names_kind_and_place() -> None:
    try:
        assert [] == [1]
    except AssertionError as error:
        told = one_line(error)
    assert told.startswith("AssertionError")
    assert Path(__file__).name in told


def test_reported_error_exits_1_with_the_programs_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, reported("train.py"):
        raise ValueError("--lr: must be positive")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "train.py: --lr: must be positive\n"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_reported_signal_exits_128_plus_its_number(how: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, reported("train.py"):
        signal.raise_signal(how)
    assert ended.value.code == 128 + how
    assert "interrupted" in capsys.readouterr().err


def test_host_order_numeric_not_by_digit() -> None:
    hosts = ["10.0.0.10", "node-b", "10.0.0.9", "node-a"]
    assert sorted(hosts, key=_host_order) == ["10.0.0.9", "10.0.0.10", "node-a", "node-b"]
