import importlib
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


KEYS = ("common", "problems.kinds", "rl.settings")
PLAN = "common: {reward: '{here}/reward.py:score'}\nproblems: {kinds: [1], seed: 2}\nrl: {settings: {a: '{out}/b'}}\n"


def test_read_plan_places_become_folders(tmp_path):
    (tmp_path / "plan.yaml").write_text(PLAN)
    plan = read_plan("t", tmp_path / "plan.yaml", KEYS, out=tmp_path / "o", here=tmp_path / "h")
    assert plan == {
        "common": {"reward": f"{tmp_path}/h/reward.py:score"},
        "problems": {"kinds": [1], "seed": 2},
        "rl": {"settings": {"a": f"{tmp_path}/o/b"}},
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected a mapping of sections"),
        ("- a\n", "expected a mapping of sections"),
        ("a: [1\n", "while parsing a flow sequence"),
        ("\xff\x00", "'utf-8' codec can't decode"),
        ("a: 1\n", "no 'common'"),
        (PLAN.replace("rl:", "rll:"), "no 'rl' (there is rll)"),
        (PLAN.replace("settings", "setings"), "rl: no 'settings' (there is setings)"),
        (PLAN.replace("{kinds: [1], seed: 2}", "3"), "problems: expected a mapping of settings"),
        (PLAN.replace("{a: '{out}/b'}", "3"), "rl: settings: expected a mapping of settings"),
        (PLAN.replace("settings:", "seed: 3, settings:"), "rl: unknown key 'seed'"),
        (PLAN + "comon: {}\n", "unknown key 'comon' (did you mean common?)"),
    ],
)
def test_read_plan_that_is_none_is_one_line_with_file_and_key(tmp_path, text, reason):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as ended:
        read_plan("t", path, KEYS)
    assert str(ended.value).startswith(f"t: --plan {path}: {reason}")
    assert "\n" not in str(ended.value)


def test_read_plan_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match=rf"t: --plan {tmp_path}/no: No such file or directory"):
        read_plan("t", tmp_path / "no", KEYS)


@pytest.mark.parametrize("example", ["quickstart", "smollm2"])
def test_plan_of_an_example_is_complete_and_a_bad_one_leaves_nothing_behind(example, tmp_path, monkeypatch):
    program = importlib.import_module(f"examples.{example}.run")
    plan = read_plan("t", program.HERE / f"{example}.yaml", program.KEYS, out=tmp_path, here=tmp_path)
    assert program.stages(plan, tmp_path / "stages")
    monkeypatch.setattr(sys, "argv", ["run.py", "--plan", "/no/plan.yaml", "--out", str(tmp_path / "out"), "--fresh"])
    with pytest.raises(SystemExit, match=r"/no/plan\.yaml: No such file"):
        program.main()
    assert not (tmp_path / "out").exists()
