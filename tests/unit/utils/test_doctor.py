"""`miles doctor` says what is missing and how to mend it, and fails when something that is needed is missing."""

import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from miles.utils.audit_utils import doctor
from miles.utils.audit_utils.doctor import Finding, examine


@pytest.fixture(autouse=True)
def quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch, ray and the engine takes a minute; whether they import is not what is tested here."""

    def imported(name: str) -> None:
        if name == "transformer_engine.pytorch":
            raise ModuleNotFoundError(name)

    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(doctor, "import_module", imported)
    monkeypatch.setattr(subprocess, "run", ran)


def found(subject: str, *, cuda: bool = False) -> Finding:
    (finding,) = [finding for finding in examine(cuda=cuda) if finding.subject == subject]
    return finding


def test_whole_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(device="cpu") == 0
    assert "FAIL" not in capsys.readouterr().out


def test_missing_package_fails_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "psutil":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert doctor.run(device="cpu") == 1
    assert "FAIL: psutil: make venv" in capsys.readouterr().out.splitlines()


def test_package_that_breaks_at_import_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file\nand more")

    monkeypatch.setattr(doctor, "import_module", broken)
    finding = found("import torch")
    assert finding.verdict == "FAIL"
    assert finding.detail == "OSError: libcudart.so.13: cannot open shared object file"


def test_engine_that_does_not_import_shows_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\n  ...\nImportError: no sgl_kernel\n")

    monkeypatch.setattr(subprocess, "run", ran)
    finding = found("import sglang's server")
    assert (finding.verdict, finding.detail) == ("FAIL", "ImportError: no sgl_kernel")


def test_absent_transformer_engine_is_a_warning_only() -> None:
    assert found("import transformer_engine.pytorch", cuda=True).verdict == "warn"


def test_absent_gpu_fails_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = found("CUDA", cuda=True)
    assert finding.verdict == "FAIL"
    assert "--device cpu" in finding.remedy


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "verdict"), [(6 << 30, "ok"), (2 << 30, "warn"), (1 << 29, "FAIL")])
def test_disk_space_is_judged(monkeypatch: pytest.MonkeyPatch, free: int, verdict: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(free, 0, free))
    assert found("disk here").verdict == verdict


def test_loopback_that_is_down_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, address: tuple[str, int]) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    assert found("loopback ports").verdict == "FAIL"


def test_stand_ins_are_part_of_the_package() -> None:
    finding = found("CPU stand-ins of the engine")
    assert finding.verdict == "ok"
    assert (Path(finding.detail) / "sitecustomize.py").is_file()
