"""Distributed checkpoints: written under a temporary name, published whole, checked before they are believed.

Layout of a save folder: `iter_NNNNNNN/` (Megatron's distributed checkpoint, `identity.json`, and
`checkpoint_manifest.json` with the size and SHA-256 of every file) and `latest`, which names the newest one and is
replaced last.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from miles.backends.megatron.checkpoint_identity import (
    IDENTITY_FILE,
    LATEST_FILE,
    Identity,
    check_identity,
    find_checkpoint,
)
from miles.backends.megatron.parallel import ParallelState
from miles.backends.megatron.shard_writer import InProcessSave
from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME, check_checkpoint_listing, write_checkpoint_manifest
from miles.contracts.canonical import sha256_file
from miles.contracts.chain import iteration_folder
from miles.contracts.publish import publish_bytes, publish_folder, publish_json

_HEAD_PREFIX = "output_layer."
# Parameter-group entries that belong to this run's command line, not to the checkpoint.
_SETTINGS = ("max_lr", "min_lr", "betas", "eps", "start_wd", "end_wd", "wd_mult", "weight_decay", "lr")


@dataclass(frozen=True)
class TrainState:
    """What is saved and loaded together; optimizer and scheduler are None in a run that only evaluates."""

    model: GPTModel
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    parallel: ParallelState
    identity: Identity


def on_rank_zero(action: Callable[[], Any]) -> Any:
    """Run `action` on global rank 0 and give every rank its result, or the same error.

    Raises:
        ValueError | OSError: As `action` raised it on rank 0.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _sharding_metadata() -> dict[str, Any]:
    # The default optimizer format cannot be saved over gloo; this one also reshards to any layout.
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(model: GPTModel) -> dict[str, Any]:
    """The model's sharded state without Transformer Engine's fp8 state, which is not used and not portable."""
    state = model.sharded_state_dict(metadata=_sharding_metadata())
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def _rng_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sharded_rng(parallel: ParallelState) -> ShardedObject:
    return ShardedObject(
        "rng_state",
        _rng_state(),
        (parallel.pp_size, parallel.tp_size),
        (parallel.pp_rank, parallel.tp_rank),
        replica_id=parallel.replica_rank,
    )


def save_checkpoint(root: str, state: TrainState, *, iteration: int) -> Path:
    """Write and publish `iter_NNNNNNN` under `root`; every rank calls it.

    A kill at any moment leaves the previous checkpoint in force: `latest` is replaced only when the new folder is
    complete, on disk and under its final name. A checkpoint of the same iteration is replaced.

    Returns:
        The published folder.

    Raises:
        OSError: The disk is full or the folder cannot be written, on every rank.
    """
    assert state.optimizer is not None and state.scheduler is not None, "nothing to save without an optimizer"
    final = iteration_folder(root, iteration)
    temporary = final.with_name(f".{final.name}.tmp")
    stepped = state.scheduler.num_steps > 0
    identity = replace(state.identity, iteration=iteration, optimizer=state.identity.optimizer if stepped else None)

    size = _checkpoint_bytes(state)

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < size:
            temporary.rmdir()
            raise OSError(
                errno.ENOSPC, f"no room: a checkpoint takes {size >> 20} MiB, {free >> 20} MiB are free", str(final)
            )

    on_rank_zero(prepare)
    model_state = _model_state(state.model)
    tensors: dict[str, Any] = {
        "model": model_state,
        "scheduler": state.scheduler.state_dict(),
        "iteration": iteration,
        "rng": _sharded_rng(state.parallel),
    }
    if stepped:
        tensors["optimizer"] = _optimizer_state(state.optimizer, model_state)
    dist_checkpointing.save(tensors, str(temporary), sharded_strategy=InProcessSave())
    dist.barrier()

    def publish() -> None:
        publish_json(temporary / IDENTITY_FILE, identity.to_dict(), readable=True)
        head = None if identity.value_head is None else identity.to_dict()["value_head"]
        write_checkpoint_manifest(temporary, iteration=iteration, role=identity.role, head=head)
        publish_folder(temporary, final, replace=True)
        publish_bytes(final.parent / LATEST_FILE, f"{final.name}\n".encode())

    on_rank_zero(publish)
    return final


