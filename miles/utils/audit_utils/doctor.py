"""`miles doctor`: what this installation and this machine have, what they lack, and how to mend it."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "warn", "FAIL"]
_COLOURS: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
_GIB = 2**30
_INSTALL = "make venv"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table; `remedy` says how to mend what is not ok."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def run(*, device: Literal["auto", "cpu", "cuda"]) -> int:
    """Print the table of findings; return 1 if one of them fails, after a line with its remedy, else 0."""
    cuda = device == "cuda" or (device == "auto" and _lists_gpus())
    findings = []
    console = Console()
    table = Table(title=f"miles doctor ({'cuda' if cuda else 'cpu'})", title_justify="left")
    for column in ("", "what", "found"):
        table.add_column(column)
    with console.status("looking (importing torch, ray and sglang takes some seconds) ..."):
        for finding in examine(cuda=cuda):
            findings.append(finding)
            table.add_row(
                Text(finding.verdict, _COLOURS[finding.verdict]), Text(finding.subject), Text(finding.detail)
            )
    console.print(table)
    for finding in findings:
        if finding.verdict != "ok":
            print(f"{finding.verdict}: {finding.subject}: {finding.remedy}")
    return int(any(finding.verdict == "FAIL" for finding in findings))


def examine(*, cuda: bool) -> Iterator[Finding]:
    """All findings, one by one, cheapest first."""
    yield _python()
    for package in ("torch", "megatron-core", "ray", "transformers", "sglang", "safetensors", "pydantic", "psutil"):
        yield _version(package)
    yield _import("torch", f"{_INSTALL}; on a CPU a smaller build may be had with TORCH_INDEX_URL")
    yield _import("ray", _INSTALL)
    if not cuda:
        yield _stand_ins()
    else:
        yield _gpu()
        yield _import("transformer_engine.pytorch", "pip install 'miles[te]' (optional)", missing="warn")
    yield _engine(cuda=cuda)
    yield _loopback_port()
    yield from _space()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(subject="python", verdict="ok", detail=f"{version} ({sys.prefix})")


def _version(package: str) -> Finding:
    try:
        return Finding(subject=package, verdict="ok", detail=metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(subject=package, verdict="FAIL", detail="not installed", remedy=_INSTALL)


def _import(module: str, remedy: str, *, missing: Verdict = "FAIL") -> Finding:
    subject = f"import {module}"
    try:
        import_module(module)
    except Exception as error:
        # A broken binary package fails in many ways at import; each of them is a finding.
        return Finding(subject=subject, verdict=missing, detail=_first_line(error), remedy=remedy)
    return Finding(subject=subject, verdict="ok", detail="works")


def _stand_ins() -> Finding:
    folder = Path(__file__).resolve().parents[2] / "backends" / "sglang" / "cpu_stand_ins"
    subject = "CPU stand-ins of the engine"
    if not (folder / "sitecustomize.py").is_file():
        return Finding(subject=subject, verdict="FAIL", detail=f"missing from {folder}", remedy="reinstall miles")
    return Finding(subject=subject, verdict="ok", detail=str(folder))


def _engine(*, cuda: bool) -> Finding:
    """Import the server in a process of its own, with the path that a real server gets."""
    environment = dict(os.environ)
    if not cuda:
        stand_ins = Path(__file__).resolve().parents[2] / "backends" / "sglang" / "cpu_stand_ins"
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(stand_ins)}
    subject = "import sglang's server"
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import sglang.srt.entrypoints.http_server"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        return Finding(subject=subject, verdict="FAIL", detail="no end after 300 s", remedy="free the machine; retry")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Finding(subject=subject, verdict="FAIL", detail=lines[-1] if lines else "died", remedy=_INSTALL)
    return Finding(subject=subject, verdict="ok", detail="works")


def _gpu() -> Finding:
    subject = "CUDA"
    try:
        import torch
    except Exception as error:
        return Finding(subject=subject, verdict="FAIL", detail=_first_line(error), remedy=_INSTALL)
    if not torch.cuda.is_available():
        return Finding(
            subject=subject,
            verdict="FAIL",
            detail=f"torch {torch.__version__} sees no GPU",
            remedy="install the driver that this build of torch needs, or run with --device cpu",
        )
    names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    return Finding(subject=subject, verdict="ok", detail=f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")


def _loopback_port() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        remedy = "bring the loopback interface up (ip link set lo up)"
        return Finding(subject="loopback ports", verdict="FAIL", detail=_first_line(error), remedy=remedy)
    return Finding(subject="loopback ports", verdict="ok", detail=f"bound {port} for a moment")


def _space() -> Iterator[Finding]:
    def judged(subject: str, have: float, *, enough: float, least: float, remedy: str) -> Finding:
        verdict: Verdict = "ok" if have >= enough else "warn" if have >= least else "FAIL"
        return Finding(subject=subject, verdict=verdict, detail=f"{have / _GIB:.1f} GiB free", remedy=remedy)

    disk = shutil.disk_usage(".").free
    yield judged("disk here", disk, enough=5 * _GIB, least=_GIB, remedy="free some space, or set --run-dir and --save")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free
        remedy = "Ray keeps objects there; in a container: --shm-size=2g"
        yield judged("/dev/shm", shared, enough=_GIB, least=0.25 * _GIB, remedy=remedy)
    memory = _available_memory()
    if memory is not None:
        remedy = "the quickstart takes 8 GiB; end other programs"
        yield judged("memory", memory, enough=8 * _GIB, least=3 * _GIB, remedy=remedy)


def _available_memory() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return psutil.virtual_memory().available


def _lists_gpus() -> bool:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        # A driver that hangs lists none.
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
