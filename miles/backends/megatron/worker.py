"""One training rank of an actor or a critic: what the layer above calls, and nothing about how ranks are started."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from miles.algorithms.policy_losses import policy_metrics
from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.checkpoint_identity import Identity, ValueHeadIdentity
from miles.backends.megatron.device import Device
from miles.backends.megatron.hf_files import HFWeights, write_folder
from miles.backends.megatron.parallel import destroy_parallel, initialize_parallel
from miles.backends.weight_checksums import engine_checksums
from miles.backends.weight_group import (
    WeightBucket,
    broadcast_bucket,
    dtype_name,
    join_weight_group,
    leave_weight_group,
)
from miles.config.groups import flag_of
from miles.value_evaluation import build_rank_report

WorkerRole = Literal["actor", "critic", "sft"]
Shard = dict[str, Any]
Metrics = dict[str, float]

_BUCKET_BYTES = 256 << 20


class MegatronWorker:
    """A rank of a Megatron training group.

    Every method is called on all ranks of the group at the same time. A `shard` is this data-parallel rank's columns
    (see miles.data.batch) with two more keys: `micro_batches`, lists of row numbers of the shard, the same number of
    lists on every data-parallel rank; and `global_counts`, {"samples", "sequences", "tokens"} of the batch of all
    data-parallel ranks, where tokens counts the ones of the loss masks and sequences those that have any. Training
    methods return metrics on output ranks (last pipeline stage, tensor and context rank 0) and None elsewhere; metrics
    are already reduced over the whole group.
    """

    def __init__(
        self, args: Any, role: WorkerRole, rank: int, world_size: int, master_addr: str, master_port: int
    ) -> None:
        """Join the group; loads no model yet.

        Args:
            args: Settings; the role's own (learning rate, sizes, folders) are taken with `args.for_role`.
            role: "actor", "critic", or "sft" (an actor trained on log-likelihood).
            master_addr, master_port: Where rank 0 of this group listens.

        Raises:
            ValueError: Settings that this backend cannot run, naming the flag.
        """
        if role not in ("actor", "critic", "sft"):
            raise ValueError(f"unknown role {role!r}: expected actor, critic or sft")
        self.role: Literal["actor", "critic"] = "critic" if role == "critic" else "actor"
        self.args = args.for_role(self.role)
        if self.args.hf_checkpoint is None:
            raise ValueError("--hf-checkpoint is missing: it says what model to build")
        self.device = Device.from_args(self.args)
        architecture = Architecture.from_hf(self.args.hf_checkpoint)
        architecture.check_layout(
            tensor_size=self.args.tensor_model_parallel_size,
            pipeline_size=self.args.pipeline_model_parallel_size,
            role=self.role,
        )
        self._hf_architecture = architecture
        self.architecture = architecture.untied() if self.role == "critic" else architecture
        self.parallel = initialize_parallel(
            device=self.device,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            tensor_size=self.args.tensor_model_parallel_size,
            pipeline_size=self.args.pipeline_model_parallel_size,
            context_size=self.args.context_parallel_size,
            sequence_parallel=self.args.sequence_parallel,
            seed=self.args.seed,
            role=self.role,
        )
        self._weight_group: dist.ProcessGroup | None = None

    # ---------------------------------------------------------------- set-up

    def parallel_info(self) -> dict[str, Any]:
        """This rank's place: tp_rank, pp_rank, dp_rank, dp_size, is_output_rank."""
        p = self.parallel
        return {
            "tp_rank": p.tp_rank,
            "pp_rank": p.pp_rank,
            "dp_rank": p.dp_rank,
            "dp_size": p.dp_size,
            "is_output_rank": p.is_output_rank,
        }

    def init(self, *, load_weights_only: bool = False, forward_only: bool = False) -> int:
        """Build the model and load it.

        An actor takes the checkpoint of `load`, else the Hugging Face model. A critic takes its own checkpoint, or the
        backbone of an actor's checkpoint or of the Hugging Face model, strictly, with a new head.

        Args:
            load_weights_only: Leave optimizer and schedule fresh even where the checkpoint has them.
            forward_only: Build no optimizer at all; only computing and evaluating methods work.

        Returns:
            Iteration of the loaded checkpoint; 0 where training starts fresh.

        Raises:
            ValueError: The model folder or checkpoint is missing, damaged, or of another model, role or head.
        """
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.layer_spec import transformer_engine_in_use
        from miles.backends.megatron.model import build_model, freeze_attention
        from miles.backends.megatron.optimizer import build_optimizer, wrap_data_parallel
        from miles.backends.megatron.step import Stepper
        from miles.backends.megatron.weight_rules import build_rules
        from miles.backends.megatron.weights import build_buckets, load_hf_weights

        args, critic = self.args, self.role == "critic"
        self._dtype = torch.bfloat16 if args.bf16 else torch.float32
        self._fused_norms = transformer_engine_in_use(self.device)
        head = ValueHeadIdentity.from_args(args) if critic else None
        self.identity = Identity(
            role=self.role,
            architecture=self.architecture,
            value_head=head,
            iteration=0,
            dtype=str(self._dtype).removeprefix("torch."),
            optimizer="distributed" if args.use_distributed_optimizer else "plain",
            parallel=self.parallel.layout(),
            device=self.device.kind,
        )
        self._reference = None
        if not critic and args.needs_reference and not forward_only:
            self._reference = self._make_stepper(Stepper, self._build_reference())
        self.model = build_model(
            self.architecture,
            parallel=self.parallel,
            device=self.device,
            dtype=self._dtype,
            sequence_parallel=args.sequence_parallel,
            value_width=None if head is None else head.width,
            seed=args.seed,
        )
        source = None if args.load is None else checkpoint.open_checkpoint(args.load, self.identity, self.parallel)
        # Weights that come from a Hugging Face folder must be there before the optimizer copies them.
        if source is None:
            load_hf_weights(
                self.model,
                args.hf_checkpoint,
                architecture=self.architecture,
                parallel=self.parallel,
                fused_norms=self._fused_norms,
                critic=critic,
            )
        state = checkpoint.TrainState(self.model, None, None, self.parallel, self.identity)
        resume = source is not None and not (load_weights_only or forward_only or source[2])
        if source is not None and not resume:
            folder, _, bootstrap = source
            (checkpoint.load_backbone if bootstrap else checkpoint.load_model)(state, folder)
        if critic and args.critic_freeze_attention:
            freeze_attention(self.model)
        self.optimizer = self.scheduler = None
        self._train_stepper = None
        if not forward_only:
            wrapped = wrap_data_parallel(self.model, args)
            self.optimizer, self.scheduler = build_optimizer(wrapped, args, role=self.role)
            self._wrapped = wrapped
            self._train_stepper = self._make_stepper(Stepper, wrapped)
            self._connect_schedule()
            state = replace(state, optimizer=self.optimizer, scheduler=self.scheduler)
        if resume:
            assert source is not None
            checkpoint.load_training(state, source[0], source[1])
        self._state = state
        self._reader = self._make_stepper(Stepper, self.model)
        self._rules = build_rules(
            self.architecture,
            pipeline_size=self.parallel.pp_size,
            fused_norms=self._fused_norms,
            output_layer=not critic,
        )
        self._buckets = build_buckets(self._rules, dtype=self._dtype, max_bytes=_BUCKET_BYTES)
        return 0 if source is None or source[2] else source[1].iteration

    def _build_reference(self) -> torch.nn.Module:
        """The frozen model that KL is measured against; built first, so that generators end as without it.

        Raises:
            ValueError: `ref_load` is neither a Hugging Face folder nor holds an actor's checkpoint of this model.
        """
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import build_model
        from miles.backends.megatron.weights import load_hf_weights

        args = self.args
        model = build_model(
            self.architecture,
            parallel=self.parallel,
            device=self.device,
            dtype=self._dtype,
            sequence_parallel=args.sequence_parallel,
            value_width=None,
            seed=args.seed,
        )
        folder = args.hf_checkpoint if args.ref_load is None else args.ref_load
        if (Path(folder) / "config.json").is_file():
            load_hf_weights(
                model,
                folder,
                architecture=self.architecture,
                parallel=self.parallel,
                fused_norms=self._fused_norms,
                critic=False,
            )
        else:
            found, _, _ = checkpoint.open_checkpoint(folder, self.identity, self.parallel)
            checkpoint.load_model(checkpoint.TrainState(model, None, None, self.parallel, self.identity), found)
        return model.requires_grad_(False)

    def _make_stepper(self, stepper: Callable[..., Any], model: torch.nn.Module) -> Any:
        return stepper(
            model,
            parallel=self.parallel,
            device=self.device.torch_device,
            # Without padding a step costs a third less, but Transformer Engine cannot pack in fp32.
            packed=self.args.use_dynamic_batch_size or not self._fused_norms,
            sequence_parallel=self.args.sequence_parallel,
        )

    def _connect_schedule(self) -> None:
        """Tell Megatron's schedules how to finish gradients and scale losses."""
        from megatron.core.distributed import finalize_model_grads

        assert self.optimizer is not None
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    # ---------------------------------------------------------------- training

    def _accumulate(self, iteration: int, shard: Shard, objective: Any) -> Metrics:
        """Leave the gradient of the whole batch's loss in the buffers; metric sums of the whole group."""
        assert self._train_stepper is not None, "init(forward_only=True) built no optimizer"
        assert self.optimizer is not None
        if shard["global_counts"]["tokens"] < 1:
            raise ValueError(f"iteration {iteration}: the batch has no trainable token (every loss mask is zero)")
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = self._train_stepper.accumulate_gradients(
            shard,
            objective,
            columns=objective.columns,
            denominator=objective.denominator(shard["global_counts"]),
            metric_names=objective.metric_names,
        )
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(
                f"{self.role} loss is {metrics['loss']} at iteration {iteration}; nothing was updated"
            )
        return metrics

    def _optimizer_step(self, iteration: int, shard: Shard, objective: Any) -> Metrics | None:
        metrics = self._accumulate(iteration, shard, objective)
        assert self.optimizer is not None and self.scheduler is not None
        self.scheduler.step(1)
        outcome = self.optimizer.step()
        assert outcome is not None
        grad_norm = outcome[1]
        if grad_norm is None or not math.isfinite(grad_norm):
            raise FloatingPointError(f"{self.role} gradient norm is {grad_norm} at iteration {iteration}")
        if not self.parallel.is_output_rank:
            return None
        metrics["grad_norm"] = float(grad_norm)
        metrics["lr"] = float(self.optimizer.param_groups[0]["lr"])
        return _figures(metrics)

    def train_value(self, iteration: int, shard: Shard) -> Metrics | None:
        """One critic update on `returns`; with old `values` in the shard the mse loss is clipped around them.

        Returns:
            value_loss (token mean), EV sums `_ev_*`, for classification value_accuracy, value_entropy and
            value_confidence, for mse value_clip_fraction, tokens, grad_norm, lr.
        """
        self._require_critic("train_value")
        return self._optimizer_step(iteration, shard, self._value_objective(clipped="values" in shard))

    def train_policy(self, iteration: int, shard: Shard) -> Metrics | None:
        """One update of the policy on `advantages` and what else its loss reads (`policy.policy_loss_of`).

        A batch without `old_log_probs` is taken to be on-policy: they are the log-probabilities of this forward pass.

        Returns:
            loss, the figures of `policy_losses.policy_metrics`, tokens, grad_norm, lr.
        """
        self._require_actor("train_policy")
        return self._optimizer_step(iteration, shard, self._policy_objective(shard))

    def train_sft(self, iteration: int, shard: Shard) -> Metrics | None:
        """One update on the log-likelihood of the response tokens that the loss mask selects.

        Returns:
            sft_loss (token mean), tokens, grad_norm, lr.
        """
        self._require_actor("train_sft")
        return self._optimizer_step(iteration, shard, self._likelihood_objective())

    # ---------------------------------------------------------------- reading

    def compute_values(self, shard: Shard) -> dict[int, np.ndarray] | None:
        """{sample index: values, float32 [response_length]}; the value of a token is read from the state before it."""
        self._require_critic("compute_values")
        return self._reader.read(shard, self._value_objective(clipped=False).read)

    def compute_log_probs(self, shard: Shard) -> dict[int, np.ndarray] | None:
        """{sample index: log-probabilities of the response tokens at the sampling temperature, float32}."""
        self._require_actor("compute_log_probs")
        return self._reader.read(shard, self._token_reader(self._sampling_temperature()).read)

    def compute_ref_log_probs(self, shard: Shard) -> dict[int, np.ndarray] | None:
        """As `compute_log_probs`, of the reference model."""
        self._require_actor("compute_ref_log_probs")
        assert self._reference is not None, "this run needs no reference model"
        return self._reference.read(shard, self._token_reader(self._sampling_temperature()).read)

    def compute_logits(self, shard: Shard) -> dict[int, np.ndarray] | None:
        """{sample index: the logits that predict the response tokens, float32 [response_length, vocabulary]}."""
        self._require_actor("compute_logits")
        return self._reader.read(shard, self._token_reader(1.0).logits)

    def evaluate_value(self, shard: Shard) -> dict[str, Any] | None:
        """This data-parallel rank's sufficient statistics of returns and residuals (return - value), forward only.

        Token-weighted: every token that the mask selects. Trajectory-weighted: one target per row, its single active
        return against the mean value over its active tokens.

        Raises:
            ValueError: A row's active returns are not all the same number.
        """
        values = self.compute_values(shard)
        if values is None:
            return None
        indices = [int(index) for index in shard["sample_indices"]]
        return build_rank_report(
            dp_rank=self.parallel.dp_rank,
            sample_indices=indices,
            values=[values[index].tolist() for index in indices],
            returns=shard["returns"],
            loss_masks=shard["loss_masks"],
        )

    # ---------------------------------------------------------------- saving

    def save_model(self, iteration: int, force_sync: bool = True) -> str:
        """Save model, optimizer, schedule and generators under the role's save folder; see
        `checkpoint.save_checkpoint`.

        Saves are always synchronous, so `force_sync` changes nothing.

        Returns:
            The published folder.
        """
        from miles.backends.megatron.checkpoint import save_checkpoint

        if self.args.save is None:
            raise ValueError(f"{flag_of('save', self.role)} is missing: there is nowhere to save to")
        return str(save_checkpoint(self.args.save, self._state, iteration=iteration))

    def export_hf(self, path: str | Path) -> str | None:
        """Write the actor as a Hugging Face folder, each tensor in the dtype it has in `hf_checkpoint`.

        Returns:
            The folder on rank 0, None elsewhere.

        Raises:
            FileExistsError: `path` is already there.
        """

        self._require_actor("export_hf")
        source = self.args.hf_checkpoint
        if self.parallel.rank != 0:
            for bucket in self._buckets:
                for _ in self._gather(bucket):
                    pass
            dist.barrier()
            return None
        with HFWeights(source) as weights:
            dtypes = {name: weights.dtype(name) for rule in self._rules for name in rule.hf if name in weights.names()}
        infos = [info for bucket in self._buckets for info in bucket.metadata()]
        sizes = [(name, torch.Size(shape).numel() * dtypes.get(name, dtype).itemsize) for name, dtype, shape in infos]
        tensors = (
            (name, tensor.to("cpu", dtypes.get(name, tensor.dtype)))
            for bucket in self._buckets
            for name, tensor in self._gather(bucket)
        )
        folder = write_folder(path, tensors, sizes=sizes, source=source)
        dist.barrier()
        return str(folder)

    # ---------------------------------------------------------------- weights to engines

    def join_weight_group(
        self, init_method: str, world_size: int, rank: int, group_name: str, wait_s: float = 300.0
    ) -> None:
        """Join the group shared with rollout engines as its rank 0, in place of an earlier one; ranks other than the
        training group's first return. The engines have `wait_s` seconds to come.
        """
        self._require_actor("join_weight_group")
        if self.parallel.rank != 0:
            return
        assert rank == 0, "the training group's rank 0 is the source"
        if self._weight_group is not None:
            leave_weight_group(self._weight_group)
            self._weight_group = None
        self._weight_group = join_weight_group(
            init_method, world_size, rank, group_name, backend=self.device.distributed_backend, wait_s=wait_s
        )

    def weight_buckets(self) -> list[WeightBucket]:
        """What `broadcast_bucket` sends: per bucket the names, dtypes and shapes of its Hugging Face tensors, in
        order.
        """
        buckets = []
        for bucket in self._buckets:
            names, dtypes, shapes = zip(*bucket.metadata(), strict=True)
            nbytes = sum(torch.Size(shape).numel() for shape in shapes) * bucket.dtype.itemsize
            buckets.append(WeightBucket(names, tuple(map(dtype_name, dtypes)), tuple(map(tuple, shapes)), nbytes))
        return buckets

    def broadcast_bucket(self, index: int) -> None:
        """Gather bucket `index` on rank 0 and broadcast it over the weight group; all training ranks call it."""
        self._require_actor("broadcast_bucket")
        tensors = [tensor for _, tensor in self._gather(self._buckets[index])]
        if self.parallel.rank == 0:
            assert self._weight_group is not None, "join_weight_group comes first"
            broadcast_bucket(self._weight_group, tensors)

    def engine_checksums(self, *, tp_rank: int, tp_size: int) -> dict[str, str] | None:
        """On rank 0 the checksums that an engine's rank must report if it holds this actor's weights; None
        elsewhere.
        """
        self._require_actor("engine_checksums")
        named = [pair for bucket in self._buckets for pair in self._gather(bucket)]
        if self.parallel.rank != 0:
            return None
        return engine_checksums(
            named,
            device=self.device.kind,
            dtype=getattr(torch, self.args.engine_dtype(self.device.kind)),
            tp_rank=tp_rank,
            tp_size=tp_size,
            tied=self.architecture.tied_embeddings,
        )

    def close(self) -> None:
        """Leave all groups; the worker is of no use afterwards."""
        if self._weight_group is not None:
            leave_weight_group(self._weight_group)
            self._weight_group = None
        # The distributed optimizer's views reach autograd's nodes, their hooks Megatron's wrapper, and that the
        # optimizer again: no collector sees the circle.
        for optimizer in getattr(getattr(self, "optimizer", None), "chained_optimizers", ()):
            optimizer.__dict__.clear()
        # Model and optimizer hold the groups.
        self.__dict__.clear()
        destroy_parallel()

    # ---------------------------------------------------------------- helpers

    def _gather(self, bucket: Any) -> Any:
        from miles.backends.megatron.weights import gather_bucket

        return gather_bucket(self.model, bucket, architecture=self.architecture, parallel=self.parallel)

    def _value_objective(self, *, clipped: bool) -> Any:
        from miles.backends.megatron.objectives import ValueObjective

        return ValueObjective.from_args(self.args, clipped=clipped)

    def _policy_objective(self, shard: Shard) -> Any:
        from miles.backends.megatron.objectives import PolicyObjective

        reader = self._token_reader(self._sampling_temperature())
        return PolicyObjective.from_args(self.args, shard, reader=reader)

    def _likelihood_objective(self) -> Any:
        from miles.backends.megatron.objectives import LikelihoodObjective

        return LikelihoodObjective(reader=self._token_reader(1.0))

    def _token_reader(self, temperature: float) -> Any:
        from miles.backends.megatron.objectives import TokenReader

        return TokenReader.build(self.parallel, vocab_size=self.architecture.vocab_size, temperature=temperature)

    def _sampling_temperature(self) -> float:
        temperature = self.args.rollout_temperature
        if temperature <= 0:
            raise ValueError("--rollout-temperature must be above 0 to train on what was sampled")
        return temperature

    def _require_critic(self, method: str) -> None:
        assert self.role == "critic", f"{method} is a critic's method"

    def _require_actor(self, method: str) -> None:
        assert self.role == "actor", f"{method} is an actor's method"


def _figures(sums: Metrics) -> Metrics:
    """Turn metric sums into means per token or row; EV sums, extremes, loss, tokens, grad_norm and lr stay."""
    tokens = sums["tokens"]
    keep = {name: sums[name] for name in ("loss", "tokens", "grad_norm", "lr")}
    if "policy_loss" in sums:
        if "log_prob_difference" in sums:
            keep["log_prob_difference"] = sums["log_prob_difference"] / tokens
        return policy_metrics(sums) | keep
    means = {
        "value_clip_fraction" if name == "value_clipped" else name: value
        if name.startswith("_ev_")
        else value / tokens
        for name, value in sums.items()
    }
    return means | keep
