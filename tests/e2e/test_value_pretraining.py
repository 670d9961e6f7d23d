"""train_value.py: train, be killed at every moment and go on, the canary, the gate, the chain, and what is refused."""

import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.contracts.artifact import (
    check_checkpoint_digests,
    check_checkpoint_listing,
    checkpoint_files,
    read_checkpoint_manifest,
)
from miles.contracts.canonical import readable_json_bytes, sealed, sha256_file
from miles.contracts.chain import first_broken, iteration_folder, verify_chain, write_link_record

CONTRACT = "value_pretrain_contract.json"
TORN = ".iter_0000010.tmp"
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


def eval_flags(critic: Path, report: Path) -> tuple[Any, ...]:
    return (
        *("--value-pretrain-eval-only", "--value-pretrain-eval-num-batches", 2),
        *("--critic-load", critic, "--value-pretrain-eval-report", report),
    )


def test_training_whole_run_publishes_contract_and_passes_gate(
    trained: Path, run: Callable[..., Any], value_flags: list[str], assert_no_process_left: Callable[..., None]
) -> None:
    critic = trained / "critic"
    done = run("train_value.py", *value_flags, *SAVING, "--critic-save", critic, "--run-dir", trained / "run")
    assert done.code == 0, done.err
    contract = json.loads((critic / CONTRACT).read_text())
    assert contract["completed_steps"] == 20
    assert contract["batch_plan"] == {"seed": 1234, "global_batch_size": 16, "drop_incomplete_batch": True}
    assert_no_process_left(done.mark)

    report = trained / "report.json"
    evaluate = eval_flags(critic, report)
    evaluated = run("train_value.py", *value_flags, *evaluate, "--run-dir", trained / "eval_run")
    assert evaluated.code == 0, evaluated.err
    figures = json.loads(report.read_text())
    assert figures["passed"] is True
    assert figures["execution"]["optimizer_initialized"] is False
    assert figures["checkpoint"]["loaded_iteration"] == 20
    # The label is written into the first token, so a critic that learned at all explains most of it.
    assert figures["aggregate"]["token_weighted"]["metrics"]["explained_variance"] > 0.5

    checked = run("miles/cli.py", "verify", report)
    assert checked.code == 0, checked.out


def test_explained_variance_equals_a_plain_reimplementation_on_the_same_data(
    trained: Path, tiny_hf_model: Path
) -> None:
    path = trained / "report.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("independent_value_evaluation.py")), path, tiny_hf_model],
        capture_output=True,
        text=True,
        check=True,
    )
    independent, report = json.loads(done.stdout), json.loads(path.read_text())
    for name, theirs in independent.items():
        ours = {**report["aggregate"][name]["metrics"], **report["bias"][name]}
        # The program's forward pass is float32, the other float64.
        for figure, value in theirs["aggregate"].items():
            assert ours[figure] == pytest.approx(value, abs=1e-6), (name, figure)
        for batch, expected in zip(report["batches"], theirs["batches"], strict=True):
            ev = batch[name]["metrics"]["explained_variance"]
            assert ev == pytest.approx(expected["explained_variance"], abs=1e-6), (name, batch["batch"])


def assert_whole(checkpoint: Path) -> None:
    """Every file of a checkpoint is what its manifest says."""
    manifest = check_checkpoint_listing(checkpoint)
    digests = [sha256_file(path) for path in checkpoint_files(checkpoint, manifest)]
    check_checkpoint_digests(checkpoint, manifest, digests)


@dataclass(frozen=True)
class Kill:
    """When a run is killed (the file operation it is halted before, see pause/), and what it leaves behind."""

    when: str
    halt: str
    contract: int | None
    saved: tuple[int, ...]
    torn: str | None = None
    verified: bool = True


KILLS = (
    Kill("between the first save and its contract", "open 1 */value_pretrain_links/.*", None, (5,)),
    Kill(
        "during a save, one shard of two written",
        f"open 1 */{TORN}/__1_0.distcp",
        contract=5,
        saved=(5,),
        torn=f"{TORN}/__0_0.distcp",
    ),
    Kill("between save and contract", "open 1 */value_pretrain_links/.*", 5, (5, 10)),
    Kill("during contract publication", f"os.rename 1 */{CONTRACT}", 5, (5, 10), verified=False),
)


