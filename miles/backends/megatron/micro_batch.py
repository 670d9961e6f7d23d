"""From rows of Python lists to the tensors of one micro-batch, with no Python loop over tokens. Needs no Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from miles.backends.megatron.context_parallel import join_tokens, token_owners


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one micro-batch; T counts the response tokens of all its rows, in row order.

    Padded: `input_ids` is [rows, longest], filled on the right. Packed: [1, tokens], with the bounds of each
    sequence in `cu_seqlens`. Either way a response token is predicted by the model output at the position just
    before it. Under context parallelism this rank feeds its share of every sequence and predicts L of the T tokens;
    everything else is about all T.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None
    """int32 [sequences + 1] when packed; of whole sequences, also where ranks share them."""
    max_seqlen: int
    positions_L: torch.Tensor
    """Places in the flattened output that predict this rank's response tokens."""
    targets_L: torch.Tensor
    """Token ids of the response tokens that this rank predicts."""
    places_L: torch.Tensor | None
    """Which of the T response tokens they are; None where they are all."""
    context_group: dist.ProcessGroup | None
    mask_T: torch.Tensor
    """Bool: the token counts in the loss."""
    row_T: torch.Tensor
    """Which row of the micro-batch each response token belongs to."""
    sequence_tokens_B: torch.Tensor
    """Trainable tokens of the whole sequence, of which a row may be one segment, that each of B rows belongs to."""
    columns: dict[str, torch.Tensor]
    """Further per-token columns, float32 [T]."""
    sample_indices: list[int]
    response_lengths: list[int]

    def predictions(self, outputs_S: torch.Tensor) -> torch.Tensor:
        """The outputs that predict the T response tokens, from those of all S positions of this rank, [S, ...]."""
        return self.whole(outputs_S.index_select(0, self.positions_L))

    def whole(self, x_L: torch.Tensor) -> torch.Tensor:
        """Numbers of all T response tokens from those that this rank predicts, [L, ...] -> [T, ...]."""
        if self.places_L is None:
            return x_L
        assert self.context_group is not None
        return join_tokens(x_L, self.places_L, total=len(self.mask_T), group=self.context_group)


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
    context_group: dist.ProcessGroup | None = None,
) -> MicroBatch:
    """Gather `rows` of a column batch into tensors on `device`.

    Args:
        shard: Column batch; see miles.data.batch.
        rows: Row numbers; none makes a micro-batch of padding tokens, which still takes part in every collective.
        columns: Names of the per-token columns to carry along.
        packed: One row after another without padding, instead of one row per line.
        length_multiple: This rank's sequence dimension is filled up to a multiple of this (sequence parallelism
            splits it).
        context_group: Ranks that share each sequence; None for one rank.
    """
    tokens = [shard["tokens"][row] for row in rows]
    lengths_B = np.array([len(t) for t in tokens], dtype=np.int64)
    responses_B = np.array([shard["response_lengths"][row] for row in rows], dtype=np.int64)
    masks = [shard["loss_masks"][row] for row in rows]
    if "sequence_tokens" in shard:
        sequence_tokens_B = [shard["sequence_tokens"][row] for row in rows]
    else:
        sequence_tokens_B = [np.count_nonzero(mask) for mask in masks]
    chunks = 1 if context_group is None else 2 * context_group.size()

    if packed:
        filled_B = _round_up(lengths_B, chunks)
        total = int(filled_B.sum())
        rest = int(_round_up(np.int64(max(total, 1)), chunks * length_multiple)) - total
        filled_B = np.append(filled_B, rest) if rest else filled_B
        lines = 1
    else:
        lines = max(len(rows), 1)
        filled_B = np.full(lines, _round_up(lengths_B.max(initial=1), chunks * length_multiple))
    start_B = np.cumsum(filled_B) - filled_B
    place_B = start_B[: len(rows)]
    flat_ids = np.zeros(int(filled_B.sum()), dtype=np.int64)
    flat_ids[_ranges(place_B, lengths_B)] = _concatenate(tokens, np.int64)
    flat_positions = _ranges(np.zeros_like(filled_B), filled_B)
    predicting_T = _ranges(place_B + lengths_B - responses_B - 1, responses_B)
    positions_L, targets_L, places_L = predicting_T, flat_ids[predicting_T + 1], None
    if context_group is not None:
        owner, place = token_owners(filled_B, size=context_group.size())
        mine = owner == context_group.rank()
        flat_ids, flat_positions = flat_ids[mine], flat_positions[mine]
        places_L = np.flatnonzero(mine[predicting_T])
        positions_L, targets_L = place[predicting_T[places_L]], targets_L[places_L]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return MicroBatch(
        input_ids=put(flat_ids.reshape(lines, -1)),
        position_ids=put(flat_positions.reshape(lines, -1)),
        cu_seqlens=put(np.append(start_B, start_B[-1] + filled_B[-1]).astype(np.int32)) if packed else None,
        max_seqlen=int(filled_B.max()),
        positions_L=put(positions_L),
        targets_L=put(targets_L),
        places_L=None if places_L is None else put(places_L),
        context_group=context_group,
        mask_T=put(_concatenate(masks, np.bool_)),
        row_T=put(np.repeat(np.arange(len(rows)), responses_B)),
        sequence_tokens_B=put(np.array(sequence_tokens_B, dtype=np.int64)),
        columns={name: put(_concatenate([shard[name][row] for row in rows], np.float32)) for name in columns},
        sample_indices=[int(shard["sample_indices"][row]) for row in rows],
        response_lengths=responses_B.tolist(),
    )


def _round_up(lengths: Any, multiple: int) -> Any:
    return -(-lengths // multiple) * multiple


def _ranges(start_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each length, one after another."""
    return np.arange(int(length_B.sum())) + np.repeat(start_B - (np.cumsum(length_B) - length_B), length_B)


def split_by_row(numbers: torch.Tensor, micro_batch: MicroBatch) -> dict[int, np.ndarray]:
    """Per-token results, [T] or [T, n], as {sample index: float32 [response_length] or [response_length, n]}."""
    pieces = numbers.detach().float().cpu().split(micro_batch.response_lengths)
    return {index: piece.numpy().copy() for index, piece in zip(micro_batch.sample_indices, pieces, strict=True)}
