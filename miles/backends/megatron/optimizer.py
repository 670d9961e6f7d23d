"""Megatron's optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from miles.config.args import Args, Role
from miles.config.groups import flag_of


def wrap_data_parallel(model: GPTModel, args: Any) -> DistributedDataParallel:
    """Give the model fp32 gradient buffers that are averaged over the data-parallel group."""
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        model,
    )
    wrapped.broadcast_params()
    return wrapped


def schedule_length(args: Args, *, role: Role = "actor") -> int:
    """Optimizer steps over which the learning rate decays: as many as the role takes, unless it is told otherwise.

    Args:
        args: the role's own settings.

    Raises:
        ValueError: A decaying style without a length, or a warm-up that does not end before it.
    """
    if args.lr_decay_style == "constant":
        return args.lr_warmup_iters + 1
    steps = args.lr_decay_iters or args.optimizer_steps(role)
    if steps is None:
        raise ValueError(f"--lr-decay-style {args.lr_decay_style} needs --lr-decay-iters or --num-rollout")
    if steps <= args.lr_warmup_iters:
        flag = flag_of("lr_warmup_iters", role)
        raise ValueError(f"{flag} {args.lr_warmup_iters} must be below the schedule's {steps} steps")
    return steps


def build_optimizer(
    model: DistributedDataParallel, args: Args, *, role: Role = "actor"
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with decoupled weight decay (none on biases and norms), plain or distributed, and its schedule.

    The schedule advances by one per optimizer step, before the step, so that optimizer step n (from 1) runs at
    schedule(n): lr * n / warm-up steps during the warm-up, then the decay, which reaches `min_lr` at the last step.

    Raises:
        ValueError: The learning-rate settings contradict each other, or a distributed optimizer is asked for on a GPU
            without a fused Adam.
    """
    if args.use_distributed_optimizer and torch.cuda.is_available() and USING_PYTORCH_OPTIMIZER:
        # Over torch's AdamW it resumes wrongly (see cpu_compat), and nothing of Megatron is patched on a GPU.
        raise ValueError("--use-distributed-optimizer on a GPU needs Transformer Engine or apex installed")
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is above the peak learning rate {args.lr} of the {role}")
    steps = schedule_length(args, role=role)
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        # With 0 Megatron would not even measure the norm.
        clip_grad=args.clip_grad or math.inf,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])  # type: ignore[list-item]
    _order_mixed_groups(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # The command line of the resuming run decides; only the number of steps taken comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def _order_mixed_groups(optimizer: MegatronOptimizer) -> None:
    """Let a distributed optimizer find a parameter's state where its groups have fp32 parameters among half ones.

    Such a group steps over its fp32 parameters first; megatron-core 0.16.1 notes the order of its buffers instead, and
    would save and load moments under the names of other parameters.
    """
    for one in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        if isinstance(one, DistributedOptimizer):
            for group, (full, half) in enumerate(zip(one.model_fp32_groups, one.model_float16_groups, strict=True)):
                for order, param in enumerate([*full, *half]):
                    one.model_param_group_index_map[param] = (group, order)