def test_training_killed_at_every_moment_ends_in_the_weights_and_contract_of_the_uninterrupted_run(
    trained: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    value_flags: list[str],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    """One training, killed and started again five times; each time the rest of it starts from what the kill left."""
    reference, critic = trained / "critic", tmp_path / "critic"
    contract, metrics = critic / CONTRACT, tmp_path / "run" / "metrics.jsonl"
    flags = [*value_flags, *SAVING, "--critic-save", critic, "--run-dir", tmp_path / "run"]

    def resume() -> list[Any]:
        return [*flags, "--critic-load", critic] if contract.exists() else flags

    for kill in KILLS:
        program = start("train_value.py", *resume(), pause=kill.halt)
        wait_for((tmp_path / "paused").exists, program)
        if kill.torn is not None:
            wait_for((critic / kill.torn).exists, program)
        program.kill_everything()
        steps = json.loads(contract.read_text())["completed_steps"] if contract.exists() else None
        assert steps == kill.contract, kill.when
        saved = sorted(int(folder.name.removeprefix("iter_")) for folder in critic.glob("iter_*"))
        assert tuple(saved) == kill.saved, kill.when
        for step in saved:
            assert_whole(iteration_folder(critic, step))
        assert [folder.name for folder in critic.glob(".iter_*")] == ([] if kill.torn is None else [TORN])
        if kill.torn is not None:
            with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
                read_checkpoint_manifest(critic / TORN)
        if steps is not None:
            broken = first_broken(verify_chain(critic))
            assert (broken is None) == kill.verified, (kill.when, broken)
            assert kill.verified or "publication was interrupted" in str(broken)

    # In a step, the driver alone: its ranks end by themselves.
    killed = start("train_value.py", *resume())
    wait_for(lambda: json.loads(contract.read_text())["completed_steps"] == 10 and lines_of(metrics) >= 12, killed)
    killed.kill()
    killed.finish(60)
    assert_no_process_left(killed.mark)
    assert json.loads(contract.read_text())["completed_steps"] < 20

    resumed = run("train_value.py", *resume())
    assert resumed.code == 0, resumed.err
    ours, theirs = digests(critic / "iter_0000020"), digests(reference / "iter_0000020")
    assert ours == theirs
    assert sum("exp_avg" in name for name in ours) >= 2, "the optimizer's state is missing from the comparison"
    assert contract.read_bytes() == (reference / CONTRACT).read_bytes()
    assert first_broken(verify_chain(critic)) is None
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 21))


def lines_of(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def test_evaluation_killed_before_its_report_is_published_leaves_none_and_repeats_to_the_same_bytes(
    trained: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    value_flags: list[str],
    wait_for: Callable[..., None],
) -> None:
    report = tmp_path / "report.json"
    flags = [*value_flags, *eval_flags(trained / "critic", report), "--run-dir", tmp_path / "run"]
    program = start("train_value.py", *flags, pause=f"os.link 1 {report}")
    wait_for((tmp_path / "paused").exists, program)
    program.kill_everything()
    assert not report.exists()

    done = run("train_value.py", *flags)
    assert done.code == 0, done.err
    assert report.read_bytes() == (trained / "report.json").read_bytes()

    again = run("train_value.py", *flags)
    assert again.code != 0
    assert "never replaced" in again.last_line


@pytest.fixture(scope="module")
def consumed(trained: Path) -> Path:
    return trained / "online"


def test_online_run_takes_the_critics_weights_alone_and_the_whole_chain_verifies(
    trained: Path,
    consumed: Path,
    run: Callable[..., Any],
    online_flags: list[str],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """faults.md row 43: neither Adam's moments nor the place in the schedule come along."""
    done = run(
        "train.py",
        *online_flags,
        *("--num-rollout", 1, "--critic-load", trained / "critic", "--run-dir", consumed),
        *("--critic-value-eval-report", trained / "report.json", "--critic-lr-warmup-iters", 4),
    )
    assert done.code == 0, done.err
    assert [line["value/lr"] for line in read_metrics(consumed) if "value/lr" in line] == pytest.approx([1e-3 / 4])
    checked = run("miles/cli.py", "verify", consumed)
    assert checked.code == 0, checked.out
    names = [line[8:25].strip() for line in checked.out.splitlines() if line.startswith("ok")]
    assert names == [
        "manifest", "train data", "held-out data", "contract", "checkpoint", "evaluation report", "run",
        "run settings", "run checkpoint", "run checkpoint",
    ]  # fmt: skip


def files_of_chain(trained: Path, consumed: Path, value_manifest: Path) -> dict[Path, str]:
    """Every file that the chain of the online run is made of, and the link it belongs to."""
    critic, data = trained / "critic", value_manifest.parent
    owners = {
        value_manifest: "manifest",
        data / "train.jsonl": "train data",
        data / "heldout.jsonl": "held-out data",
        critic / CONTRACT: "contract",
        trained / "report.json": "evaluation report",
        consumed / "run.json": "run",
        consumed / "config.yaml": "run settings",
    }
    owners |= dict.fromkeys((critic / "value_pretrain_links").iterdir(), "contract")
    owners |= dict.fromkeys((critic / "iter_0000020").iterdir(), "checkpoint")
    owners |= {file: "run checkpoint" for file in consumed.rglob("iter_*/*") if file.is_file()}
    return owners


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "first byte flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle byte flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 32]) + data[len(data) // 2 + 1 :]
    ),
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "one byte lost at the end": lambda data: data[:-1],
    "half lost": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "one byte added": lambda data: data + b"\n",
    "deleted": lambda data: None,
}


