"""The loops of value pretraining on a critic group: one optimizer step per planned batch, or one evaluation."""

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from miles.algorithms.value_losses import explained_variance_from_stats
from miles.config import Args
from miles.config.hf_folder import read_model_config
from miles.contracts.chain import describe_value_pretraining
from miles.ray.actor_group import RayTrainGroup
from miles.ray.critic_figures import critic_figures
from miles.ray.progress import progress_bar
from miles.ray.rollout.train_data_conversion import split_train_data_by_dp
from miles.utils.megatron_args_utils import compute_megatron_world_size_except_dp
from miles.utils.tracking_utils.run_folder import update_run_json
from miles.utils.tracking_utils.tracking import Tracker
from miles.value_evaluation import build_batch_report, build_eval_report, raise_if_gate_failed, write_eval_report
from miles.value_pretraining import (
    VALUE_PRETRAIN_CONTRACT_NAME,
    ValuePretrainPlan,
    check_token_ids,
    write_value_pretrain_contract,
)

logger = logging.getLogger(__name__)


def batch_reader(args: Args, plan: ValuePretrainPlan) -> Callable[[Sequence[int]], dict[str, list[Any]]]:
    """Return what reads rows of the plan's data set as a column batch that the model can take."""
    model = args.hf_checkpoint
    assert model is not None
    vocab_size = read_model_config(model)["vocab_size"]

    def read(rows: Sequence[int]) -> dict[str, list[Any]]:
        batch = plan.dataset.build_rollout_batch(rows)
        check_token_ids(plan.dataset, batch, vocab_size=vocab_size, model=model)
        return batch

    return read


def _record_chain(args: Args, *, critic: str, report: str | None = None) -> None:
    """Let `miles verify RUN` go on from the run to what it made."""
    assert args.run_dir is not None
    made = describe_value_pretraining(args.run_dir, critic_load=critic, eval_report=report)
    update_run_json(args.run_dir, value_pretraining=made)


async def evaluate(args: Args, plan: ValuePretrainPlan, group: RayTrainGroup, loaded: int, tracker: Tracker) -> None:
    """Forward only: explained variance of every batch, the report, then the gate."""
    assert plan.eval_batches is not None and plan.resume is not None and args.value_pretrain_eval_report is not None
    assert args.critic_load is not None and args.global_batch_size is not None
    assert args.value_pretrain_eval_split is not None
    batches, read_batch = [], batch_reader(args, plan)
    with progress_bar("value evaluation", total=len(plan.eval_batches)) as advance:
        for number, rows in enumerate(plan.eval_batches):
            batch = read_batch(rows)
            shards = split_train_data_by_dp(args, batch, dp_size=plan.dp_size)
            data = {"data_ref": shards, "sample_indices": batch["sample_indices"]}
            reports = await group.evaluate_critic(number, data)
            batches.append(
                build_batch_report(
                    number, dataset=plan.dataset, indices=rows, rank_reports=reports, dp_size=plan.dp_size
                )
            )
            metrics = batches[-1]["token_weighted"]["metrics"]
            tracker.log(number, "value_eval", {"value/heldout_explained_variance": metrics["explained_variance"]})
            advance(f"EV {metrics['explained_variance']:+.3f}")
    report = build_eval_report(
        manifest=plan.manifest,
        dataset=plan.dataset,
        split=args.value_pretrain_eval_split,
        checkpoint=args.critic_load,
        contract=plan.resume.contract,
        contract_sha256=plan.resume.sha256,
        loaded_iteration=loaded,
        dp_size=plan.dp_size,
        model_parallel_size=compute_megatron_world_size_except_dp(args.for_role("critic")),
        seed=args.seed,
        global_batch_size=args.global_batch_size,
        batches=batches,
        max_bias=args.value_gate_max_bias,
    )
    digest = write_eval_report(args.value_pretrain_eval_report, report)
    for weighting in ("token_weighted", "trajectory_weighted"):
        aggregate, gate = report["aggregate"][weighting], report["gate"][weighting]
        logger.info(
            "%s: EV %+.4f, %d of %d batches positive",
            weighting,
            aggregate["metrics"]["explained_variance"],
            gate["positive_batches"],
            gate["evaluable_batches"],
        )
    logger.info("report %s, SHA-256 %s", args.value_pretrain_eval_report, digest)
    _record_chain(args, critic=args.critic_load, report=args.value_pretrain_eval_report)
    raise_if_gate_failed(report, path=args.value_pretrain_eval_report)
    print(f"gate passed: {args.value_pretrain_eval_report} (SHA-256 {digest})")


async def train(args: Args, plan: ValuePretrainPlan, group: RayTrainGroup, tracker: Tracker) -> None:
    """One optimizer step per batch of the plan; a contract after every save."""

    assert args.critic_save is not None and args.global_batch_size is not None and args.hf_checkpoint is not None
    critic_save, model_identity, global_batch_size = args.critic_save, args.hf_checkpoint, args.global_batch_size
    canary, read_batch = args.value_pretrain_canary_one_step, batch_reader(args, plan)
    contract = Path(critic_save) / VALUE_PRETRAIN_CONTRACT_NAME
    completed = saved = plan.resume_after

    async def save() -> None:
        folder = await group.save_model(completed, force_sync=True)
        if canary:
            logger.info("canary checkpoint %s; a canary never gets a contract", folder)
            return
        path, digest = write_value_pretrain_contract(
            critic_save,
            manifest=plan.manifest,
            completed_steps=completed,
            model_identity=model_identity,
            seed=args.seed,
            global_batch_size=global_batch_size,
        )
        logger.info("step %d saved; contract %s, SHA-256 %s", completed, path, digest)

    steps = plan.dataset.batch_indices(
        global_batch_size=args.global_batch_size, epochs=args.value_pretrain_epochs, seed=args.seed
    )
    numbered = enumerate(islice(steps, 1) if canary else steps, start=1)
    with progress_bar("value pretraining", total=1 if canary else plan.num_steps, done=completed) as advance:
        for step, rows in numbered:
            if step <= plan.resume_after:
                continue
            batch = read_batch(rows)
            shards = split_train_data_by_dp(args, batch, dp_size=plan.dp_size)
            metrics = await group.train(step, {"data_ref": shards, "sample_indices": batch["sample_indices"]})
            completed = step
            ev = explained_variance_from_stats(metrics)
            figures = critic_figures([metrics]) | ({} if ev is None else {"value/explained_variance": ev})
            tracker.log(step, "value", figures)
            advance(f"loss {metrics['value_loss']:.4f}")
            if args.save_interval is not None and step % args.save_interval == 0 and not canary:
                await save()
                saved = completed
    if completed == plan.resume_after:
        raise RuntimeError(
            f"no step was completed: the checkpoint already holds all {plan.num_steps} steps of the plan"
        )
    if saved != completed:
        await save()
    if canary:
        assert completed == 1 and not contract.exists(), "a canary is one step and publishes no contract"
        print(f"value canary: one step, saved under {args.critic_save}, no contract")
    else:
        _record_chain(args, critic=critic_save)
        print(f"value pretraining: {completed} steps, contract {contract}")
