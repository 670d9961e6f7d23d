"""A mistake in the flags of a tool is one line that names the flag, not what follows from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles.utils.strict_parser import StrictParser

ROOT = Path(__file__).resolve().parents[3]


def parser() -> StrictParser:
    made = StrictParser(prog="tool")
    made.add_argument("--out", required=True)
    made.add_argument("--range", nargs=2, type=float)
    made.add_argument("words", nargs="*")
    return made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--outt", "x"], "unknown flag --outt (did you mean --out?)"),
        (["--outt=x"], "unknown flag --outt (did you mean --out?)"),
        (["--ou", "x"], "unknown flag --ou (did you mean --out?)"),
        (["-z"], "unknown flag -z"),
        ([], "the following arguments are required: --out"),
        (["--out"], "argument --out: expected one argument"),
    ],
)
def test_mistake_is_one_line_and_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tool: error: {message}\n"


def test_values_that_look_like_flags_stay_values() -> None:
    options = parser().parse_args(["--out=--x", "--range", "-1", "-.5", "-a text", "--", "--outt"])
    assert (options.out, options.range, options.words) == ("--x", [-1.0, -0.5], ["-a text", "--outt"])


@pytest.mark.parametrize("program", ["warm_start", "make_actor"])
def test_example_program_refuses_before_its_heavy_imports(program: str) -> None:
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code, sorted({'torch', 'ray', 'transformers'} & {*sys.modules}))"
    )
    path = ROOT / "examples" / "quickstart" / f"{program}.py"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), "--confog", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "2 []\n"
    assert "unknown flag --confog" in done.stderr