def _optimizer_state(optimizer: MegatronOptimizer, model_state: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """The optimizer's state with each tensor's place in the whole."""
    alone = optimizer.chained_optimizers[0] if isinstance(optimizer, ChainedOptimizer) else optimizer
    if isinstance(alone, Float16OptimizerWithFloat16Params) and any(map(len, alone.fp32_from_fp32_groups)):
        return _mixed_optimizer_state(alone, model_state, is_loading=is_loading)
    return optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_sharding_metadata())


def _mixed_optimizer_state(
    optimizer: Float16OptimizerWithFloat16Params, model_state: Any, *, is_loading: bool
) -> dict[str, Any]:
    """As the optimizer's own `sharded_state_dict`, where fp32 parameters (a value head) are among half ones.

    That one numbers the half parameters alone, though its state has a number for each: moments would come under
    other parameters' names, or a number has none.
    """
    if is_loading:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    state = optimizer.state_dict()
    half = {
        id(main): param
        for params, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for param, main in zip(params, mains, strict=True)
    }
    places = {id(place.data): place for place in nested_values(extract_sharded_tensors_and_factories(model_state)[0])}
    numbered = {
        number: places[id(half.get(id(param), param))]
        for group, saved in zip(optimizer.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
        for param, number in zip(group["params"], saved["params"], strict=True)
    }
    state["fp32_from_fp16_params"] = [
        [
            make_sharded_optimizer_tensor(places[id(half[id(main)])], main, "optimizer.state.fp32_param")
            for main in mains
        ]
        for mains in optimizer.fp32_from_float16_groups
    ]
    step = optimizer._extract_common_per_param_step(state["optimizer"])
    optim_state_to_sharding_state(state["optimizer"], numbered, exclude_keys=("step",))
    if step is not None:
        state["optimizer"]["state"]["common_step"] = step
    return state


def _checkpoint_bytes(state: TrainState) -> int:
    """About how much a checkpoint of the whole model takes: weights, Adam's two moments, fp32 copies of half
    weights.
    """
    local = sum(
        param.numel() * (param.itemsize + 8 + (4 if param.itemsize < 4 else 0)) for param in state.model.parameters()
    )
    total = torch.tensor([float(local)], dtype=torch.float64, device=next(state.model.parameters()).device)
    dist.all_reduce(total)
    return int(total.item()) // (state.parallel.dp_size * state.parallel.cp_size)


def verify_files(folder: Path, parallel: ParallelState) -> None:
    """Check every file of a checkpoint against its manifest, each rank a share of them; every rank calls it.

    Raises:
        ValueError: The manifest is missing, a file is missing, truncated or changed, or there is one that the manifest
            does not list; names the file, on every rank.
    """

    def listed() -> list[dict[str, Any]]:
        try:
            return check_checkpoint_listing(folder)["files"]
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"checkpoint refused: {error}") from None

    problem: str | None = None
    for entry in on_rank_zero(listed)[parallel.rank :: parallel.world_size]:
        path = folder / entry["path"]
        try:
            if sha256_file(path) != entry["sha256"]:
                problem = f"{path}: its SHA-256 differs from {CHECKPOINT_MANIFEST_NAME}"
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        if problem is not None:
            break
    problems: list[str | None] = [None] * parallel.world_size
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ValueError(f"checkpoint refused: {found}")


def open_checkpoint(path: str, wanted: Identity, parallel: ParallelState) -> tuple[Path, Identity, bool]:
    """Find, identify and verify the checkpoint that `path` means; every rank calls it.

    Returns:
        (folder, its identity, whether it is an actor's checkpoint that a critic starts from).

    Raises:
        ValueError: None there, one of another model or head, or a damaged one.
    """

    def identify() -> tuple[Path, Identity, bool]:
        folder = find_checkpoint(path)
        found = Identity.read(folder)
        bootstrap = wanted.role == "critic" and found.role == "actor"
        check_identity(found, wanted, folder=folder, bootstrap=bootstrap)
        return folder, found, bootstrap

    folder, found, bootstrap = on_rank_zero(identify)
    verify_files(folder, parallel)
    return folder, found, bootstrap


