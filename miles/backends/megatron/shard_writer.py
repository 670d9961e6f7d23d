"""Writes the shards of a distributed checkpoint from the training process itself.

Megatron's own writer forks a process per file and keeps a manager process for its results: seconds at the first
save, a process that outlives a killed trainer, and a wait for ever when a writer is killed. Here each rank writes
one file in its own thread through torch.distributed.checkpoint; the format is the same and Megatron reads it back.
An error on one rank (a full disk) becomes an error on all.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, version 1, written synchronously."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards; every rank calls it.

        Raises:
            OSError: A rank could not write; the message names the rank and what failed, on every rank.
        """
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        try:
            save_shards(
                mcore_to_pyt_state_dict(state, False),
                storage_writer=FileSystemWriter(
                    checkpoint_dir, single_file_per_rank=True, sync_files=True, thread_count=1
                ),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            free = shutil.disk_usage(checkpoint_dir).free
            # torch's zip writer hides why a write fell short, so say what the disk looks like.
            number = cause.errno if isinstance(cause, OSError) else errno.ENOSPC if free < 1 << 20 else errno.EIO
            message = f"rank {rank} could not write its shard ({free >> 20} MiB free): {cause}"
            raise OSError(number, message, str(checkpoint_dir)) from cause
