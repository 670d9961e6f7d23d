"""The run folder says what ran, with which settings and versions, through every restart."""

import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles.config import Args
from miles.utils.tracking_utils.run_folder import (
    claim_run_folder,
    code_version,
    create_run_folder,
    installed_versions,
    read_run_json,
    record_start,
    refuse_changed_config,
    update_run_json,
)


def test_new_folder_holds_config_with_sources_and_facts(tmp_path: Path) -> None:
    args = Args.build(run_dir=str(tmp_path / "run"), lr=1e-4)
    folder = create_run_folder(args, entry="train_value")
    assert record_start(args, entry="train_value") == folder
    text = (folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["lr"] == 1e-4
    assert [line.split("# ")[1] for line in text.splitlines() if line.startswith("lr:")] == ["code"]
    (start,) = read_run_json(folder)["starts"]
    assert start["entry"] == "train_value"
    assert start["config_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert start["versions"]["torch"] == metadata.version("torch")
    assert start["process"]["pid"] > 0


def test_restart_is_added_to_the_earlier_starts_and_other_facts_stay(tmp_path: Path) -> None:
    args = Args.build(run_dir=str(tmp_path))
    record_start(args, entry="train")
    update_run_json(tmp_path, checkpoints=[{"path": "a"}])
    record_start(args.replace(source="flag", seed=3), entry="train")
    facts = read_run_json(tmp_path)
    assert len(facts["starts"]) == 2
    assert facts["starts"][0]["config_sha256"] != facts["starts"][1]["config_sha256"]
    assert facts["checkpoints"] == [{"path": "a"}]


def test_start_that_does_not_come_to_work_leaves_config_and_facts_of_the_one_before(tmp_path: Path) -> None:
    # Between the two: a cluster without enough devices, a prompt that is too long, a checkpoint that does not fit.
    args = Args.build(run_dir=str(tmp_path))
    create_run_folder(args, entry="train")
    record_start(args, entry="train")
    before = {name: (tmp_path / name).read_bytes() for name in ("config.yaml", "run.json")}
    create_run_folder(args.replace(source="flag", seed=3), entry="train")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--run-dir .*/file/run: cannot be written: Not a directory"):
        create_run_folder(Args.build(run_dir=str(tmp_path / "file" / "run")), entry="train")


@pytest.mark.parametrize(("text", "reason"), [('{"a": ', "not valid JSON"), ("[]", "expected a JSON object")])
def test_damaged_run_json_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=f"run.json.*{reason}"):
        update_run_json(tmp_path, x=1)
    assert (tmp_path / "run.json").read_text() == text


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    args = Args.build(run_dir=str(tmp_path))
    create_run_folder(args, entry="train")
    record_start(args, entry="train")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "run.json"]


def test_absent_package_is_recorded_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "sglang":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr("importlib.metadata.version", version)
    assert installed_versions()["sglang"] is None


def test_commit_is_the_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "miles"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("miles.__file__", str(package / "__init__.py"))
    assert code_version() == {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    assert code_version() == {"commit": None, "dirty": None}
    git("add", ".")
    git("commit", "-qm", "one")
    assert code_version() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "__init__.py").write_text("x = 1\n")
    assert code_version()["dirty"] is True


def test_record_is_json_that_others_can_read(tmp_path: Path) -> None:
    written = update_run_json(tmp_path, note="é")
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == written


def begun(tmp_path: Path, **settings: object) -> Args:
    args = Args.build(run_dir=str(tmp_path), num_rollout=4, lr=1e-4, **settings)
    create_run_folder(args, entry="train")
    return args


def test_resume_with_the_same_settings_is_no_change(tmp_path: Path) -> None:
    refuse_changed_config(begun(tmp_path, rollout_stop_token_ids=[3, 4]).replace(source="flag", resume=True))


def test_resume_where_only_what_follows_from_an_allowed_change_differs_is_accepted(tmp_path: Path) -> None:
    began = begun(tmp_path, rollout_batch_size=4, advantage_estimator="grpo")
    changes = {"lr": 2e-4, "rollout_batch_size": 8}

    def resumed(**more: object) -> Args:
        given = {"run_dir": str(tmp_path), "num_rollout": 4, "advantage_estimator": "grpo", "resume": True}
        return Args.build(**(given | changes | more))

    assert resumed().critic_lr != began.critic_lr
    assert resumed().global_batch_size != began.global_batch_size
    refuse_changed_config(resumed(allow_config_change=list(changes)))
    with pytest.raises(ValueError, match=r"lr is 0\.0002") as refused:
        refuse_changed_config(resumed())
    assert [line.split()[1] for line in str(refused.value).splitlines()] == ["lr", "rollout_batch_size"]


def test_resume_that_leaves_out_what_overruled_another_setting_is_refused(tmp_path: Path) -> None:
    begun(tmp_path, critic_lr=3e-4)
    with pytest.raises(ValueError, match=r"^--resume: critic_lr is 0\.0001, the run began with 0\.0003; give"):
        refuse_changed_config(Args.build(run_dir=str(tmp_path), num_rollout=4, lr=1e-4, resume=True))


