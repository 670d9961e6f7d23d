"""Digests of what a run reads: which settings have one, what changes it, and what a resume says of that."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.rollout import inputs
from miles.rollout.inputs import refuse_changed_inputs, refuse_edited_inputs, run_inputs


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "merges.txt"):
        (model / name).write_text(name)
    for name in ("reward", "keep", "estimate"):
        (tmp_path / f"{name}.py").write_text(f"def {name}(*given): return 1\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1 +"}\n')
    return {
        "hf_checkpoint": str(model),
        "ref_load": str(shutil.copytree(model, tmp_path / "reference")),
        "custom_rm_path": f"{tmp_path}/reward.py:reward",
        "dynamic_sampling_filter_path": f"{tmp_path}/keep.py:keep",
        "advantage_estimator": f"{tmp_path}/estimate.py:estimate",
        "eval_prompt_data": [f"a:{tmp_path}/one.jsonl", f"b:{tmp_path}/two.jsonl"],
    }


def args_of(settings: dict[str, Any], **more: Any) -> Args:
    return Args.build(**({"kl_coef": 0.1} | settings | more))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" \n")


@pytest.mark.parametrize(
    ("file", "field"),
    [
        *((f"{{hf_checkpoint}}/{name}", "hf_checkpoint") for name in ("config.json", "tokenizer.json", "merges.txt")),
        ("{hf_checkpoint}/model.safetensors", "hf_checkpoint"),
        ("{ref_load}/model.safetensors", "ref_load"),
        ("{tmp}/reward.py", "custom_rm_path"),
        ("{tmp}/keep.py", "dynamic_sampling_filter_path"),
        ("{tmp}/estimate.py", "advantage_estimator"),
        ("{tmp}/one.jsonl", "eval_prompt_data"),
        ("{tmp}/two.jsonl", "eval_prompt_data"),
    ],
)
def test_file_that_changed_is_refused_by_flag_unless_the_change_is_allowed(
    settings: dict[str, Any], tmp_path: Path, file: str, field: str
) -> None:
    args = args_of(settings)
    then = run_inputs(args)
    refuse_changed_inputs(args, then, run_inputs(args))
    append(changed := Path(file.format(**settings, tmp=tmp_path)))
    now = run_inputs(args)
    assert [name for name in then if now[name] != then[name]] == [field]
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"^--resume: {flag} .* another content than when the run began") as refused:
        refuse_changed_inputs(args, then, now)
    assert f"{changed.name}); give it that again, or pass --allow-config-change {field}" in str(refused.value)
    refuse_changed_inputs(args_of(settings, allow_config_change=[field]), then, now)


def test_file_that_came_to_the_model_or_went_is_named(settings: dict[str, Any]) -> None:
    args, folder = args_of(settings), Path(settings["hf_checkpoint"])
    then = run_inputs(args)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"when the run began \(chat_template\.jinja, tokenizer\.json\); give"):
        refuse_changed_inputs(args, then, run_inputs(args))


def test_file_that_is_edited_while_the_run_starts_is_refused_by_flag(settings: dict[str, Any], tmp_path: Path) -> None:
    args = args_of(settings)
    then = run_inputs(args)
    refuse_edited_inputs(args, then)
    append(tmp_path / "reward.py")
    with pytest.raises(
        ValueError, match=r"^--custom-rm-path .*reward\.py:reward: changed while the run started; start"
    ):
        refuse_edited_inputs(args, then)


def test_kept_rollouts_of_another_content_are_refused_and_more_of_them_are_not(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"rollout_{number:06d}.jsonl").write_text(f"{number}\n")
    args = Args.build(load_rollouts=str(tmp_path), num_rollout=2)
    then = run_inputs(args)
    assert then["load_rollouts"].keys() == {"rollout_000000.jsonl", "rollout_000001.jsonl"}
    longer = args.replace(source="flag", num_rollout=3)
    refuse_changed_inputs(longer, then, run_inputs(longer))
    append(tmp_path / "rollout_000001.jsonl")
    with pytest.raises(ValueError, match=r"--load-rollouts .* another content .* \(rollout_000001\.jsonl\)"):
        refuse_changed_inputs(longer, then, run_inputs(longer))


def test_file_that_is_only_touched_or_beside_the_model_or_a_link_is_no_change(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    args, folder = args_of(settings), Path(settings["hf_checkpoint"])
    then = run_inputs(args)
    for name in ("README.md", "LICENSE.txt"):
        (folder / name).write_text("of no run")
    # As in a cache of Hugging Face's.
    shutil.move(folder / "config.json", tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    (folder / "tokenizer.json").touch()
    assert run_inputs(args) == then


def test_digests_are_of_what_the_run_reads_and_of_nothing_else(settings: dict[str, Any], tmp_path: Path) -> None:
    assert sorted(run_inputs(args_of(settings))) == sorted(settings)
    sampled = run_inputs(args_of(settings, rollout_only=True))
    assert sorted(sampled) == ["custom_rm_path", "dynamic_sampling_filter_path", "hf_checkpoint"]
    replayed = run_inputs(args_of(settings, load_rollouts=str(tmp_path), kl_coef=0.0, advantage_estimator="gae"))
    assert sorted(replayed) == ["hf_checkpoint", "load_rollouts"]


def test_function_of_a_module_is_its_file_and_one_without_a_file_has_none(settings: dict[str, Any]) -> None:
    of_module = run_inputs(args_of(settings, custom_rm_path="json:dumps"))["custom_rm_path"]
    assert of_module == run_inputs(args_of(settings, custom_rm_path=f"{json.__file__}:dumps"))["custom_rm_path"]
    for without in ("sys:intern", "miles.rollout.filters:nonzero_reward_std"):
        assert run_inputs(args_of(settings, custom_rm_path=without))["custom_rm_path"] == {}


@pytest.mark.parametrize("position", [0, 1 << 20, 3 << 20])
def test_large_file_is_told_apart_by_its_size_and_by_blocks_all_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 1 << 20)
    file, size = tmp_path / "model.safetensors", 3 << 20
    file.write_bytes(bytes(size))
    digest = inputs._of_large_file(file)
    # As other weights do: a stretch of bytes is another one.
    data = bytearray(size)
    data[max(0, position - (64 << 10)) : position + (64 << 10)] = b"x" * (128 << 10)
    file.write_bytes(data[:size])
    assert inputs._of_large_file(file) != digest
    file.write_bytes(bytes(size + 1))
    assert inputs._of_large_file(file) != digest
