"""Every process of a run starts relative paths from the driver's folder, wherever `ray start` was called."""

from pathlib import Path

import pytest

from miles.config import Args
from miles.ray.driver_folder import driver_folder_env, enter_driver_folder
from miles.ray.rollout.manager import RolloutManager


def test_process_started_elsewhere_enters_the_drivers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("driver", "ray_start")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    told = driver_folder_env()
    monkeypatch.chdir(folders[1])
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    RolloutManager(Args.build(), [])
    assert Path.cwd() == folders[0]


def test_process_on_a_machine_without_the_drivers_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = driver_folder_env()
    monkeypatch.setenv(name, str(tmp_path / "not_here"))
    enter_driver_folder()
    assert Path.cwd() == tmp_path