def test_resume_with_the_run_folder_spelled_otherwise_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where checkpoints go follows from the run folder; a folder of their own is a setting as any other."""

    def args_of(run_dir: str, save: str) -> Args:
        return Args.build(run_dir=run_dir, save=save, num_rollout=4)

    create_run_folder(args_of(str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints" / "actor")), entry="train")
    monkeypatch.chdir(tmp_path)
    refuse_changed_config(args_of("run", "run/checkpoints/actor"))
    with pytest.raises(ValueError, match="save is 'elsewhere', the run began with"):
        refuse_changed_config(args_of("run", "elsewhere"))


@pytest.mark.parametrize(
    "changes",
    [{"log_level": "ERROR"}, {"num_rollout": 9}, {"save_interval": 2}, {"sglang_health_timeout_s": 5.0}],
)
def test_resume_with_another_setting_that_no_figure_follows_from_is_accepted(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    refuse_changed_config(begun(tmp_path).replace(source="flag", **changes))


def test_resume_with_a_changed_setting_is_refused_by_field_or_allowed_by_name(tmp_path: Path) -> None:
    args = begun(tmp_path).replace(source="flag", lr=1e-3, gamma=0.9)
    with pytest.raises(ValueError) as refused:
        refuse_changed_config(args)
    lines = str(refused.value).splitlines()
    assert [line.split()[1] for line in sorted(lines)] == ["gamma", "lr"]
    assert "--resume: lr is 0.001, the run began with 0.0001; " in str(refused.value)
    refuse_changed_config(args.replace(source="flag", allow_config_change=["lr", "gamma"]))
    with pytest.raises(ValueError, match=r"unknown setting 'gama' \(did you mean gamma\?\)"):
        refuse_changed_config(args.replace(source="flag", allow_config_change=["gama"]))


def test_resume_of_a_decaying_run_may_not_change_its_length(tmp_path: Path) -> None:
    args = begun(tmp_path, lr_decay_style="cosine").replace(source="flag", num_rollout=9)
    with pytest.raises(ValueError, match="num_rollout is 9, the run began with 4"):
        refuse_changed_config(args)


def test_folder_of_other_things_refused_as_run_folder(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds other things than a run"):
        create_run_folder(Args.build(run_dir=str(tmp_path)), entry="train")
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(
    ("began", "goes_on", "refusal"),
    [
        (("train", {}), {}, "holds a run of train.py; name another folder"),
        (("train_value", {}), {"value_pretrain_eval_only": True}, "holds a run that trained a critic; name another"),
        (("train_value", {"value_pretrain_eval_only": True}), {}, "holds a run that evaluated a critic; name another"),
        (
            ("train_value", {"critic_save": "one"}),
            {"critic_save": "two"},
            "holds the run of --critic-save one, not of two; name another folder",
        ),
        (
            ("train_value", {"value_pretrain_eval_only": True, "value_pretrain_eval_report": "a.json"}),
            {"value_pretrain_eval_only": True, "value_pretrain_eval_report": "b.json"},
            "holds the run of --value-pretrain-eval-report a.json, not of b.json; name another folder",
        ),
    ],
)
def test_run_folder_of_another_run_is_refused_in_value_pretraining(
    tmp_path: Path,
    began: tuple[Any, dict[str, Any]],
    goes_on: dict[str, Any],
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    entry, settings = began
    record_start(Args.build(run_dir=str(tmp_path), **settings), entry=entry)
    with pytest.raises(ValueError, match=f"--run-dir {tmp_path}: {refusal}"):
        claim_run_folder(Args.build(run_dir=str(tmp_path), **goes_on), entry="train_value")


def test_value_pretraining_started_again_goes_on_in_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, critic = tmp_path / "run", tmp_path / "run" / "critic"
    args = Args.build(run_dir=str(run), critic_save=str(critic))
    create_run_folder(args, entry="train_value")
    record_start(args, entry="train_value")
    monkeypatch.chdir(tmp_path)
    again = Args.build(run_dir="run", critic_save="run/critic", critic_load="run/critic", value_pretrain_epochs=2)
    claim_run_folder(again, entry="train_value")
    with pytest.raises(ValueError, match="holds a run of train_value"):
        claim_run_folder(again, entry="train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b'{"starts": [5]}', r"run\.json: starts must be a list of objects with 'entry'"),
        ("run.json", b'{"starts": [], "checkpoints": {}}', r"run\.json: checkpoints must be a list"),
        ("run.json", b"\xff", r"run\.json: not valid JSON"),
        ("config.yaml", b"", r"config\.yaml: names no run_dir: cut off"),
    ],
)
def test_file_of_the_run_folder_that_is_damaged_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    args = Args.build(run_dir=str(tmp_path), resume=True)
    create_run_folder(args, entry="train")
    record_start(args, entry="train")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        claim_run_folder(args, entry="train")
        refuse_changed_config(args)
