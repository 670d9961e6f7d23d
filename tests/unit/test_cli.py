"""`miles`: subcommands, exit statuses, one line for a mistake, and nothing heavy imported to answer."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles import cli


def test_help_names_every_command_and_imports_none_of_them() -> None:
    program = (
        "import sys, miles.cli\n"
        "try: miles.cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "light = {'miles.cli', 'miles.utils', 'miles.utils.strict_parser'}\n"
        "print(sorted(m for m in sys.modules if m.startswith('miles.') and m not in light))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("argv", [[], ["repot"], ["verify"], ["report", "x", "--ou", "y"]])
def test_usage_mistake_ends_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_unknown_flag_is_told_before_a_missing_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["report", "--outt", "y"])
    assert capsys.readouterr().err == "miles report: error: unknown flag --outt (did you mean --out?)\n"


def test_report_of_a_run_folder_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"step": 1, "stage": "train", "time": time.time(), "loss": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()


def test_report_writes_the_learning_curve_where_it_is_asked_to(tmp_path: Path) -> None:
    line = {"step": 1, "stage": "rollout", "time": time.time(), "rollout/reward_mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert cli.main(["report", str(tmp_path), "--png", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("flag", ["--out", "--png"])
def test_report_named_file_that_exists_is_never_replaced(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    line = {"step": 1, "stage": "rollout", "time": time.time(), "rollout/reward_mean": 0.5}
    metrics.write_text(json.dumps(line) + "\n")
    before = metrics.read_bytes()
    assert cli.main(["report", str(tmp_path)]) == cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path), flag, str(metrics)]) == 2
    assert capsys.readouterr().err == f"miles report: {flag} {metrics}: already exists and is never replaced\n"
    assert metrics.read_bytes() == before


@pytest.mark.parametrize("command", ["report", "verify"])
def test_missing_path_is_one_line_and_status_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "/no/such/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"miles {command}: ")
    assert "/no/such/run" in line
