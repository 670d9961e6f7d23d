"""A resume starts from exactly what the last complete save wrote, or not at all; a fresh run takes nobody's place."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import sealed
from miles.contracts.chain import describe_checkpoint
from miles.ray.train_state import (
    STATE_FILE,
    STATE_SCHEMA,
    check_resume,
    kl_coef_at,
    newest_checkpoints,
    read_train_state,
    resume_state,
)
from miles.utils.tracking_utils.run_folder import update_run_json

STATE: dict[str, Any] = {
    "schema": STATE_SCHEMA,
    "rollout_id": 3,
    "iteration": 4,
    "weight_version": 5,
    "kl_coef": 0.0,
    "settings": {},
    "inputs": {},
    "prompts": {},
    "actor_checkpoint": None,
    "critic_checkpoint": None,
}


def args_of(folder: Path, **settings: Any) -> Args:
    places = {"save": str(folder / "actor"), "critic_save": str(folder / "critic"), "run_dir": str(folder)}
    return Args.build(**(places | settings))


def write_checkpoint(root: Path, iteration: int, content: str = "weights") -> Path:
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(content)
    write_checkpoint_manifest(folder, iteration=iteration, role=root.name)
    return folder


def saved_run(folder: Path, **settings: Any) -> tuple[Args, dict[str, Any]]:
    """The settings of a run and the state of its save, whose checkpoints are in `folder`."""
    prompts = folder / "train.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    args = args_of(folder, prompt_data=str(prompts), n_samples_per_prompt=2, **settings)
    state = {
        **STATE,
        "kl_coef": args.kl_coef,
        "settings": json.loads(json.dumps(args.model_dump(mode="json"))),
        "prompts": {"sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(), "leftover": []},
        "actor_checkpoint": describe_checkpoint(folder, write_checkpoint(folder / "actor", 4)),
        "critic_checkpoint": describe_checkpoint(folder, write_checkpoint(folder / "critic", 4, "critic")),
    }
    return args.replace(source="flag", resume=True), state


def test_resume_takes_the_checkpoints_of_the_state_not_the_latest(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path)
    write_checkpoint(tmp_path / "actor", 6)
    found = check_resume(args, state)
    assert found.load == str(tmp_path / "actor" / "iter_0000004")
    assert found.critic_load == str(tmp_path / "critic" / "iter_0000004")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_resume_from_a_checkpoint_that_is_gone_or_another_runs_is_refused(role: str, tmp_path: Path) -> None:
    args, state = saved_run(tmp_path)
    shutil.rmtree(tmp_path / role / "iter_0000004")
    with pytest.raises(ValueError, match=rf"{role}/iter_0000004: missing, though {STATE_FILE} names iteration 4"):
        newest_checkpoints(args, state)
    write_checkpoint(tmp_path / role, 4, "of another run")
    with pytest.raises(ValueError, match=rf"{role}/iter_0000004: is not the {role} that this run saved"):
        check_resume(args, state)


def test_resume_with_a_critic_of_a_run_that_had_none_is_refused(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path)
    with pytest.raises(ValueError, match="saved without critic, so it cannot go on with one"):
        newest_checkpoints(args, state | {"critic_checkpoint": None})


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"lr": 1.0, "critic_lr": 1e-6}, "lr is 1.0, the last save was made with 1e-06; give it that again, or pass"),
        ({"rollout_seed": 7}, "rollout_seed is 7, .* it can never change"),
        ({"rollout_shuffle": False}, "rollout_shuffle is False, .* it can never change"),
        ({"load_rollouts": "kept"}, "load_rollouts is 'kept', .* it can never change"),
        ({"load": "elsewhere"}, "load is 'elsewhere', .* it has no effect, the run goes on from its save"),
        ({"critic_load": "elsewhere"}, "critic_load is 'elsewhere', .* it has no effect"),
    ],
)
def test_resume_with_another_setting_than_the_save_is_refused_by_name(
    change: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    args, state = saved_run(tmp_path)
    with pytest.raises(ValueError, match=f"^--resume: {refusal}"):
        check_resume(args.replace(source="flag", **change), state)
    if "give it that again" in refusal:
        check_resume(args.replace(source="flag", **change, allow_config_change=list(change)), state)
    else:
        with pytest.raises(ValueError, match=f"^--resume: {refusal}"):
            check_resume(args.replace(source="flag", **change, allow_config_change=list(change)), state)


def test_resume_compares_with_the_save_not_with_a_start_that_was_refused_later(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path, lr=1e-4)
    (tmp_path / "config.yaml").write_text("lr: 0.5\n")
    check_resume(args, state)


def test_resume_without_what_the_run_started_from_is_accepted(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path, load="a", critic_load="b", critic_value_eval_report="c")
    gone = dict.fromkeys(("load", "critic_load", "critic_value_eval_report"))
    check_resume(args.replace(source="flag", **gone), state)


def test_resume_with_other_prompts_is_refused_and_with_the_same_elsewhere_allowed(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(tmp_path / "train.jsonl", moved)
    change = {"prompt_data": str(moved), "allow_config_change": ["prompt_data"]}
    check_resume(args.replace(source="flag", **change), state)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2 + 2 ="}\n')
    with pytest.raises(ValueError, match=f"--prompt-data {tmp_path}/train.jsonl is not the file that the run samples"):
        check_resume(args, state)


def test_resume_of_a_replay_looks_at_no_prompts_and_of_a_run_without_a_critic_at_no_critic(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path, load_rollouts="kept", advantage_estimator="grpo")
    (tmp_path / "train.jsonl").unlink()
    shutil.rmtree(tmp_path / "critic")
    found = check_resume(args, state | {"prompts": {}, "critic_checkpoint": None})
    assert found.load == str(tmp_path / "actor" / "iter_0000004")
    assert found.critic_load is None


def test_resume_with_other_group_sizes_is_refused_while_groups_are_left_over(tmp_path: Path) -> None:
    args, state = saved_run(tmp_path)
    args = args.replace(source="flag", n_samples_per_prompt=4, allow_config_change=["n_samples_per_prompt"])
    check_resume(args, state)
    state["prompts"]["leftover"] = [[{}, {}]]
    with pytest.raises(ValueError, match="holds sampled groups of 2, --n-samples-per-prompt is 4"):
        check_resume(args, state)


@pytest.mark.parametrize(
    ("saved", "now", "reached", "expected"),
    [
        ({"kl_coef": 0.1}, {"kl_coef": 0.3}, 0.1, 0.3),
        ({"kl_coef": 0.0}, {"kl_coef": 0.1}, 0.0, 0.1),
        ({"kl_coef": 0.1}, {"kl_coef": 0.1}, 0.1, 0.1),
        # What the controller came to, unless it is to start from another coefficient.
        ({"kl_coef": 0.1, **(adaptive := {"kl_controller": "adaptive"})}, {"kl_coef": 0.1, **adaptive}, 0.14, 0.14),
        ({"kl_coef": 0.1, **adaptive}, {"kl_coef": 0.3, **adaptive}, 0.14, 0.3),
        # A controller that is taken away leaves the coefficient of the settings.
        ({"kl_coef": 0.1, **adaptive}, {"kl_coef": 0.1}, 0.14, 0.1),
    ],
)
def test_kl_coefficient_after_a_resume(
    saved: dict[str, Any], now: dict[str, Any], reached: float, expected: float
) -> None:
    state = {"kl_coef": reached, "settings": Args.build(**saved).model_dump(mode="json")}
    assert kl_coef_at(Args.build(**now), state) == expected
    assert kl_coef_at(Args.build(**now), None) == now["kl_coef"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "miles.train', "not valid JSON"),
        (json.dumps(sealed({**STATE, "schema": "miles.train-state.v3"})), "schema must be"),
        ("[]", "schema must be"),
        (json.dumps(STATE), "has no seal_sha256"),
        *(
            (
                json.dumps({**sealed(STATE), name: value}),
                "seal_sha256 does not match the contents",
            )
            for name, value in (("rollout_id", 1), ("settings", []), ("prompts", {"offset": 1000}), ("kl_coef", "x"))
        ),
    ],
)
def test_state_file_that_no_save_wrote_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{STATE_FILE}: .*{message}"):
        read_train_state(tmp_path)


def test_state_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(ValueError, match=f"^{tmp_path}/{STATE_FILE}: is a folder, not a file"):
        read_train_state(tmp_path)


def test_state_file_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"^{tmp_path}/{STATE_FILE}: missing"):
        read_train_state(tmp_path)


def test_resume_without_the_records_of_the_run_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args, state = saved_run(tmp_path)
    (tmp_path / STATE_FILE).write_text(json.dumps(sealed(state)))
    update_run_json(tmp_path, checkpoints=[state["actor_checkpoint"]])
    (tmp_path / "metrics.jsonl").write_text("")
    resume_state(args)
    assert caplog.messages == []
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "run.json").unlink()
    resume_state(args)
    told = [line.partition(": ")[0] for line in caplog.messages]
    assert told == [f"{tmp_path}/run.json", f"{tmp_path}/metrics.jsonl"]
    assert "the figures of the first 4 rollouts are lost" in caplog.messages[1]


def test_fresh_run_in_the_folder_of_another_and_resume_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no complete save"):
        resume_state(args_of(tmp_path, resume=True))
    assert resume_state(args_of(tmp_path)) is None
    (tmp_path / STATE_FILE).write_text(json.dumps(sealed(STATE)))
    assert resume_state(args_of(tmp_path, resume=True)) == sealed(STATE)
    with pytest.raises(ValueError, match="holds a run saved after rollout 3; pass --resume"):
        resume_state(args_of(tmp_path))


@pytest.mark.parametrize(("field", "flag"), [("save", "--save"), ("critic_save", "--critic-save")])
def test_fresh_run_would_replace_checkpoints_of_another_refused_its_own_first_attempt_not(
    field: str, flag: str, tmp_path: Path
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "checkpoints"
    args = args_of(run_dir, **{field: str(elsewhere)})
    assert resume_state(args) is None
    folder = write_checkpoint(elsewhere, 2)
    with pytest.raises(ValueError, match=f"^{flag} {elsewhere}: holds iter_0000002, which this run did not record"):
        resume_state(args)
    # Killed between the checkpoints and the state: what it recorded is its own, until another run replaces it.
    run_dir.mkdir()
    update_run_json(run_dir, checkpoints=[describe_checkpoint(run_dir, folder)])
    assert resume_state(args) is None
    shutil.rmtree(folder)
    write_checkpoint(elsewhere, 2, "of another run")
    with pytest.raises(ValueError, match="holds iter_0000002"):
        resume_state(args)


def test_fresh_run_again_after_an_attempt_that_came_to_no_save_is_accepted_in_its_own_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor", 2)
    assert resume_state(args_of(tmp_path)) is None


@pytest.mark.parametrize("origin", ["load", "critic_load"])
@pytest.mark.parametrize("target", ["save", "critic_save"])
def test_fresh_run_that_saves_where_it_starts_from_is_refused(origin: str, target: str, tmp_path: Path) -> None:
    start = write_checkpoint(tmp_path / "start", 4)
    for path in (start, start.parent):
        args = args_of(tmp_path / "run", **{origin: str(path), target: str(tmp_path / "start")})
        with pytest.raises(ValueError, match=f"start: is what --{origin.replace('_', '-')} starts from"):
            resume_state(args)
