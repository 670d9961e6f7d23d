"""Who holds which token, against the definition written out; micro-batches of all ranks put together."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.megatron.context_parallel import token_owners
from miles.backends.megatron.micro_batch import MicroBatch, build_micro_batch


class Group:
    """Rank and size of a process group, all that building a micro-batch asks of it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_token_owners_rank_holds_its_chunk_from_either_end(size: int) -> None:
    lengths = np.array([4, 0, 1, 2]) * 2 * size
    owner, place = token_owners(lengths, size=size)
    tokens = np.arange(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    for rank in range(size):
        held = []
        for start, length in zip(starts, lengths, strict=True):
            chunks = tokens[start : start + length].reshape(2 * size, -1)
            held += [*chunks[rank], *chunks[2 * size - 1 - rank]]
        assert np.array_equal(np.flatnonzero(owner == rank), np.sort(held))
        assert np.array_equal(tokens[owner == rank][np.argsort(place[owner == rank])], held)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
    packed=st.booleans(),
    size=st.integers(1, 4),
    multiple=st.integers(1, 3),
)
def test_micro_batch_ranks_together_hold_each_response_token_once(
    lengths: list[tuple[int, int]], packed: bool, size: int, multiple: int
) -> None:
    draw = np.random.default_rng(len(lengths))
    tokens = [draw.integers(1, 1000, prompt + response).tolist() for prompt, response in lengths]
    responses = [response for _, response in lengths]
    shard: dict[str, Any] = {
        "tokens": tokens,
        "response_lengths": responses,
        "loss_masks": [[1] * n for n in responses],
        "sample_indices": list(range(len(tokens))),
    }

    def build(group: Any) -> MicroBatch:
        return build_micro_batch(
            shard,
            list(range(len(tokens))),
            columns=(),
            device=torch.device("cpu"),
            packed=packed,
            length_multiple=multiple,
            context_group=group,
        )

    parts = [build(Group(rank, size) if size > 1 else None) for rank in range(size)]
    expected = [token for row, n in zip(tokens, responses, strict=True) for token in row[len(row) - n :]]
    before = [token for row, n in zip(tokens, responses, strict=True) for token in row[len(row) - n - 1 : -1]]
    seen = np.full((2, len(expected)), -1)
    for part in parts:
        assert part.input_ids.shape == parts[0].input_ids.shape == part.position_ids.shape
        assert part.input_ids.shape[1] % multiple == 0
        places = slice(None) if part.places_L is None else part.places_L.numpy()
        assert (seen[0, places] == -1).all()
        # The output at a position predicts the token after the one that is fed in there.
        seen[0, places] = part.targets_L.numpy()
        seen[1, places] = part.input_ids.flatten()[part.positions_L].numpy()
    assert seen.tolist() == [expected, before]
    fed = sorted(token for part in parts for token in part.input_ids.flatten().tolist() if token)
    assert fed == sorted(token for row in tokens for token in row)
    if packed:
        bounds = parts[0].cu_seqlens
        assert bounds is not None and int(bounds[-1]) == parts[0].input_ids.numel() * size
        assert parts[0].max_seqlen == int(bounds.diff().max())
