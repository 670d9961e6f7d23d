"""What is told of prompt files and functions before a device is reserved."""

import json
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.data.sample import Sample
from miles.rollout.preflight import check_rollout_inputs


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
        ({"prompt": "1 +", "metadata": "none"}, r"prompts\.jsonl:151: 'metadata' must be a JSON object"),
    ],
)
def test_late_line_that_is_no_prompt_refused_by_line(args_with: Any, late: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout_inputs(args_with([{"prompt": "1 + 1 ="}] * 150 + [late]))


def test_prompt_file_without_prompts_refused(args_with: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt data .*prompts\.jsonl: no prompts"):
        check_rollout_inputs(args_with([]))


def test_kept_rollout_that_is_missing_or_holds_no_samples_refused(tmp_path: Path) -> None:
    kept, sample = tmp_path / "rollout_000000.jsonl", Sample(0, 0, 0, "1 +", [5, 6], 1, loss_mask=[1])
    sample.rollout_log_probs = [-1.0]
    kept.write_text(json.dumps(sample.to_dict()) + "\n")
    check_rollout_inputs(Args.build(load_rollouts=str(tmp_path), num_rollout=1))
    with pytest.raises(ValueError, match=r"no rollout_000001.jsonl, which --num-rollout 2 needs"):
        check_rollout_inputs(Args.build(load_rollouts=str(tmp_path), num_rollout=2))
    kept.write_text(kept.read_text() + '{"prompt": "1 +"}\n')
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl:2: sample misses fields"):
        check_rollout_inputs(Args.build(load_rollouts=str(tmp_path), num_rollout=1))


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
