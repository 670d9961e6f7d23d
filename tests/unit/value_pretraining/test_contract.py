"""The checkpoint contract of formulas A4: bytes, rules, publication, and what resume refuses."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import canonical_json_bytes
from miles.contracts.chain import iteration_folder
from miles.value_pretraining import (
    VALUE_PRETRAIN_CONTRACT_NAME,
    ResumePoint,
    ValueDatasetSpec,
    ValueObjective,
    ValuePretrainManifest,
    check_critic_listing,
    check_loaded_iterations,
    check_online_contract,
    check_published_together,
    contract_sha256,
    load_and_check_resume,
    load_value_pretrain_contract,
    refuse_canary_over_contract,
    write_value_pretrain_contract,
)

KNOWN_DIGEST = "8e23a5cebdbfa68a903b1f1c736bf8bd55a80c766e3ab151ea450d07e8f8f788"


@pytest.fixture
def manifest(tmp_path):
    return ValuePretrainManifest(
        path=tmp_path / "manifest.json",
        sha256="a" * 64,
        train=ValueDatasetSpec(tmp_path / "train.jsonl", "b" * 64, 12),
        heldout=None,
        objective=ValueObjective(),
    )


def write(folder, manifest, **changes):
    fields = {"completed_steps": 6, "model_identity": "toy", "seed": 82621, "global_batch_size": 2, **changes}
    return write_value_pretrain_contract(folder, manifest=manifest, **fields)


def test_contract_known_answer(tmp_path, manifest):
    path, digest = write(tmp_path / "critic", manifest)
    assert digest == KNOWN_DIGEST
    assert path == tmp_path / "critic" / "value_pretrain_contract.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == KNOWN_DIGEST
    assert contract_sha256(path.parent) == KNOWN_DIGEST
    assert load_value_pretrain_contract(path.parent, expected_sha256=KNOWN_DIGEST) == {
        "schema": "miles.value-pretrain-checkpoint.v1",
        "source_manifest_sha256": "a" * 64,
        "train_dataset_sha256": "b" * 64,
        "objective": ValueObjective().to_dict(),
        "batch_plan": {"seed": 82621, "global_batch_size": 2, "drop_incomplete_batch": True},
        "completed_steps": 6,
        "model_identity": "toy",
    }


def test_contract_is_replaced_and_leaves_only_its_own_link_record(tmp_path, manifest):
    write(tmp_path, manifest, completed_steps=3)
    (tmp_path / ".value_pretrain_contract.json.tmp").write_bytes(b"left by a killed run")
    _, digest = write(tmp_path, manifest)
    assert load_value_pretrain_contract(tmp_path)["completed_steps"] == 6
    assert sorted(os.listdir(tmp_path)) == ["value_pretrain_contract.json", "value_pretrain_links"]
    assert os.listdir(tmp_path / "value_pretrain_links") == [f"{digest}.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completed_steps": 0}, "completed_steps must be an integer of at least 1"),
        ({"completed_steps": True}, "completed_steps must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1"),
        ({"model_identity": ""}, "model_identity must be a non-empty string"),
        ({"model_identity": None}, "model_identity must be a non-empty string"),
    ],
)
def test_contract_bad_field_is_not_written(tmp_path, manifest, changes, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "critic", manifest, **changes)
    assert not (tmp_path / "critic").exists()


def test_contract_missing_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="contract does not exist"):
        load_value_pretrain_contract(tmp_path)


def test_contract_pin_is_checked_before_the_json(tmp_path):
    (tmp_path / VALUE_PRETRAIN_CONTRACT_NAME).write_bytes(b"{")
    with pytest.raises(ValueError, match="value-pretraining checkpoint contract SHA-256 mismatch: expected 0000"):
        load_value_pretrain_contract(tmp_path, expected_sha256="0" * 64)
    with pytest.raises(ValueError, match="invalid value-pretraining checkpoint contract JSON"):
        load_value_pretrain_contract(tmp_path)


PLAN = {"seed": 1, "global_batch_size": 2, "drop_incomplete_batch": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, r"contract\.schema must be"),
        ({"source_manifest_sha256": "A" * 64}, r"contract\.source_manifest_sha256 must be a SHA-256"),
        ({"train_dataset_sha256": None}, r"contract\.train_dataset_sha256 must be a SHA-256"),
        ({"objective": {"num_bins": 1}}, r"contract\.objective\.num_bins must be"),
        ({"batch_plan": None}, r"contract\.batch_plan must be an object"),
        ({"batch_plan": {**PLAN, "seed": True}}, r"contract\.batch_plan\.seed must be an integer"),
        ({"batch_plan": {**PLAN, "global_batch_size": 0}}, r"contract\.batch_plan\.global_batch_size must be"),
        ({"batch_plan": {**PLAN, "drop_incomplete_batch": 1}}, "drop_incomplete_batch must be true"),
        ({"batch_plan": {**PLAN, "drop_incomplete_batch": False}}, "drop_incomplete_batch must be true"),
        ({"batch_plan": {**PLAN, "shuffle": True}}, "contract has unknown keys 'shuffle'"),
        ({"completed_steps": 0}, r"contract\.completed_steps must be"),
        ({"completed_steps": 6.0}, r"contract\.completed_steps must be"),
        ({"model_identity": ""}, r"contract\.model_identity must be"),
    ],
)
def test_contract_loaded_with_a_bad_field_is_refused(tmp_path, manifest, changes, message):
    path, _ = write(tmp_path, manifest)
    path.write_bytes(canonical_json_bytes({**json.loads(path.read_bytes()), **changes}))
    with pytest.raises(ValueError, match=message):
        load_value_pretrain_contract(tmp_path)


def resume(folder, manifest, **changes):
    return load_and_check_resume(folder, manifest=manifest, **{"seed": 82621, "global_batch_size": 2, **changes})


def test_resume_matching_contract_gives_steps_and_digest(tmp_path, manifest):
    write(tmp_path, manifest)
    point = resume(tmp_path, manifest)
    assert point is not None
    assert (point.completed_steps, point.sha256) == (6, KNOWN_DIGEST)


def test_resume_without_contract_is_a_fresh_critic(tmp_path, manifest):
    assert resume(None, manifest) is None
    assert resume(tmp_path, manifest) is None


@pytest.mark.parametrize("folder", [None, "empty"])
def test_resume_evaluation_without_contract_is_refused(tmp_path, manifest, folder):
    with pytest.raises(ValueError, match="critic evaluation requires a contracted value checkpoint"):
        resume(folder and tmp_path, manifest, eval_only=True)


@pytest.mark.parametrize(
    ("theirs", "args", "message"),
    [
        ({"sha256": "c" * 64}, {}, "different value-pretraining manifest: source_manifest_sha256"),
        (
            {"train": ValueDatasetSpec(Path("x"), "c" * 64, 12)},
            {},
            "different value-pretraining dataset: train_dataset_sha256",
        ),
        ({"objective": ValueObjective(num_bins=11)}, {}, "different value objective: objective"),
        ({}, {"seed": 1}, "different deterministic batch plan: batch_plan"),
        ({}, {"global_batch_size": 4}, "different deterministic batch plan: batch_plan"),
    ],
)
def test_resume_contract_that_differs_is_refused_naming_the_field(tmp_path, manifest, theirs, args, message):
    write(tmp_path, manifest)
    other = ValuePretrainManifest(**{**manifest.__dict__, **theirs})
    with pytest.raises(ValueError, match=message):
        resume(tmp_path, other, **args)


def test_resume_evaluation_leaves_the_batch_plan_free_and_applies_the_pin(tmp_path, manifest, caplog):
    write(tmp_path, manifest)
    assert resume(tmp_path, manifest, seed=5, global_batch_size=64, eval_only=True, expected_sha256=KNOWN_DIGEST)
    with pytest.raises(ValueError, match="contract SHA-256 mismatch"):
        resume(tmp_path, manifest, eval_only=True, expected_sha256="0" * 64)
    # Training goes on from the contract that is there: it will publish a newer one anyway.
    assert resume(tmp_path, manifest, expected_sha256="0" * 64)
    assert f"not the pinned {'0' * 64}: training goes on" in caplog.text
    caplog.clear()
    assert resume(tmp_path, manifest, expected_sha256=KNOWN_DIGEST)
    assert not caplog.text


@pytest.mark.parametrize("make", [lambda p: p.write_text("{}"), lambda p: p.symlink_to(p.parent / "nowhere")])
def test_canary_over_a_production_contract_is_refused(tmp_path, make):
    refuse_canary_over_contract(tmp_path)
    make(tmp_path / VALUE_PRETRAIN_CONTRACT_NAME)
    with pytest.raises(ValueError, match="canary output already contains a production contract"):
        refuse_canary_over_contract(tmp_path)


def test_loaded_iterations_must_agree_with_each_other_and_with_the_contract(tmp_path, manifest):
    write(tmp_path, manifest)
    point = resume(tmp_path, manifest)
    assert check_loaded_iterations([6, None, 6], resume=point) == 6
    assert check_loaded_iterations([0, 0], resume=None) == 0
    for loaded in ([], [None], [6, 5]):
        with pytest.raises(RuntimeError, match="critic ranks disagree about the loaded checkpoint iteration"):
            check_loaded_iterations(loaded, resume=point)
    with pytest.raises(ValueError, match="iteration 4 disagrees with contract step 6"):
        check_loaded_iterations([4, 4], resume=point)
    with pytest.raises(ValueError, match="iteration 4 without a value-pretraining contract is ambiguous"):
        check_loaded_iterations([4, 4], resume=None)


def test_online_contract_restores_the_objective_or_names_the_field(tmp_path, manifest):
    write(tmp_path, manifest)
    objective, point = check_online_contract(tmp_path, expected_sha256=KNOWN_DIGEST, expected_model_identity="toy")
    assert objective == ValueObjective()
    assert point.sha256 == KNOWN_DIGEST
    check_online_contract(tmp_path, stated={"value_num_bins": 51, "value_reward_range": (0.0, 1.0)})
    with pytest.raises(ValueError, match="contract SHA-256 mismatch"):
        check_online_contract(tmp_path, expected_sha256="0" * 64)
    with pytest.raises(ValueError, match="does not match the run: model_identity is 'toy'"):
        check_online_contract(tmp_path, expected_model_identity="other")
    with pytest.raises(ValueError, match="does not match the run: --value-num-bins is 11"):
        check_online_contract(tmp_path, stated={"value_num_bins": 11})


def test_checkpoint_truncated_refused_by_file_before_anything_loads_it(tmp_path):
    folder = iteration_folder(tmp_path, 3)
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"12345678")
    write_checkpoint_manifest(folder)
    resume = ResumePoint({"completed_steps": 3}, "0" * 64)
    check_critic_listing(tmp_path, resume)
    (folder / "weights.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"weights\.bin: size mismatch: expected 8 bytes, got 4"):
        check_critic_listing(tmp_path, resume)


def test_contract_or_checkpoint_that_was_not_published_with_the_other_refused(tmp_path, manifest, caplog):
    folder = iteration_folder(tmp_path, 6)
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"12345678")
    write_checkpoint_manifest(folder)
    write(tmp_path, manifest)
    point = check_online_contract(tmp_path)[1]
    check_published_together(tmp_path, point)
    (folder / "weights.bin").write_bytes(b"87654321")
    write_checkpoint_manifest(folder)
    with pytest.raises(ValueError, match=r"^--critic-load .*: iter_0000006/\S+ is not the contract's checkpoint's"):
        check_published_together(tmp_path, point)
    path = tmp_path / VALUE_PRETRAIN_CONTRACT_NAME
    path.write_text(path.read_text().replace('"hl_gauss"', '"two_hot"'))
    edited = check_online_contract(tmp_path)[1]
    with pytest.raises(ValueError, match=r"no link record .*: the contract is not one that was published here"):
        check_published_together(tmp_path, edited)
    assert not caplog.text
    shutil.rmtree(tmp_path / "value_pretrain_links")
    check_published_together(tmp_path, point)
    assert "has no value_pretrain_links: nothing ties it to its contract" in caplog.text
