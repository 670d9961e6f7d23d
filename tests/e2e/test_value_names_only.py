"""A value-pretraining program that knows the names and flags of its public contract, and nothing else of the house.

It is written from that contract, not from train_value.py. It trains, goes on in another process, is judged in a third,
and ends with the very contract that train_value.py writes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio
import json
from collections import Counter
from itertools import islice
from pathlib import Path

from miles.ray.placement_group import create_value_pretraining_group
from miles.ray.rollout.train_data_conversion import split_train_data_by_dp
from miles.utils.arguments import parse_args
from miles.utils.audit_utils.process_identity import MainProcessIdentity
from miles.utils.logging_utils import configure_logger
from miles.utils.megatron_args_utils import compute_megatron_world_size_except_dp
from miles.utils.tracking_utils.tracking import finish_tracking, init_tracking
from miles.value_evaluation import (
    VALUE_EVAL_REPORT_SCHEMA,
    ValueEvalStats,
    combine_rank_stats,
    gate_metrics,
    scalar_active_label,
    select_mixed_label_batches,
)
from miles.value_pretraining import (
    VALUE_PRETRAIN_CONTRACT_NAME,
    VALUE_PRETRAIN_SCHEMA,
    ValuePretrainDataset,
    load_value_pretrain_contract,
    load_value_pretrain_manifest,
    value_pretrain_num_steps,
    write_value_pretrain_contract,
)

WEIGHTINGS = ("trajectory_weighted", "token_weighted")


def previous_contract(args, manifest):
    if args.critic_load is None or not (Path(args.critic_load) / VALUE_PRETRAIN_CONTRACT_NAME).is_file():
        return None
    contract = load_value_pretrain_contract(args.critic_load, args.critic_value_pretrain_contract_sha256)
    assert contract["source_manifest_sha256"] == manifest.sha256
    assert contract["train_dataset_sha256"] == manifest.train.sha256
    assert contract["objective"] == manifest.objective.to_dict()
    return contract


async def load(args, contract):
    group = create_value_pretraining_group(args)
    iterations = {iteration for iteration in await group.init() if iteration is not None}
    assert iterations == {contract["completed_steps"] if contract else 0}, iterations
    return group


def shards(args, dataset, rows, dp_size):
    batch = dataset.build_rollout_batch(rows)
    assert set(batch) == {"tokens", "response_lengths", "returns", "loss_masks", "sample_indices", "sample_ids"}
    data_ref = split_train_data_by_dp(args, batch, dp_size=dp_size)
    return {"data_ref": data_ref, "sample_indices": batch["sample_indices"]}


async def train(args, manifest, dataset, contract, dp_size):
    group = await load(args, contract)
    done = contract["completed_steps"] if contract else 0
    plan = {"global_batch_size": args.global_batch_size, "epochs": args.value_pretrain_epochs}
    assert args.num_rollout == value_pretrain_num_steps(num_samples=len(dataset), **plan)
    completed = saved = done
    for step, rows in enumerate(dataset.batch_indices(**plan, seed=args.seed), start=1):
        if step <= done:
            continue
        await group.train(step, shards(args, dataset, rows, dp_size))
        completed = step
        if step % args.save_interval == 0 or step == args.num_rollout:
            await group.save_model(step, force_sync=True)
            write_value_pretrain_contract(
                args.critic_save, manifest=manifest, completed_steps=step, model_identity=args.hf_checkpoint,
                seed=args.seed, global_batch_size=args.global_batch_size,
            )
            saved = step
    assert saved == completed > done
    return {"completed": completed}


async def evaluate(args, dataset, contract, dp_size):
    assert contract is not None
    batches = select_mixed_label_batches(
        dataset, global_batch_size=args.global_batch_size, num_batches=args.value_pretrain_eval_num_batches,
        seed=args.seed,
    )
    group = await load(args, contract)
    stats = {name: [] for name in WEIGHTINGS}
    for number, rows in enumerate(batches):
        samples = [dataset.get(row) for row in rows]
        assert len(Counter(map(scalar_active_label, samples))) >= 2
        targets = {"trajectory_weighted": len(rows), "token_weighted": sum(sum(s.loss_mask) for s in samples)}
        reports = await group.evaluate_critic(number, shards(args, dataset, rows, dp_size))
        for name in WEIGHTINGS:
            combined = combine_rank_stats(
                reports, dp_size, list(rows), stats_field=name, expected_active_targets=targets[name]
            )
            assert isinstance(combined, ValueEvalStats)
            stats[name].append(combined)
    report = {"schema": VALUE_EVAL_REPORT_SCHEMA, "dataset_sha256": dataset.spec.sha256}
    for name in WEIGHTINGS:
        aggregate, gate = gate_metrics(stats[name])
        report[name] = {"explained_variance": aggregate.metrics()["explained_variance"], "gate": gate}
    with open(args.value_pretrain_eval_report, "x") as out:
        json.dump(report, out)
    return {"evaluated": len(batches)}


async def main():
    args = parse_args()
    configure_logger(args, source=MainProcessIdentity())
    init_tracking(args)
    manifest = load_value_pretrain_manifest(args.value_pretrain_manifest, args.value_pretrain_manifest_sha256)
    spec = manifest.heldout if args.value_pretrain_eval_split == "heldout" else manifest.train
    dataset = ValuePretrainDataset(spec, manifest.objective)
    assert len(dataset) == spec.num_samples and dataset.spec.path.is_file()
    devices = args.critic_num_nodes * args.critic_num_gpus_per_node
    dp_size = devices // compute_megatron_world_size_except_dp(args)
    contract = previous_contract(args, manifest)
    if args.value_pretrain_eval_only:
        result = await evaluate(args, dataset, contract, dp_size)
    else:
        result = await train(args, manifest, dataset, contract, dp_size)
    print(json.dumps({"schema": VALUE_PRETRAIN_SCHEMA, "loss": manifest.objective.loss_type, **result}))
    finish_tracking()


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "own_program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def linked_manifest(value_manifest: Path, tmp_path: Path) -> Path:
    """The manifest in a folder of its own, whose data are symbolic links that lead out of it."""
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(value_manifest.read_bytes())
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).symlink_to(value_manifest.parent / name)
    return folder / "manifest.json"


def test_program_of_public_names_trains_resumes_and_is_judged_like_train_value(
    program: Path,
    start: Callable[..., Any],
    tiny_hf_model: Path,
    value_manifest: Path,
    linked_manifest: Path,
    tmp_path: Path,
    assert_no_process_left: Callable[..., None],
) -> None:
    flags = {
        "hf-checkpoint": tiny_hf_model,
        "value-pretrain-manifest": linked_manifest,
        "global-batch-size": 16,
        "micro-batch-size": 8,
        "critic-num-nodes": 1,
        "critic-num-gpus-per-node": 1,
        "train-backend": "megatron",
        "seed": 11,
        "lr": 3e-3,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    saving = ("--save-interval", 3)
    two_epochs = ("--value-pretrain-epochs", 2, *saving)

    first = start(program, *words, "--value-pretrain-epochs", 1, *saving, "--critic-save", ours)
    whole = start("train_value.py", *words, *two_epochs, "--critic-save", theirs, "--run-dir", tmp_path / "run")
    ended = first.finish(300)
    assert ended.code == 0, ended.err
    assert json.loads(ended.last_line) == {
        "schema": "miles.value-pretrain.v1", "loss": "classification", "completed": 4,
    }  # fmt: skip
    assert json.loads((ours / "value_pretrain_contract.json").read_text())["completed_steps"] == 4

    ended = start(program, *words, *two_epochs, "--critic-load", ours, "--critic-save", ours).finish(300)
    assert ended.code == 0, ended.err
    assert json.loads(ended.last_line)["completed"] == 8
    reference = whole.finish(300)
    assert reference.code == 0, reference.err
    contract = (ours / "value_pretrain_contract.json").read_bytes()
    assert contract == (theirs / "value_pretrain_contract.json").read_bytes()
    # Where the data lie in truth is on record, and not the link.
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["value_data"]["train"]["path"] == str(value_manifest.parent.resolve() / "train.jsonl")

    report = tmp_path / "report.json"
    judging = ("--value-pretrain-eval-only", "--value-pretrain-eval-num-batches", 2, "--critic-load", ours)
    ended = start(program, *words, *judging, "--value-pretrain-eval-report", report).finish(300)
    assert ended.code == 0, ended.err
    judged = json.loads(report.read_text())
    assert -1.0 < judged["token_weighted"]["explained_variance"] <= 1.0
    assert_no_process_left(ended.mark)
