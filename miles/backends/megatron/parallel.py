"""Ranks, sizes and process groups of one training group, as plain data."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import numpy as np
import torch.distributed as dist

from miles.backends.megatron.device import Device
from miles.config.groups import flag_of


@dataclass(frozen=True)
class ParallelState:
    """This rank's place in the tensor (tp), context (cp), data (dp) and pipeline (pp) parallel grid.

    `dp_rank` counts shards of the batch: ranks that share sequences (cp) have one `dp_rank`.

    Passed to whoever needs it; nothing in miles fetches it from a global. Megatron's own modules keep their own copy.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank reports results: one per data-parallel rank, on the last pipeline stage."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def replica_rank(self) -> int:
        """Number of this copy of the weights: context- and data-parallel ranks hold the same ones."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def last_stage_global_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp_group, self.pp_size - 1)

    def layout(self) -> dict[str, int]:
        """The sizes alone, as a checkpoint records them."""
        return {
            "tp": self.tp_size,
            "pp": self.pp_size,
            "cp": self.cp_size,
            "dp": self.dp_size,
            "world_size": self.world_size,
        }


def check_layout(
    *,
    world_size: int,
    tensor_size: int,
    pipeline_size: int,
    context_size: int,
    sequence_parallel: bool,
    role: Literal["actor", "critic"] = "actor",
) -> None:
    """Raise ValueError, naming the role's flag, where `world_size` ranks cannot form the asked for layout."""
    tensor_flag = flag_of("tensor_model_parallel_size", role)
    sizes = {
        tensor_flag: tensor_size,
        flag_of("pipeline_model_parallel_size", role): pipeline_size,
        flag_of("context_parallel_size", role): context_size,
    }
    for flag, size in sizes.items():
        if size < 1:
            raise ValueError(f"{flag} must be at least 1, got {size}")
    if world_size % (tensor_size * pipeline_size * context_size):
        asked = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise ValueError(f"{world_size} ranks cannot hold {asked}: the product must divide the number of ranks")
    if sequence_parallel and tensor_size == 1:
        raise ValueError(f"--sequence-parallel needs {tensor_flag} of at least 2")


def initialize_parallel(
    *,
    device: Device,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    tensor_size: int,
    pipeline_size: int,
    context_size: int = 1,
    sequence_parallel: bool = False,
    seed: int = 1234,
    timeout_s: float = 600.0,
    role: Literal["actor", "critic"] = "actor",
) -> ParallelState:
    """Start torch.distributed and Megatron's model parallel groups, once per process.

    Args:
        rank, world_size: This process in the training group.
        master_addr, master_port: Where rank 0 listens.
        tensor_size, pipeline_size, context_size: Sizes; the rest of the ranks are data parallel.
        seed: Seeds the generators of torch, NumPy, Python and Megatron's model parallelism, which checkpoints hold.
        timeout_s: Seconds after which a collective that a rank does not join fails.
        role: Whose flags a message names.

    Raises:
        ValueError: The sizes do not fit the number of ranks.
    """
    check_layout(
        world_size=world_size,
        tensor_size=tensor_size,
        pipeline_size=pipeline_size,
        context_size=context_size,
        sequence_parallel=sequence_parallel,
        role=role,
    )
    device.activate()
    if not device.is_cuda and master_addr in ("127.0.0.1", "localhost"):
        # Without it gloo resolves the host name, which on many machines is no address of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        device.distributed_backend,
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        context_parallel_size=context_size,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    random.seed(seed)
    np.random.seed(seed)
    model_parallel_cuda_manual_seed(seed)
    groups = {
        "tp_group": mpu.get_tensor_model_parallel_group(),
        "pp_group": mpu.get_pipeline_model_parallel_group(),
        "cp_group": mpu.get_context_parallel_group(),
        "dp_group": mpu.get_data_parallel_group(),
    }
    return ParallelState(
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=tensor_size,
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=pipeline_size,
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=context_size,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        **cast(dict[str, dist.ProcessGroup], groups),
    )


def destroy_parallel() -> None:
    """Tear down Megatron's groups and torch.distributed, and end their threads."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    mpu.destroy_model_parallel()
    dist.destroy_process_group()
    # A group lives on in Megatron's cache of rotary embeddings and in the reference cycles of modules, and gloo's
    # threads with it, each waking a hundred times a second.
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
