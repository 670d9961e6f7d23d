"""From rows of Python lists to the tensors of one micro-batch, with no Python loop over tokens. Needs no Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch; T counts the response tokens of all its rows, in row order.

    Padded: `input_ids` is [rows, longest], filled on the right. Packed: [1, tokens], with the bounds of each
    sequence in `cu_seqlens`. Either way response token t of the micro-batch is predicted by the model output at
    `positions_T[t]` of the flattened output, the position just before the token.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None
    """int32 [sequences + 1] when packed."""
    max_seqlen: int
    positions_T: torch.Tensor
    targets_T: torch.Tensor
    """Token ids of the response."""
    mask_T: torch.Tensor
    """Bool: the token counts in the loss."""
    row_T: torch.Tensor
    """Which row of the micro-batch each response token belongs to."""
    columns: dict[str, torch.Tensor]
    """Further per-token columns, float32 [T]."""
    sample_indices: list[int]
    response_lengths: list[int]


def _concatenate(rows: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if rows else np.zeros(0, dtype=dtype)


def build_micro_batch(
    shard: dict[str, Any],
    rows: Sequence[int],
    *,
    columns: Sequence[str],
    device: torch.device,
    packed: bool = False,
    length_multiple: int = 1,
) -> MicroBatch:
    """Gather `rows` of a column batch into tensors on `device`.

    Args:
        shard: Column batch; see miles.data.batch.
        rows: Row numbers; none makes a micro-batch of one padding token, which still takes part in every collective.
        columns: Names of the per-token columns to carry along.
        packed: One row after another without padding, instead of one row per line.
        length_multiple: The sequence dimension is filled up to a multiple of this (sequence parallelism splits it).
    """
    tokens = [shard["tokens"][row] for row in rows]
    lengths_B = np.array([len(t) for t in tokens], dtype=np.int64)
    responses_B = np.array([shard["response_lengths"][row] for row in rows], dtype=np.int64)
    flat_tokens = _concatenate(tokens, np.int64)
    total = len(flat_tokens)
    cu_seqlens = None

    if packed:
        length = max(1, -(-total // length_multiple)) * length_multiple
        input_ids = np.zeros((1, length), dtype=np.int64)
        input_ids[0, :total] = flat_tokens
        ends = np.cumsum(lengths_B)
        start_B = ends - lengths_B
        bounds = [0, *ends.tolist()] + ([length] if length > total else [])
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        sequence_lengths = np.diff(bounds)
        max_seqlen = int(sequence_lengths.max())
        position_ids = np.concatenate([np.arange(n) for n in sequence_lengths])[None]
    else:
        longest = int(lengths_B.max(initial=1))
        max_seqlen = -(-longest // length_multiple) * length_multiple
        input_ids = np.zeros((max(len(rows), 1), max_seqlen), dtype=np.int64)
        input_ids[: len(rows)][np.arange(max_seqlen) < lengths_B[:, None]] = flat_tokens
        start_B = np.arange(len(rows)) * max_seqlen
        position_ids = np.broadcast_to(np.arange(max_seqlen), input_ids.shape)

    row_T = np.repeat(np.arange(len(rows)), responses_B)
    within_T = np.arange(len(row_T)) - (np.cumsum(responses_B) - responses_B)[row_T]
    positions_T = (start_B + lengths_B - responses_B - 1)[row_T] + within_T

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return MicroBatch(
        input_ids=put(input_ids),
        position_ids=put(position_ids),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        positions_T=put(positions_T),
        targets_T=put(input_ids.reshape(-1)[positions_T + 1]),
        mask_T=put(_concatenate([shard["loss_masks"][row] for row in rows], np.bool_)),
        row_T=put(row_T),
        columns={name: put(_concatenate([shard[name][row] for row in rows], np.float32)) for name in columns},
        sample_indices=[int(shard["sample_indices"][row]) for row in rows],
        response_lengths=responses_B.tolist(),
    )


def split_by_row(numbers: torch.Tensor, micro_batch: MicroBatch) -> dict[int, np.ndarray]:
    """Per-token results, [T] or [T, n], as {sample index: float32 [response_length] or [response_length, n]}."""
    pieces = numbers.detach().float().cpu().split(micro_batch.response_lengths)
    return {index: piece.numpy().copy() for index, piece in zip(micro_batch.sample_indices, pieces, strict=True)}