def test_every_file_of_a_real_chain_tampered_with_is_caught_at_its_link(
    trained: Path, consumed: Path, value_manifest: Path
) -> None:
    owners = files_of_chain(trained, consumed, value_manifest)
    assert len(owners) >= 25
    originals = {file: file.read_bytes() for file in owners}

    def outcome(file: Path, data: bytes | None) -> str | None:
        """Name of the first broken link while `file` holds `data`."""
        mode = file.stat().st_mode
        try:
            file.unlink() if data is None else file.write_bytes(data)
            broken = first_broken(verify_chain(consumed))
            return None if broken is None else broken.name
        finally:
            file.write_bytes(originals[file])
            file.chmod(mode)

    missed = {}
    for file, owner in owners.items():
        for damage, apply in DAMAGES.items():
            if (found := outcome(file, apply(originals[file]))) != owner:
                missed[file.name, damage] = found
        # Another file of the chain in its place, which is no noise but a whole artifact.
        others = [other for other in owners if originals[other] != originals[file]]
        other = others[(list(owners).index(file) * 7) % len(others)]
        if (found := outcome(file, originals[other])) != owner:
            missed[file.name, f"replaced by {other.name}"] = found
    assert missed == {}
    assert first_broken(verify_chain(consumed)) is None


def test_two_files_of_a_real_chain_swapped_are_caught(trained: Path, consumed: Path, value_manifest: Path) -> None:
    owners = list(files_of_chain(trained, consumed, value_manifest))
    for first, second in itertools.combinations(owners, 2):
        one, two = first.read_bytes(), second.read_bytes()
        if one == two or first.parent != second.parent:
            continue
        try:
            first.write_bytes(two)
            second.write_bytes(one)
            assert first_broken(verify_chain(consumed)) is not None, (first, second)
        finally:
            first.write_bytes(one)
            second.write_bytes(two)


def test_older_contract_and_older_checkpoint_put_back_into_a_real_chain_are_caught(
    trained: Path, consumed: Path
) -> None:
    critic = trained / "critic"
    contract, checkpoint = critic / CONTRACT, critic / "iter_0000020"
    data = contract.read_bytes()
    older = data.replace(b'"completed_steps":20', b'"completed_steps":15')
    assert older != data
    (record,) = (critic / "value_pretrain_links").iterdir()
    try:
        contract.write_bytes(older)
        for path in (consumed, trained / "report.json", critic):
            broken = first_broken(verify_chain(path))
            assert broken is not None
            assert broken.name == "contract"
        # Even with a link record of its own, as it once had, it is not what report and run were made with.
        write_link_record(
            critic,
            contract=older,
            completed_steps=15,
            manifest_path=Path(json.loads(record.read_text())["manifest_path"]),
        )
        for path in (consumed, trained / "report.json", critic):
            assert first_broken(verify_chain(path)) is not None
    finally:
        contract.write_bytes(data)
        for other in (critic / "value_pretrain_links").iterdir():
            if other != record:
                other.unlink()
    aside = checkpoint.with_name("aside")
    checkpoint.rename(aside)
    try:
        shutil.copytree(critic / "iter_0000015", checkpoint)
        broken = first_broken(verify_chain(consumed))
        assert broken is not None
        assert broken.name == "checkpoint"
    finally:
        shutil.rmtree(checkpoint)
        aside.rename(checkpoint)
    assert first_broken(verify_chain(consumed)) is None


def test_report_of_a_real_chain_edited_figure_by_figure_and_resealed_is_caught(trained: Path, consumed: Path) -> None:
    path = trained / "report.json"
    original = path.read_bytes()
    figures = [
        ("aggregate", "token_weighted", "metrics", "explained_variance"),
        ("aggregate", "trajectory_weighted", "sufficient_stats", "residual_sq_sum"),
        ("bias", "token_weighted", "mean_residual"),
        ("gate", "token_weighted", "positive_batches"),
        ("manifest", "dataset_sha256"),
        ("checkpoint", "contract_sha256"),
        ("checkpoint", "checkpoint_manifest_sha256"),
        ("checkpoint", "contract_completed_steps"),
        ("passed",),
    ]
    for *parents, name in figures:
        report = json.loads(original)
        holder = report
        for parent in parents:
            holder = holder[parent]
        value = holder[name]
        holder[name] = (
            not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "0" * 64
        )
        path.write_bytes(readable_json_bytes(sealed(report)))
        try:
            # By its own contradictions, by the artifacts it names, and by the digest the run pinned.
            assert first_broken(verify_chain(path)) is not None, (parents, name)
            broken = first_broken(verify_chain(consumed))
            assert broken is not None
            assert broken.name == "evaluation report", (parents, name)
        finally:
            path.write_bytes(original)


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
