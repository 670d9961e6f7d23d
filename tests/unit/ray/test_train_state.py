"""A resume starts from exactly what the last complete save wrote, or not at all."""

import json
from pathlib import Path

import pytest

from miles.config import Args
from miles.ray.train_state import STATE_FILE, STATE_SCHEMA, newest_checkpoints, read_train_state, resume_state

STATE = {"schema": STATE_SCHEMA, "rollout_id": 3, "iteration": 4}


def args_of(folder: Path, **settings: object) -> Args:
    return Args.build(run_dir=str(folder), save=str(folder / "actor"), critic_save=str(folder / "critic"), **settings)


def test_newest_checkpoints_are_those_of_the_state_not_the_latest(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        for iteration in (4, 6):
            (tmp_path / role / f"iter_{iteration:07d}").mkdir(parents=True)
    found = newest_checkpoints(args_of(tmp_path), STATE)
    assert found.load == str(tmp_path / "actor" / "iter_0000004")
    assert found.critic_load == str(tmp_path / "critic" / "iter_0000004")


@pytest.mark.parametrize("gone", ["actor", "critic"])
def test_newest_checkpoints_one_of_them_gone_is_refused_not_started_afresh(gone: str, tmp_path: Path) -> None:
    kept = "critic" if gone == "actor" else "actor"
    (tmp_path / kept / "iter_0000004").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"{gone}/iter_0000004: missing, though {STATE_FILE} names iteration 4"):
        newest_checkpoints(args_of(tmp_path), STATE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "miles.train', "invalid JSON"),
        (json.dumps({**STATE, "schema": "miles.train-state.v1"}), "schema must be"),
        ("[]", "schema must be"),
    ],
)
def test_state_file_that_no_save_wrote_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_train_state(tmp_path)


def test_fresh_run_in_the_folder_of_another_and_resume_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no complete save"):
        resume_state(args_of(tmp_path, resume=True))
    assert resume_state(args_of(tmp_path)) is None
    (tmp_path / STATE_FILE).write_text(json.dumps(STATE))
    assert resume_state(args_of(tmp_path, resume=True)) == STATE
    with pytest.raises(ValueError, match="holds a run saved after rollout 3; pass --resume"):
        resume_state(args_of(tmp_path))
