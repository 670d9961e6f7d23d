"""Two programs never write one folder, and nobody is shut out by a program that is gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.utils import folder_lock
from miles.utils.folder_lock import LOCK_NAME, hold_folders

HOLDER = """
import subprocess, sys
from miles.config import Args
from miles.utils.folder_lock import hold_folders
run, critic = sys.argv[1:]
hold_folders(Args.build(run_dir=run, critic_save=critic), entry="train_value", make=True)
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process lets go at the end."""
    held: dict[Path, int] = {}
    monkeypatch.setattr(folder_lock, "_held", held)
    yield
    for descriptor in held.values():
        os.close(descriptor)


@pytest.fixture
def hold(free: None) -> Callable[..., None]:
    def hold(run: Path, critic: Path | None = None, *, make: bool = True, **settings: Any) -> None:
        critic_save = None if critic is None else str(critic)
        args = Args.build(run_dir=str(run), critic_save=critic_save, **settings)
        hold_folders(args, entry="train_value", make=make)

    return hold


def test_folder_of_a_running_program_is_refused_until_that_is_killed(
    tmp_path: Path, hold: Callable[..., None]
) -> None:
    critic = tmp_path / "critic"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "one", critic], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"^--critic-save {critic} is being written by process {holder.pid} on "):
            hold(tmp_path / "two", critic, make=False)
        assert not (tmp_path / "two").exists()
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "one")
        with pytest.raises(ValueError, match=f"^--run-dir {link} is being written by process {holder.pid} on "):
            hold(link)
        holder.kill()
        holder.wait()
        # Its child lives, and holds nothing.
        os.kill(child, 0)
        hold(tmp_path / "two", critic)
        assert (critic / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    finally:
        os.kill(child, signal.SIGKILL)


def test_start_that_may_be_refused_makes_nothing(tmp_path: Path, hold: Callable[..., None]) -> None:
    hold(tmp_path / "run", tmp_path / "critic", make=False)
    assert list(tmp_path.iterdir()) == []


def test_process_may_hold_a_folder_twice_and_for_two_purposes(tmp_path: Path, hold: Callable[..., None]) -> None:
    hold(tmp_path, tmp_path)
    hold(tmp_path, tmp_path / "critic")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "critic"]


def test_evaluation_holds_no_folder_for_checkpoints(tmp_path: Path, hold: Callable[..., None]) -> None:
    hold(tmp_path / "run", tmp_path / "critic", value_pretrain_eval_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path, hold: Callable[..., None]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^--run-dir .*/file/run: cannot be written: Not a directory$"):
        hold(tmp_path / "file" / "run")


def test_file_system_without_locks_is_warned_of(
    tmp_path: Path, hold: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    hold(tmp_path)
    assert "has no locks" in caplog.text
