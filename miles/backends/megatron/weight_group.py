"""A torch.distributed group that a training rank shares with rollout engines, beside the training group itself."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous


def join_group(
    *, backend: str, init_method: str, world_size: int, rank: int, group_name: str, timeout_s: float = 300.0
) -> dist.ProcessGroup:
    """Join a group that spans processes of different default groups.

    torch.distributed only makes groups within its default one, so this takes the steps of `init_process_group` without
    touching it. Name and store prefix are those that SGLang's /init_weights_update_group uses on the other side.

    Args:
        backend: "gloo" or "nccl".
        init_method: "tcp://HOST:PORT" where rank 0 listens.
        timeout_s: Seconds to wait for the others, and for each collective.

    Raises:
        RuntimeError, torch.distributed.DistError: Not everybody came in time.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
