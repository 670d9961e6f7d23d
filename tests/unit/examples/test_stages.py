import json
import sys

import pytest

from examples.stages import Stage, read_plan, run_stages


def writer(out, name: str, *, text: str | None = None, only_looks: bool = False) -> Stage:
    """A stage that adds a line to `log` and, unless it only looks, writes its file."""
    code = f"open({str(out / 'log')!r}, 'a').write({name!r} + '\\n')"
    if not only_looks:
        code += f"; open({str(out / name)!r}, 'x').write({text or name!r})"
    return Stage(name, [sys.executable, "-S", "-c", code], [] if only_looks else [out / name], only_looks)


def ran(out) -> list[str]:
    log = out / "log"
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_run_stages_second_start_runs_only_what_looks(tmp_path):
    todo = [writer(tmp_path, "a"), writer(tmp_path, "look", only_looks=True), writer(tmp_path, "b")]
    run_stages("t", todo, tmp_path)
    assert ran(tmp_path) == ["a", "look", "b"]
    run_stages("t", todo, tmp_path)
    assert ran(tmp_path) == ["look"]


def test_run_stages_changed_command_runs_it_and_all_later(tmp_path):
    run_stages("t", [writer(tmp_path, name) for name in "abc"], tmp_path)
    ran(tmp_path)
    run_stages("t", [writer(tmp_path, "a"), writer(tmp_path, "b", text="new"), writer(tmp_path, "c")], tmp_path)
    assert ran(tmp_path) == ["b", "c"]
    assert (tmp_path / "b").read_text() == "new"


def test_run_stages_missing_output_runs_it_again(tmp_path):
    todo = [writer(tmp_path, "a"), writer(tmp_path, "b")]
    run_stages("t", todo, tmp_path)
    ran(tmp_path)
    (tmp_path / "b").unlink()
    run_stages("t", todo, tmp_path)
    assert ran(tmp_path) == ["b"]


def test_run_stages_failure_names_stage_and_forgets_what_came_after(tmp_path):
    good = [writer(tmp_path, name) for name in "abc"]
    run_stages("t", good, tmp_path)
    ran(tmp_path)
    bad = [good[0], Stage("b", [sys.executable, "-S", "-c", "raise SystemExit(3)"], [tmp_path / "b"]), good[2]]
    with pytest.raises(SystemExit, match=r"t: stage 'b' ended with exit code 3"):
        run_stages("t", bad, tmp_path)
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["a"]
    run_stages("t", good, tmp_path)
    assert ran(tmp_path) == ["b", "c"]


def test_read_plan_places_become_folders(tmp_path):
    (tmp_path / "plan.yaml").write_text('model: "{out}/model"\nreward: "{here}/reward.py:score"\nkinds: [{a: 1}]\n')
    plan = read_plan(tmp_path / "plan.yaml", out=tmp_path / "o", here=tmp_path / "h")
    assert plan == {
        "model": f"{tmp_path}/o/model",
        "reward": f"{tmp_path}/h/reward.py:score",
        "kinds": [{"a": 1}],
    }
