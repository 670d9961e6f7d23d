"""Builders of small value-pretraining artifacts, shared by the unit tests of several rooms."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import sha256_file
from miles.contracts.chain import (
    describe_checkpoint,
    describe_value_pretraining,
    iteration_folder,
    write_run_record,
)
from miles.contracts.value_schema import ValueObjective, load_value_pretrain_manifest
from miles.data.value_rows import ConversionOptions, build_value_dataset
from miles.value_evaluation import (
    build_batch_report,
    build_eval_report,
    build_rank_report,
    select_mixed_label_batches,
    write_eval_report,
)
from miles.value_pretraining import ValuePretrainDataset, contract_sha256, write_value_pretrain_contract


def value_row(number: int, label: float = 0.0, **changes: Any) -> dict[str, Any]:
    row = {
        "sample_id": f"sample-{number}",
        "tokens": [10, 20, 30 + number, 40 + number],
        "response_length": 2,
        "returns": [label, label],
        "loss_mask": [1, 1],
    }
    return {**row, **changes}


def rollout_row(number: int, *, prompt: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    """A line as `Sample.to_dict` writes it."""
    row = {
        "index": number,
        "group_index": prompt,
        "rollout_id": 0,
        "prompt": f"problem {prompt}",
        "tokens": [1, 100 + prompt, 7, 8, 200 + number],
        "response_length": 3,
        "response": "text",
        "label": None,
        "reward": reward,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, 0.0, -0.2],
        "status": "completed",
        "weight_versions": ["0"],
        "metadata": {},
    }
    return {**row, **changes}


def to_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(name="value_row")
def value_row_fixture() -> Callable[..., dict[str, Any]]:
    return value_row


@pytest.fixture(name="rollout_row")
def rollout_row_fixture() -> Callable[..., dict[str, Any]]:
    return rollout_row


@pytest.fixture(name="to_jsonl")
def to_jsonl_fixture() -> Callable[..., bytes]:
    return to_jsonl


@pytest.fixture
def make_manifest(tmp_path: Path) -> Callable[..., Path]:
    """make_manifest(rows or bytes, heldout=None, objective=None, changes={}) -> path of manifest.json."""

    def make(train: Any, heldout: Any = None, objective: Any = None, changes: Any = ()) -> Path:
        manifest: dict[str, Any] = {
            "schema": "miles.value-pretrain.v1",
            "objective": {} if objective is None else objective,
        }
        for name, rows in (("train", train), ("heldout", heldout)):
            if rows is not None:
                data = rows if isinstance(rows, bytes) else to_jsonl(rows)
                (tmp_path / f"{name}.jsonl").write_bytes(data)
                manifest[name] = {
                    "path": f"{name}.jsonl",
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "num_samples": sum(bool(line.strip()) for line in data.split(b"\n")),
                }
        path = tmp_path / "manifest.json"
        path.write_text(json.dumps({**manifest, **dict(changes)}))
        return path

    return make


@pytest.fixture
def open_dataset(make_manifest: Callable[..., Path]) -> Callable[..., ValuePretrainDataset]:
    """open_dataset(rows or bytes, objective=None) -> the train split, opened."""

    def make(rows: Any, objective: Any = None) -> ValuePretrainDataset:
        manifest = load_value_pretrain_manifest(make_manifest(rows, objective=objective))
        return ValuePretrainDataset(manifest.train, manifest.objective)

    return make


@dataclass(frozen=True)
class ValueChain:
    root: Path
    data: Path
    critic: Path
    report: Path
    run: Path

    def files(self) -> list[Path]:
        """Every file the chain is made of: all there are, except the rollouts it began with."""
        return sorted(p for p in self.root.rglob("*") if p.is_file() and "rollouts" not in p.parts)


def save_checkpoint(folder: Path, *, iteration: int, role: str) -> Path:
    checkpoint = iteration_folder(folder, iteration)
    (checkpoint / "weights").mkdir(parents=True)
    for shard in range(2):
        content = random.Random(f"{role} {iteration} {shard}").randbytes(500)
        (checkpoint / "weights" / f"__{shard}_0.distcp").write_bytes(content)
    (checkpoint / "metadata.json").write_text("{}")
    write_checkpoint_manifest(checkpoint, iteration=iteration, role=role)
    return checkpoint


def build_chain(root: Path) -> ValueChain:
    """Make a chain with the functions the programs call; only the checkpoint's tensors are arbitrary bytes."""
    rollouts = root / "rollouts"
    rollouts.mkdir(parents=True)
    rows = [rollout_row(i, prompt=i // 2, reward=float(i % 2)) for i in range(40)]
    (rollouts / "rollout_000000.jsonl").write_bytes(to_jsonl(rows))
    data, critic, run = root / "data", root / "critic", root / "run"
    options = ConversionOptions(heldout_fraction=0.4, seed=3)
    built = build_value_dataset([rollouts], data, objective=ValueObjective(), options=options)
    manifest = load_value_pretrain_manifest(built["manifest_path"])
    for step in (2, 4):
        save_checkpoint(critic, iteration=step, role="critic")
        write_value_pretrain_contract(
            critic, manifest=manifest, completed_steps=step, model_identity="toy", seed=1, global_batch_size=4
        )
    assert manifest.heldout is not None
    dataset = ValuePretrainDataset(manifest.heldout, manifest.objective)
    batches = []
    for number, indices in enumerate(select_mixed_label_batches(dataset, global_batch_size=4, num_batches=3, seed=1)):
        samples = [dataset.get(i) for i in indices]
        reports = [
            build_rank_report(
                dp_rank=rank,
                sample_indices=list(indices[2 * rank : 2 * rank + 2]),
                values=[[0.25 + 0.5 * x for x in s.returns] for s in samples[2 * rank : 2 * rank + 2]],
                returns=[s.returns for s in samples[2 * rank : 2 * rank + 2]],
                loss_masks=[s.loss_mask for s in samples[2 * rank : 2 * rank + 2]],
            )
            for rank in range(2)
        ]
        batches.append(build_batch_report(number, dataset=dataset, indices=indices, rank_reports=reports, dp_size=2))
    report = build_eval_report(
        manifest=manifest,
        dataset=dataset,
        split="heldout",
        checkpoint=critic,
        contract={"completed_steps": 4},
        contract_sha256=contract_sha256(critic),
        loaded_iteration=4,
        dp_size=2,
        model_parallel_size=1,
        seed=1,
        global_batch_size=4,
        batches=batches,
        max_bias=0.1,
    )
    report_path = root / "eval_report.json"
    write_eval_report(report_path, report)
    run.mkdir()
    (run / "config.yaml").write_text("lr: 1.0e-6\n")
    saved = save_checkpoint(run / "checkpoints", iteration=3, role="actor")
    write_run_record(
        run,
        {
            "commit": "0" * 40,
            "value_pretraining": describe_value_pretraining(run, critic_load=critic, eval_report=report_path),
            "checkpoints": [describe_checkpoint(run, saved)],
            "starts": [{"config_sha256": "0" * 64}, {"config_sha256": sha256_file(run / "config.yaml")}],
        },
    )
    return ValueChain(root, data, critic, report_path, run)


@pytest.fixture
def value_chain(tmp_path: Path) -> ValueChain:
    """A whole chain, manifest to run, that verifies."""
    return build_chain(tmp_path / "chain")
