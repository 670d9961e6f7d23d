"""train_value.py: train, resume after a kill, the canary, the gate, and the refusals before a device is reserved."""

import hashlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SAVING = ("--save-interval", 5)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a checkpoint: weights and Adam's moments."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


def test_training_whole_run_publishes_contract_and_passes_gate(
    trained: Path, run: Callable[..., Any], value_flags: list[str], assert_no_process_left: Callable[..., None]
) -> None:
    critic = trained / "critic"
    done = run("train_value.py", *value_flags, *SAVING, "--critic-save", critic, "--run-dir", trained / "run")
    assert done.code == 0, done.err
    contract = json.loads((critic / "value_pretrain_contract.json").read_text())
    assert contract["completed_steps"] == 20
    assert contract["batch_plan"] == {"seed": 1234, "global_batch_size": 16, "drop_incomplete_batch": True}
    assert_no_process_left(done.mark)

    report = trained / "report.json"
    evaluate = ("--value-pretrain-eval-only", "--value-pretrain-eval-num-batches", 2, "--critic-load", critic)
    evaluated = run(
        "train_value.py",
        *value_flags,
        *evaluate,
        *("--value-pretrain-eval-report", report, "--run-dir", trained / "eval_run"),
    )
    assert evaluated.code == 0, evaluated.err
    figures = json.loads(report.read_text())
    assert figures["passed"] is True
    assert figures["execution"]["optimizer_initialized"] is False
    assert figures["checkpoint"]["loaded_iteration"] == 20
    # The label is written into the first token, so a critic that learned at all explains most of it.
    assert figures["aggregate"]["token_weighted"]["metrics"]["explained_variance"] > 0.5

    checked = run("miles/cli.py", "verify", report)
    assert checked.code == 0, checked.out


def test_training_killed_between_saves_resumes_to_the_same_bytes(
    trained: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    value_flags: list[str],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    reference = trained / "critic"
    critic, contract = tmp_path / "critic", tmp_path / "critic" / "value_pretrain_contract.json"
    flags = [*value_flags, *SAVING, "--critic-save", critic, "--run-dir", tmp_path / "run"]
    killed = start("train_value.py", *flags)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: contract.exists() and metrics.read_text().count("\n") >= 7, killed)
    killed.kill()
    killed.finish(60)
    assert_no_process_left(killed.mark)
    assert json.loads(contract.read_text())["completed_steps"] < 20

    resumed = run("train_value.py", *flags, "--critic-load", critic)
    assert resumed.code == 0, resumed.err
    ours, theirs = digests(critic / "iter_0000020"), digests(reference / "iter_0000020")
    assert ours == theirs
    assert sum("exp_avg" in name for name in ours) >= 2, "the optimizer's state is missing from the comparison"
    assert contract.read_bytes() == (reference / "value_pretrain_contract.json").read_bytes()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 21))


def test_canary_saves_one_step_without_contract_and_refuses_a_contracted_folder(
    trained: Path, tmp_path: Path, run: Callable[..., Any], value_flags: list[str]
) -> None:
    canary = [*value_flags, "--value-pretrain-canary-one-step", "--run-dir", tmp_path / "run"]
    done = run("train_value.py", *canary, "--critic-save", tmp_path / "critic")
    assert done.code == 0, done.err
    assert (tmp_path / "critic" / "iter_0000001").is_dir()
    assert not (tmp_path / "critic" / "value_pretrain_contract.json").exists()

    refused = run("train_value.py", *canary, "--critic-save", trained / "critic")
    assert refused.code != 0
    assert "already contains a production contract" in refused.last_line


def test_interrupt_ends_with_one_line_and_no_process(
    tmp_path: Path,
    start: Callable[..., Any],
    value_flags: list[str],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    flags = [*value_flags, "--critic-save", tmp_path / "critic", "--run-dir", tmp_path / "run"]
    program = start("train_value.py", *flags, "--value-pretrain-epochs", 500)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, program)
    program.kill(signal.SIGINT)
    ended = program.finish(60)
    assert ended.code == 130
    assert "interrupted" in ended.last_line
    assert_no_process_left(ended.mark)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (["--value-pretrain-manifest", "nowhere.json"], "nowhere.json"),
        (["--value-pretrain-manifest-sha256", "0" * 64], "value-pretraining manifest SHA-256 mismatch"),
        (["--train-backend", "fsdp"], "currently requires --train-backend megatron"),
        (["--critic-num-gpus-per-node", "3"], "divisible"),
        (["--global-batch-size", "17", "--tensor-model-parallel-size", "1"], "divisible"),
        (["--micro-batch-size", "3"], "divisible"),
        (["--global-batch-size", "65"], "65"),
        (["--learning-rate", "1"], "unknown flag --learning-rate"),
        (["--value-pretrain-eval-only"], "--critic-load"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_mistake_before_a_device_is_reserved_refused_in_one_line(
    tmp_path: Path, run: Callable[..., Any], value_flags: list[str], change: list[str], fragment: str
) -> None:
    began = time.monotonic()
    done = run("train_value.py", *value_flags, "--critic-save", tmp_path / "critic", *change, timeout_s=60)
    assert done.code != 0
    assert fragment in done.err
    assert "Traceback" not in done.err
    assert "Ray" not in done.err, "refused only after Ray was started"
    assert not (tmp_path / "critic").exists()
    # Two seconds is the promise on an idle machine; this only catches a start of Ray or torch.
    assert time.monotonic() - began < 20


def test_changed_row_refused_with_file(
    tmp_path: Path, run: Callable[..., Any], value_flags: list[str], value_manifest: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for file in value_manifest.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = folder / "train.jsonl"
    data.write_bytes(data.read_bytes().replace(b"row-3", b"row-4", 1))
    done = run(
        "train_value.py",
        *value_flags,
        *("--value-pretrain-manifest", folder / "manifest.json", "--critic-save", tmp_path / "critic"),
    )
    assert done.code != 0
    assert "dataset SHA-256 mismatch for" in done.last_line
    assert str(data) in done.last_line


def test_resume_with_another_seed_refused_by_field(
    trained: Path, tmp_path: Path, run: Callable[..., Any], value_flags: list[str]
) -> None:
    done = run(
        "train_value.py",
        *value_flags,
        *("--critic-save", tmp_path / "critic", "--critic-load", trained / "critic", "--seed", 7),
    )
    assert done.code != 0
    assert "seed" in done.last_line
