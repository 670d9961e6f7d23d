"""`metrics.jsonl`: one line per call, finite JSON, and a resumed run that drops what it will do again."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.config import Args
from miles.utils.tracking_utils.run_folder import read_run_json
from miles.utils.tracking_utils.tracking import (
    Tracker,
    drop_steps_from,
    finish_tracking,
    init_tracking,
)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def settings(folder: Path, **changes: Any) -> Args:
    return Args.build(run_dir=str(folder), tensorboard=False, **changes)


def test_each_call_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path)) as tracker:
        tracker.log(1, "train", {"loss": 0.5})
        (line,) = lines(tmp_path)
        assert line.pop("time") > 1.7e9
        assert line == {"step": 1, "stage": "train", "loss": 0.5}
        tracker.log(2, "train", {"loss": 0.25})
        assert [line["loss"] for line in lines(tmp_path)] == [0.5, 0.25]


def test_values_become_plain_finite_json(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path)) as tracker:
        tracker.log(
            1,
            "eval",
            {
                "array": np.array([1.0, math.inf]),
                "scalar": np.float32(0.5),
                "count": np.int64(3),
                "nan": math.nan,
                "nested": {"x": [np.float64(1.5), None, True, "text"]},
            },
        )
    (line,) = lines(tmp_path)
    assert {name: line[name] for name in ("array", "scalar", "count", "nan", "nested")} == {
        "array": [1.0, None],
        "scalar": 0.5,
        "count": 3,
        "nan": None,
        "nested": {"x": [1.5, None, True, "text"]},
    }


@pytest.mark.parametrize("name", ["step", "stage", "time"])
def test_reserved_name_is_refused(tmp_path: Path, name: str) -> None:
    with Tracker(settings(tmp_path)) as tracker, pytest.raises(AssertionError, match=name):
        tracker.log(1, "train", {name: 1})


def test_without_a_run_folder_there_is_nowhere_to_write() -> None:
    with pytest.raises(ValueError, match="--run-dir is needed"):
        Tracker(Args.build())


def test_resumed_run_drops_its_first_step_and_later_of_every_stage(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path)) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, "train", {"loss": float(step)})
            tracker.log(step, "eval", {"accuracy": float(step)})
    with Tracker(settings(tmp_path), resume_step=3) as tracker:
        tracker.log(3, "train", {"loss": 30.0})
    assert [(line["step"], line["stage"]) for line in lines(tmp_path)] == [
        (1, "train"),
        (1, "eval"),
        (2, "train"),
        (2, "eval"),
        (3, "train"),
    ]


def test_rewound_run_drops_what_it_does_again_and_goes_on(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path)) as tracker:
        for step in (0, 1, 2, 3):
            tracker.log(step, "train", {"loss": float(step)})
        tracker.rewind(2)
        tracker.log(2, "train", {"loss": 20.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_run_started_anew_keeps_what_is_there(tmp_path: Path) -> None:
    for step in (1, 1):
        with Tracker(settings(tmp_path)) as tracker:
            tracker.log(step, "train", {})
    assert len(lines(tmp_path)) == 2


def test_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    drop_steps_from(path, 9)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: expected a JSON object with a number 'step'"):
        drop_steps_from(path, 9)


def test_tracker_of_the_process_is_opened_and_closed(tmp_path: Path) -> None:
    first = init_tracking(settings(tmp_path))
    second = init_tracking(settings(tmp_path))
    with pytest.raises(ValueError, match="closed file"):
        first.log(1, "train", {})
    second.log(1, "train", {})
    finish_tracking()
    finish_tracking()
    with pytest.raises(ValueError, match="closed file"):
        second.log(2, "train", {})


def test_numbers_reach_tensorboard_under_their_stage(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(Args.build(run_dir=str(tmp_path))) as tracker:
        tracker.log(1, "train", {"loss": 0.5, "flag": True, "text": "a", "perf/seconds": 2})
        tracker.log(2, "train", {"loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["perf/seconds", "train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `wandb.init` was called with; a run that is not resumed gets the next of the ids run-1, run-2, ..."""
    calls: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        calls.append(given)
        return SimpleNamespace(id=given["id"] or f"run-{len(calls)}", log=lambda _: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


def test_resumed_run_goes_on_with_its_run_on_wandb(tmp_path: Path, wandb_runs: list[dict[str, Any]]) -> None:
    args = settings(tmp_path, use_wandb=True)
    for first in (0, 2, 3):
        with Tracker(args, resume_step=first) as tracker:
            for step in range(first, first + 2):
                tracker.log(step, "train", {})
    assert [(call["id"], call["resume"]) for call in wandb_runs] == [
        (None, None),
        ("run-1", "allow"),
        ("run-1", "allow"),
    ]
    assert read_run_json(tmp_path)["wandb_run_id"] == "run-1"


def test_run_that_begins_again_has_a_run_of_its_own_on_wandb(tmp_path: Path, wandb_runs: list[dict[str, Any]]) -> None:
    args = settings(tmp_path, use_wandb=True)
    for first in (0, 0, 1):
        with Tracker(args, resume_step=first) as tracker:
            tracker.log(first, "train", {})
    assert [call["id"] for call in wandb_runs] == [None, None, "run-2"]