def _load_tensors(wanted: dict[str, Any], folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Read what `wanted` names; returns it and the model tensors of the checkpoint that nobody asked for."""
    result = dist_checkpointing.load(wanted, str(folder), strict="return_all")
    assert isinstance(result, tuple)
    # Megatron calls "missing" what lies in the checkpoint and nobody asked for, and "unexpected" what this rank asked
    # for in vain.
    loaded, left_over, absent = cast(tuple[dict[str, Any], set[str], set[str]], result)
    absent_anywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(absent_anywhere, absent)
    if absent := set().union(*absent_anywhere):
        raise ValueError(f"{folder}: tensor {min(absent)} is missing from the checkpoint ({len(absent)} in all)")
    return loaded, {name for name in left_over if not name.startswith(("optimizer.", "rng_state"))}


def load_backbone(state: TrainState, folder: Path) -> None:
    """Load an actor's decoder into a critic, strictly; the value head alone stays as it was initialised.

    Raises:
        ValueError: A tensor is missing or left over.
    """
    ours = {name: value for name, value in _model_state(state.model).items() if not name.startswith(_HEAD_PREFIX)}
    loaded, left_over = _load_tensors({"model": ours}, folder)
    left_over -= {"output_layer.weight"}
    if left_over:
        raise ValueError(f"{folder}: tensor {min(left_over)} has no place in this critic")
    _fill_model(state.model, loaded["model"], head_is_new=True)


def load_model(state: TrainState, folder: Path) -> None:
    """Load the model alone, head included."""
    loaded, left_over = _load_tensors({"model": _model_state(state.model)}, folder)
    if left_over:
        raise ValueError(f"{folder}: tensor {min(left_over)} has no place in this model")
    _fill_model(state.model, loaded["model"])


def load_training(state: TrainState, folder: Path, found: Identity) -> None:
    """Load model, optimizer, schedule position and, where the layout is the same, generator states.

    Learning rate, betas and decay are this run's; how many steps were taken is the checkpoint's.

    Raises:
        ValueError: The optimizer state is in the other of the two formats (plain, distributed).
    """
    assert state.optimizer is not None and state.scheduler is not None
    if found.optimizer is None:
        load_model(state, folder)
        return
    if found.optimizer != state.identity.optimizer:
        raise ValueError(
            f"{folder}: optimizer state is {found.optimizer}, this run's is {state.identity.optimizer} "
            "(--use-distributed-optimizer); load weights only or keep the setting"
        )
    parallel, layout = state.parallel, state.identity.parallel
    same_layout = all(found.parallel[name] == layout[name] for name in ("tp", "pp"))
    model_state = _model_state(state.model)
    wanted: dict[str, Any] = {
        "model": model_state,
        "optimizer": _optimizer_state(state.optimizer, model_state, is_loading=True),
    }
    if same_layout:
        wanted["rng"] = _sharded_rng(parallel)
    settings = [{name: group[name] for name in _SETTINGS if name in group} for group in state.optimizer.param_groups]
    loaded, left_over = _load_tensors(wanted, folder)
    if left_over:
        raise ValueError(f"{folder}: tensor {min(left_over)} has no place in this model")
    _fill_model(state.model, loaded["model"])
    state.optimizer.load_state_dict(loaded["optimizer"])
    for group, ours in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(ours)
    state.scheduler.load_state_dict(loaded["scheduler"])
    if same_layout:
        _set_rng_state(loaded["rng"])


def _fill_model(model: GPTModel, loaded: dict[str, Any], *, head_is_new: bool = False) -> None:
    result = model.load_state_dict(loaded, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    missing = {
        name
        for name in result.missing_keys
        if not name.endswith("_extra_state") and not (head_is_new and name.startswith(_HEAD_PREFIX))
    }
    assert not missing, missing
