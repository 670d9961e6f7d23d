"""The process group through which a trainer hands its weights to engines, and the buckets that travel in it.

Rank 0 is the trainer; the tensor-parallel ranks of the engines follow. SGLang builds its end with a helper of its own,
so this end is built the same way: a rendezvous at `init_method`, then a store under the group's name, then a group
outside the default one. Only torch is needed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


def join_weight_group(
    init_method: str,
    world_size: int,
    rank: int,
    group_name: str,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    wait_s: float | None = None,
) -> dist.ProcessGroup:
    """Join the group; returns once all `world_size` ranks have come.

    The engines' ranks come by `SGLangClient.init_weights_update_group`, which must run at the same time. A default
    group of this process is neither needed nor touched; where there is one on NCCL, it must have been made without
    `device_id`, or torch would try to split this group from it.

    Args:
        init_method: "tcp://HOST:PORT", where rank 0 opens a store.
        backend: "gloo" (CPU) or "nccl".
        timeout_s: for every broadcast.
        wait_s: for the others to come (None: `timeout_s`).

    Raises:
        RuntimeError: the others did not come in time (torch's own message), or the name is taken in this process.
    """
    timeout = timedelta(seconds=timeout_s)
    wait = timeout if wait_s is None else timedelta(seconds=wait_s)
    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=wait))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=c10d.GroupName(group_name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    # torch asks for this map when a group is destroyed or named in an error.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def leave_weight_group(group: dist.ProcessGroup) -> None:
    """Close this process's end; the engines leave by `destroy_weights_update_group`."""
    dist.destroy_process_group(group)


@dataclass(frozen=True)
class WeightBucket:
    """Tensors of one broadcast: Hugging Face names, dtype names ("float32") and shapes, in sending order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def broadcast_bucket(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Send a bucket's tensors, in the bucket's order, from rank 0 (this process); returns when they are sent.

    The engines must be receiving: `update_weights_from_distributed(..., flattened=True)` runs at the same time.
    """
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    group.broadcast(flat, 0).wait()
