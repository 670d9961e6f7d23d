"""The repository as a whole: no traces of one machine, pins in one place, settings that somebody reads."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from miles.config import Args
from miles.config.files import NOT_IN_FILES

ROOT = Path(__file__).resolve().parents[2]


def tracked_files() -> list[Path]:
    """Files under version control; every file, where this is no checkout."""
    if (ROOT / ".git").exists():
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]
    skipped = {".venv", ".git", "__pycache__", "runs"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.parts)]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


# Written in pieces, so that this file does not contain what it looks for.
TRACES = [
    r"/(home|Users)/" + r"[a-z]+/",
    r"/" + r"work/(main|shared)",
    r"/tmp" + r"/mk",
    r"farm" + r"-studio",
    r"pypi" + r"\.org",
    r"pythonhosted" + r"\.org",
    r"download" + r"\.pytorch",
    r"registry" + r"\.npmjs",
    r"/opt/" + r"(pypi|wheels)",
]


@pytest.mark.parametrize("trace", TRACES)
def test_no_file_names_a_machine_or_a_registry_host(trace: str) -> None:
    assert [str(path) for path in tracked_files() if re.search(trace, text_of(path))] == []


def test_no_conflict_marker_or_unfinished_note_is_left() -> None:
    marks = re.compile(r"^(<{7} |>{7} |={7}$)|\b(TODO|FIXME|XXX)\b", re.M)
    checked = [
        path
        for path in tracked_files()
        if path.suffix in (".py", ".sh", ".yaml", ".toml") and path.name != Path(__file__).name
    ]
    assert [str(path) for path in checked if marks.search(text_of(path))] == []


def test_no_large_file_is_tracked() -> None:
    assert [path.name for path in tracked_files() if path.stat().st_size > 1 << 20] == []


# ---------------------------------------------------------------- packaging


def requirement_files() -> dict[str, list[str]]:
    return {
        path.stem: [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for path in (ROOT / "requirements").glob("*.txt")
    }


def test_each_version_is_pinned_in_one_place() -> None:
    """The transitive constraints repeat no pin, and nothing but requirements/ states a version."""
    files = requirement_files()
    constrained = {line.split("==")[0].lower().replace("_", "-") for line in files.pop("constraints")}
    named = [re.split(r"[\[=<>]", line)[0].lower().replace("_", "-") for lines in files.values() for line in lines]
    assert constrained & set(named) == set()
    for name in ("setup.py", "Makefile", ".ci/run", "pyproject.toml"):
        assert not re.search(r"==\s*\d", (ROOT / name).read_text()), name


def test_one_version_wherever_a_package_is_named_twice() -> None:
    files = requirement_files()
    versions: dict[str, set[str]] = {}
    for lines in files.values():
        for line in lines:
            name, _, version = line.partition("==")
            if version:
                versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_extras_are_those_of_the_readme() -> None:
    setup = (ROOT / "setup.py").read_text()
    for extra in ("cpu", "gpu", "wandb", "dev"):
        assert f'"{extra}"' in setup
        assert (ROOT / "requirements" / f"{extra}.txt").is_file()


def test_package_data_holds_the_stand_ins() -> None:
    folder = ROOT / "miles" / "backends" / "sglang" / "cpu_stand_ins"
    assert (folder / "sitecustomize.py").is_file()
    assert "cpu_stand_ins" in (ROOT / "setup.py").read_text()


def test_every_package_folder_has_an_init() -> None:
    """setuptools packs only folders with one."""
    folders = {path.parent for path in (ROOT / "miles").rglob("*.py") if "cpu_stand_ins" not in path.parts}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_tools_agree_on_python_and_line_length() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["ruff"]["line-length"] == 119
    assert settings["ruff"]["target-version"].removeprefix("py3") == settings["pyright"]["pythonVersion"].removeprefix(
        "3."
    )
    assert 'python_requires=">=3.11"' in (ROOT / "setup.py").read_text()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quickstart", "test", "venv", "lint", "doctor"):
        assert re.search(rf"^{target}:", makefile, re.M), target


def make(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"VENV={tmp_path}/venv", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_install_without_a_new_enough_python_says_so(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(tmp_path, "venv", f"PYTHON={old}", "DEVICE=cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("make: no Python >= 3.11 found")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("device", ["tpu", "", "cpu gpu"])
def test_device_that_is_none_is_refused(tmp_path: Path, device: str) -> None:
    done = make(tmp_path, "-n", "quickstart", f"DEVICE={device}")
    assert done.returncode == 2
    assert f"DEVICE must be cpu or gpu, not '{device}'" in done.stderr


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    """Stamps as an installation leaves them: nothing is left to do until a requirement file changes."""
    plan = make(tmp_path, "-n", "venv", "DEVICE=cpu").stdout
    stamp = re.findall(r"touch (\S+)", plan)[-1]
    assert "pip install" in plan
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for path in (tmp_path / "venv" / "bin" / "python", Path(stamp)):
        path.write_text("")
    assert "pip install" not in make(tmp_path, "-n", "venv", "DEVICE=cpu").stdout
    assert "pip install" in make(tmp_path, "-n", "venv", "DEVICE=gpu").stdout


# ---------------------------------------------------------------- settings


def test_every_setting_is_read_somewhere() -> None:
    """A flag that nobody reads would be ignored in silence."""
    sources = [
        text_of(path)
        for path in tracked_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] not in ("tests",)
        and path.relative_to(ROOT).parts[:2] != ("miles", "config")
    ]
    text = "\n".join(sources)
    read = set(re.findall(r"\b_?(?:args|settings|sizes)\.([a-z_0-9]+)\b", text))
    # Read by methods of the settings themselves.
    read |= set(re.findall(r"\bself\.([a-z_0-9]+)\b", text_of(ROOT / "miles" / "config" / "args.py")))
    # Derived in the configuration itself and read through it.
    through_config = {
        "critic_num_nodes",
        "critic_num_gpus_per_node",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "critic_tensor_model_parallel_size",
        "critic_pipeline_model_parallel_size",
        "critic_lr",
        "critic_lr_warmup_iters",
        "sao_online_recipe",
    }
    assert sorted(Args.model_fields.keys() - NOT_IN_FILES - read - through_config) == []
