"""Checkpoints that a run starts from are identified before Ray, contract or not."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.checkpoint_identity import Identity, ValueHeadIdentity
from miles.config import Args
from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.chain import describe_checkpoint
from miles.contracts.value_schema import VALUE_PRETRAIN_CONTRACT_NAME
from miles.ray.origins import settle
from miles.ray.train_state import newest_checkpoints

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_checkpoint(root: Path, model: Path, head: ValueHeadIdentity | None = None) -> Path:
    """A save folder whose newest checkpoint is an actor's, or a critic's of that head, as its identity says."""
    architecture = Architecture.from_hf(model)
    identity = Identity(
        role="actor" if head is None else "critic",
        architecture=architecture if head is None else architecture.untied(),
        value_head=head,
        iteration=1,
        dtype="float32",
        optimizer="plain",
        parallel={},
        device="cpu",
    )
    folder = root / "iter_0000001"
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(json.dumps(identity.to_dict()))
    (folder / "weights.distcp").write_text("weights")
    write_checkpoint_manifest(folder, iteration=1)
    (root / "latest").write_text("iter_0000001\n")
    return root


SCALAR = ValueHeadIdentity(width=1, loss_type="mse", reward_range=None)
REFERENCE = {"kl_coef": 0.1}


@pytest.mark.parametrize(
    ("field", "head", "more"),
    [("load", None, {}), ("ref_load", None, REFERENCE), ("critic_load", None, {}), ("critic_load", SCALAR, {})],
)
def test_checkpoint_of_another_model_is_refused_by_flag_and_field(
    field: str, head: ValueHeadIdentity | None, more: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = write_model(tmp_path / "ours"), write_model(tmp_path / "theirs", hidden_size=16)
    settings = {"hf_checkpoint": str(ours), "value_loss_type": "mse", **more}
    right, wrong = (write_checkpoint(tmp_path / f"of_{model.name}", model, head) for model in (ours, theirs))
    settle(Args.build(**settings, **{field: str(right)}), None)
    refusal = rf"^--{field.replace('_', '-')}: .*iter_0000001: architecture.hidden_size is 16 in the checkpoint, 8 in"
    with pytest.raises(ValueError, match=refusal):
        settle(Args.build(**settings, **{field: str(wrong)}), None)


@pytest.mark.parametrize(
    ("field", "head", "refusal"),
    [
        ("load", SCALAR, "role is 'critic' in the checkpoint, 'actor' in this run"),
        ("critic_load", SCALAR, "value_head.width is 1 in the checkpoint, 51 in this run"),
    ],
)
def test_checkpoint_of_another_role_or_head_is_refused_by_field(
    field: str, head: ValueHeadIdentity, refusal: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    saved = write_checkpoint(tmp_path / "saved", model, head)
    args = Args.build(
        hf_checkpoint=str(model), value_loss_type="classification", value_num_bins=51, **{field: str(saved)}
    )
    with pytest.raises(ValueError, match=refusal):
        settle(args, None)


@pytest.mark.parametrize("field", ["load", "critic_load", "ref_load"])
def test_folder_without_a_checkpoint_is_refused_by_flag(field: str, tmp_path: Path) -> None:
    model, empty = write_model(tmp_path / "model"), tmp_path / "empty"
    empty.mkdir()
    args = Args.build(hf_checkpoint=str(model), **REFERENCE, **{field: str(empty)})
    with pytest.raises(ValueError, match=rf"^--{field.replace('_', '-')}: {empty}: holds no checkpoint"):
        settle(args, None)


@pytest.mark.parametrize("field", ["load", "critic_load", None])
def test_critic_from_an_actor_or_a_model_is_said_to_have_a_new_head(
    field: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # faults.md row 48
    model = write_model(tmp_path / "model")
    root = model if field is None else write_checkpoint(tmp_path / "actor", model)
    origin = {} if field is None else {field: str(root)}
    with caplog.at_level(logging.INFO):
        settle(Args.build(use_critic=True, hf_checkpoint=str(model), **origin), None)
    (line,) = [line for line in caplog.messages if "its head is new" in line]
    assert str(root) in line


@pytest.mark.parametrize("field", ["load", "critic_load", "ref_load"])
def test_checkpoint_whose_files_are_gone_or_cut_off_is_refused_by_flag_and_file(field: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    root = write_checkpoint(tmp_path / "actor", model)
    args = Args.build(hf_checkpoint=str(model), **REFERENCE, **{field: str(root)})
    settle(args, None)
    shard = root / "iter_0000001" / "weights.distcp"
    shard.write_text("weigh")
    with pytest.raises(ValueError, match=rf"^--{field.replace('_', '-')}: {shard}: size mismatch"):
        settle(args, None)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"^--{field.replace('_', '-')}: {shard}: listed in .* but missing"):
        settle(args, None)


def test_checkpoint_inside_a_contracted_critic_is_refused_with_the_folder_to_give(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    root = write_checkpoint(tmp_path / "critic", model, SCALAR)
    args = Args.build(hf_checkpoint=str(model), critic_load=str(root / "iter_0000001"))
    settle(args, None)
    (root / VALUE_PRETRAIN_CONTRACT_NAME).write_text("{}")
    with pytest.raises(ValueError, match=rf"^--critic-load .*/iter_0000001: .* lies in {root}: give that folder"):
        settle(args, None)


@pytest.mark.parametrize("origin", ["critic_load", None])
def test_setting_without_effect_on_the_head_that_the_critic_comes_with_is_refused(
    origin: str | None, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    root = write_checkpoint(tmp_path / "critic", model, SCALAR)
    args = Args.build(use_critic=True, hf_checkpoint=str(model), **({} if origin is None else {origin: str(root)}))
    settle(args, None)
    with pytest.raises(ValueError, match=r"^--hl-gauss-sigma-ratio has no effect with --value-loss-type mse"):
        settle(args.replace(source="flag", hl_gauss_sigma_ratio=0.5), None)


def test_resume_that_leaves_out_what_the_run_began_with_records_it_and_loads_the_save(tmp_path: Path) -> None:
    model, run = write_model(tmp_path / "model"), tmp_path / "run"
    seed, prompts = write_checkpoint(tmp_path / "seed", model), tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    head = {"value_loss_type": "classification", "value_num_bins": 21}
    places = {"run_dir": str(run), "save": str(run / "actor"), "prompt_data": str(prompts)}
    common = {"hf_checkpoint": str(model), "advantage_estimator": "grpo", **places}
    began = Args.build(load=str(seed), **head, **common)
    saved = write_checkpoint(run / "actor", model)
    state = {
        "settings": json.loads(json.dumps(began.model_dump(mode="json"))),
        "iteration": 1,
        "prompts": {"sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(), "leftover": []},
        "actor_checkpoint": describe_checkpoint(run, saved / "iter_0000001"),
    }
    resumed = settle(Args.build(resume=True, **common), state)
    assert {name: getattr(resumed, name) for name in head} == head
    assert (resumed.load, resumed.source_of("load")) == (str(seed), "resume")
    assert newest_checkpoints(resumed, state).load == str(saved / "iter_0000001")
    taken_back = Args.build(resume=True, **common).replace(source="flag", load=None)
    assert settle(taken_back, state).load == str(seed)
    shutil.rmtree(seed)
    assert settle(Args.build(resume=True, **common), state) == resumed, "what it began with is read again"
    with pytest.raises(ValueError, match=r"--resume: load is '.*/model', the last save was made with '.*/seed'"):
        settle(Args.build(resume=True, load=str(model), **common), state)
