"""What is told of prompt files and functions before a device is reserved."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.config.files import config_yaml, read_config_file
from miles.data.sample import Sample
from miles.rollout.inputs import run_inputs
from miles.rollout.preflight import (
    check_rollout_inputs,
    kept_rollout_state,
    publish_rollout_state,
    set_aside_earlier_work,
)
from miles.utils.tracking_utils.run_folder import create_run_folder, record_start


@pytest.fixture
def args_with(tmp_path: Path) -> Any:
    def build(rows: list[Any], **settings: Any) -> Args:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Args.build(prompt_data=str(path), **settings)

    return build


def test_label_key_that_no_row_has_refused_by_flag(args_with: Any) -> None:
    with pytest.raises(ValueError, match=r"--label-key answer: no row of .*; its rows have label, prompt"):
        check_rollout_inputs(args_with([{"prompt": "1 + 1 =", "label": "2"}], label_key="answer"))


def test_input_key_that_no_row_has_refused_by_flag(args_with: Any) -> None:
    with pytest.raises(ValueError, match="--input-key question"):
        check_rollout_inputs(args_with([{"prompt": "1 + 1 ="}], input_key="question"))


def test_resolved_config_given_back_as_a_file_is_accepted_where_a_default_key_is_in_no_row(
    args_with: Any, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(args_with([{"prompt": "1 + 1 ="}])))
    values, where = read_config_file(str(file))
    check_rollout_inputs(Args.from_values(values, dict.fromkeys(values, f"file:{file}"), where=where))


def test_label_key_that_only_a_late_row_has_accepted(args_with: Any) -> None:
    rows = [{"prompt": "1 + 1 ="}] * 150 + [{"prompt": "1 + 1 =", "answer": "2"}]
    check_rollout_inputs(args_with(rows, label_key="answer"))


def test_default_label_key_that_no_row_has_accepted(args_with: Any) -> None:
    check_rollout_inputs(args_with([{"prompt": "1 + 1 ="}]))


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ([1, 2], r"prompts\.jsonl:151: expected a JSON object, got list"),
        ({"question": "1 + 1 ="}, r"prompts\.jsonl:151: no key 'prompt'; the row has \['question'\]"),
        ({"prompt": 3}, r"prompts\.jsonl:151: 'prompt' must be a string"),
        ({"prompt": ""}, r"prompts\.jsonl:151: the prompt is empty"),
        ({"prompt": "1 +", "metadata": "none"}, r"prompts\.jsonl:151: 'metadata' must be a JSON object"),
    ],
)
def test_late_line_that_is_no_prompt_refused_by_line(args_with: Any, late: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout_inputs(args_with([{"prompt": "1 + 1 ="}] * 150 + [late]))


def test_late_prompt_that_makes_segments_is_refused_by_line_unless_compaction_is_asked_for(args_with: Any) -> None:
    rows = [{"prompt": "1 +"}, {"prompt": "1 +", "metadata": {"compaction_trajectory_id": "t"}}]
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl:2: 'metadata' has compaction_trajectory_id, which needs --sao"
    ):
        check_rollout_inputs(args_with(rows))
    check_rollout_inputs(args_with(rows, sao_compaction=True))


def test_prompt_file_without_prompts_refused(args_with: Any) -> None:
    with pytest.raises(ValueError, match=r"^--prompt-data: .*prompts\.jsonl: no prompts"):
        check_rollout_inputs(args_with([]))


def kept_row(**changes: Any) -> dict[str, Any]:
    made = Sample(0, 0, 0, "1 +", [5, 6], 1, reward=1.0, loss_mask=[1], rollout_log_probs=[-1.0])
    return made.to_dict() | {"status": "completed"} | changes


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Path]:
    """Writes the files of kept rollouts, a list of rows each; returns their folder."""

    def write(*rollouts: list[dict[str, Any]]) -> Path:
        for number, rows in enumerate(rollouts):
            path = tmp_path / f"rollout_{number:06d}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return write


def test_kept_rollout_that_is_missing_refused(keep: Callable[..., Path]) -> None:
    folder = keep([kept_row()])
    check_rollout_inputs(Args.build(load_rollouts=str(folder), num_rollout=1))
    with pytest.raises(ValueError, match=r"no rollout_000001.jsonl, which --num-rollout 2 needs"):
        check_rollout_inputs(Args.build(load_rollouts=str(folder), num_rollout=2))


SEGMENT = {
    "compaction_trajectory_id": "t",
    "compaction_segment_index": 0,
    "compaction_segment_type": "execution",
}


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"prompt": "1 +"}], {}, ":1: sample misses fields"),
        ([kept_row(), kept_row()], {"rollout_batch_size": 1}, r": 2 samples, --rollout-batch-size 1 x .* 1 is 1"),
        ([kept_row(status="aborted")], {}, ": sample 0 is aborted"),
        ([kept_row(rollout_id=2)], {}, ": holds samples of rollout 2, which is not 1 or an earlier one"),
        ([kept_row(reward=None)], {}, ": reward of sample 0 is None"),
        ([kept_row(reward=-2e18)], {}, r": sample 0: reward -2e\+18 is above 1e\+18"),
        ([kept_row(rollout_log_probs=[0.5])], {}, ": sample 0: a log-probability of 0.5"),
        ([kept_row(status="failed")], {}, ": rollout batch has no trainable token"),
        ([kept_row(tokens=[5, 512])], {}, ": sample 0: token id 512 is outside the model's vocabulary of 512"),
        ([kept_row(tokens=[5] * 65)], {}, ": sample 0 has 65 tokens, .* max_position_embeddings is 64"),
        (
            [kept_row(tokens=[5] * 17)],
            {"max_tokens_per_gpu": 8, "context_parallel_size": 2},
            ": sample 0 has 17 tokens, .* is 16",
        ),
        ([kept_row(metadata=SEGMENT)], {}, ": holds segments .* which need --sao-compaction"),
        (
            [kept_row(metadata=SEGMENT | {"compaction_segment_index": 1})],
            {"policy_objective": "sao_dis", "sao_compaction": True},
            ": trajectory t: invalid segment sequence",
        ),
    ],
)
def test_late_kept_rollout_that_cannot_be_trained_on_refused_by_file(
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    message: str,
    keep: Callable[..., Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 64}))
    first = [kept_row(metadata=SEGMENT)] if settings.get("sao_compaction") else [kept_row()]
    folder = keep(first, rows)
    args = Args.build(load_rollouts=str(folder), num_rollout=2, hf_checkpoint=str(tmp_path), **settings)
    check_rollout_inputs(args.replace(source="code", num_rollout=1))
    with pytest.raises(ValueError, match="rollout_000001.jsonl" + message):
        check_rollout_inputs(args)


def test_rollouts_that_their_run_sampled_at_another_temperature_are_refused(
    keep: Callable[..., Path], tmp_path: Path
) -> None:
    folder = keep([kept_row()])
    (run := tmp_path / "run").mkdir()
    folder = shutil.copytree(folder, run / "rollouts", ignore=shutil.ignore_patterns("run"))
    args = Args.build(load_rollouts=str(folder), num_rollout=1, rollout_temperature=0.5)
    check_rollout_inputs(args)
    (run / "config.yaml").write_text(config_yaml(Args.build(rollout_temperature=0.5)))
    check_rollout_inputs(args)
    (run / "config.yaml").write_text(config_yaml(Args.build(rollout_temperature=0.75)))
    with pytest.raises(ValueError, match=r"^--rollout-temperature 0\.5: .* sampled at 0\.75 \(.*/run/config"):
        check_rollout_inputs(args)
    sealed_at = {"rollouts": [hashlib.sha256((folder / "rollout_000000.jsonl").read_bytes()).hexdigest()]}
    publish_rollout_state(folder, args, **sealed_at, prompts={}, inputs={})
    check_rollout_inputs(args)
    # The file of another program.
    (folder / "state.json").unlink()
    (run / "config.yaml").write_text("name: mine\n")
    check_rollout_inputs(args)


# ---------------------------------------------------------------- what an earlier run left


@pytest.fixture
def began(tmp_path: Path) -> Callable[..., Args]:
    """Starts runs in one folder; returns the settings of the start, each with other ones beside."""

    def start(**settings: Any) -> Args:
        args = Args.build(run_dir=str(tmp_path / "run"), **settings)
        create_run_folder(args, entry="train")
        record_start(args, entry="train")
        return args

    return start


def leave_metrics(args: Args) -> None:
    (Path(str(args.run_dir)) / "metrics.jsonl").write_text('{"step": 1}\n')


def leave_rollout(args: Args, number: int = 0) -> Path:
    folder = Path(str(args.run_dir)) / "rollouts"
    folder.mkdir(exist_ok=True)
    (folder / f"rollout_{number:06d}.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("leave", [leave_metrics, leave_rollout])
@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {"rollout_only": True}, "rollout_only is True, the run began with False"),
        ({"rollout_only": True}, {}, "rollout_only is False, the run began with True"),
        ({"seed": 1}, {"seed": 2}, "seed is 2, the run began with 1"),
    ],
)
def test_fresh_start_over_another_runs_work_refused(
    leave: Callable[[Args], object],
    before: dict[str, Any],
    now: dict[str, Any],
    differs: str,
    began: Callable[..., Args],
) -> None:
    args = began(**before)
    other = Args.build(run_dir=args.run_dir, **now)
    check_rollout_inputs(other)
    leave(args)
    with pytest.raises(ValueError, match=rf"--run-dir .*/run: holds the .* \({differs}\); name another folder"):
        check_rollout_inputs(other)


def test_run_without_a_save_begins_again_and_keeps_what_it_had(
    began: Callable[..., Args], caplog: pytest.LogCaptureFixture
) -> None:
    args = began(seed=1)
    folder = Path(str(args.run_dir))
    set_aside_earlier_work(args)
    for number in (1, 2):
        leave_metrics(args)
        leave_rollout(args)
        check_rollout_inputs(args.replace(source="flag", max_restarts=7))
        assert "holds the 1 kept rollouts of an earlier run that came to no save: it begins again" in caplog.text
        set_aside_earlier_work(args)
        assert not (folder / "metrics.jsonl").exists()
        assert not (folder / "rollouts").exists()
        assert (folder / f"earlier_{number}" / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert (folder / f"earlier_{number}" / "rollouts" / "rollout_000000.jsonl").exists()


def test_rollouts_go_on_after_the_last_whole_one_and_only_when_asked(
    began: Callable[..., Args], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    reward = tmp_path / "reward.py"
    reward.write_text("def score(sample): return 1\n")
    args = began(rollout_only=True, prompt_data=str(prompts), custom_rm_path=f"{reward}:score")
    resumed = args.replace(source="flag", resume=True)
    assert kept_rollout_state(args) is None
    with pytest.raises(ValueError, match=r"--resume: .* holds no rollout of --rollout-only"):
        kept_rollout_state(resumed)
    folder = leave_rollout(args, 0)
    leave_rollout(args, 1)
    (folder / "rollout_000001.jsonl").write_text(json.dumps(kept_row()) + "\n")
    digests = [hashlib.sha256((folder / f"rollout_00000{number}.jsonl").read_bytes()).hexdigest() for number in (0, 1)]

    def publish(**changes: Any) -> None:
        held = {"rollouts": digests, "prompts": {"position": 1, "sha256": digest}, "inputs": run_inputs(args)}
        publish_rollout_state(folder, args, **(held | changes))

    publish()
    with pytest.raises(ValueError, match="holds the 2 kept rollouts of an earlier run; pass --resume to go on"):
        check_rollout_inputs(args)
    check_rollout_inputs(resumed)
    state = kept_rollout_state(resumed)
    assert state is not None
    assert (state["rollout_id"], state["prompts"]["position"]) == (1, 1)
    assert state["inputs"] == {"custom_rm_path": {"reward.py": hashlib.sha256(reward.read_bytes()).hexdigest()}}
    publish(prompts={"position": 1, "sha256": "0" * 64})
    with pytest.raises(ValueError, match=r"prompts.jsonl is not the file that the run samples from: its SHA-256 is"):
        kept_rollout_state(resumed)
    publish()
    (folder / "state.json").write_text(json.dumps(json.loads((folder / "state.json").read_text()) | {"rollout_id": 0}))
    with pytest.raises(ValueError, match=r"state.json: seal_sha256 does not match the contents"):
        kept_rollout_state(resumed)
    publish()
    with pytest.raises(ValueError, match="--resume: seed is 5, the last save was made with 1234"):
        kept_rollout_state(resumed.replace(source="flag", seed=5))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1234 ", "seed: 5 "))
    with pytest.raises(ValueError, match="--resume: seed is 5, the last save was made with 1234"):
        kept_rollout_state(resumed.replace(source="flag", seed=5))
    first, second = (folder / f"rollout_00000{number}.jsonl" for number in (0, 1))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    replayed = {"load_rollouts": str(folder), "num_rollout": 2, "run_dir": str(tmp_path / "replay")}
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl: is not what was kept there: its SHA-256 is not"):
        check_rollout_inputs(Args.build(**replayed))
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl: is not what was kept there: its SHA-256 is not"):
        kept_rollout_state(resumed)
    first.write_bytes(kept)
    assert kept_rollout_state(resumed) is not None
    first.unlink()
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl is missing, though state.json counts it"):
        kept_rollout_state(resumed)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "miles.rollout-state.v1"}'])
def test_rollout_state_that_nobody_wrote_refused(text: str, began: Callable[..., Args]) -> None:
    args = began(rollout_only=True, resume=True)
    (leave_rollout(args) / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state.json: (not valid JSON|schema must be)"):
        kept_rollout_state(args)


@pytest.mark.parametrize("field", ["custom_rm_path", "dynamic_sampling_filter_path", "advantage_estimator"])
def test_function_that_cannot_be_imported_refused_by_flag(args_with: Any, tmp_path: Path, field: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import there_is_no_such_module\n")
    with pytest.raises(ValueError, match="there_is_no_such_module") as refused:
        check_rollout_inputs(args_with([{"prompt": "1"}], **{field: f"{file}:f"}))
    assert str(refused.value).startswith(f"--{field.replace('_', '-')} {file}:f: importing {file} failed: ")


def test_advantage_function_refused_where_rollouts_are_loaded(tmp_path: Path) -> None:
    args = Args.build(load_rollouts=str(tmp_path), num_rollout=1, advantage_estimator="json:missing")
    with pytest.raises(ValueError, match="--advantage-estimator json:missing: json has no missing"):
        check_rollout_inputs(args)


@pytest.mark.parametrize("field", ["custom_rm_path", "dynamic_sampling_filter_path", "advantage_estimator"])
def test_function_with_another_signature_refused_by_flag(args_with: Any, tmp_path: Path, field: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(prompt, response, label): return 1.0\n")
    with pytest.raises(ValueError, match=r"its signature is \(prompt, response, label\): missing") as refused:
        check_rollout_inputs(args_with([{"prompt": "1"}], **{field: f"{file}:f"}))
    assert str(refused.value).startswith(f"--{field.replace('_', '-')} {file}:f: it is called with ")


def test_chat_template_that_the_model_has_not_refused_by_flag(args_with: Any, tmp_path: Path) -> None:
    args = args_with([{"prompt": "1"}], apply_chat_template=True, hf_checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match=rf"^--apply-chat-template: {tmp_path} has no chat template"):
        check_rollout_inputs(args)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_rollout_inputs(args)
