"""Which rows each data-parallel rank trains on, and in which micro-batches.

Invariants of every schedule: each row appears exactly once; every rank runs the same number of micro-batches (pipeline
and gradient synchronisation wait for one another); row counts of two ranks differ by at most one; the result depends
on the arguments alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Schedule = list[list[list[int]]]

_BALANCED = 1.001  # heaviest part over mean below which no row is swapped any more


def row_costs(lengths: Sequence[int], *, hidden_size: int) -> np.ndarray:
    """Relative training FLOPs of rows of `lengths` tokens, float64 [N], in units of one token's dense layers.

    A transformer layer spends 24 h^2 multiply-adds per token in its matrices and 4 h L in attention over L tokens,
    so a row costs L * (1 + L / (6 h)).
    """
    length_N = np.asarray(lengths, dtype=np.float64)
    return length_N * (1.0 + length_N / (6.0 * hidden_size))


def build_schedule(
    lengths: Sequence[int],
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    hidden_size: int = 4096,
) -> Schedule:
    """Deal rows to data-parallel ranks and micro-batches: `schedule[rank][micro_batch]` is a list of row numbers.

    Fixed mode (`micro_batch_size`): rank r takes the r-th contiguous block of rows, cut into micro-batches of exactly
    that many rows. Dynamic mode (`max_tokens`): rows are dealt so that ranks have equal FLOPs, then packed so that no
    micro-batch holds more than `max_tokens` tokens. A micro-batch is empty only where a rank has fewer rows than the
    others have micro-batches (it still has to take part in the collectives).

    Args:
        lengths: tokens per row (prompt and response), each >= 1.
        hidden_size: model width, weighs attention against the dense layers when FLOPs are compared.

    Raises:
        ValueError: both or neither mode given, fewer rows than ranks, rows that cannot be dealt evenly in fixed mode,
            a row longer than `max_tokens`.
    """
    num_rows = len(lengths)
    if (micro_batch_size is None) == (max_tokens is None):
        raise ValueError("a schedule needs either micro_batch_size or max_tokens, not both")
    if dp_size < 1:
        raise ValueError(f"dp_size must be at least 1, got {dp_size}")
    if num_rows < dp_size:
        raise ValueError(f"{num_rows} rows cannot be dealt to {dp_size} data-parallel ranks")
    if min(lengths) < 1:
        raise ValueError(f"row {int(np.argmin(np.asarray(lengths)))} has {min(lengths)} tokens, expected at least 1")
    if micro_batch_size is not None:
        return _fixed_schedule(num_rows, dp_size, micro_batch_size)
    assert max_tokens is not None
    longest = int(np.argmax(np.asarray(lengths)))
    if lengths[longest] > max_tokens:
        raise ValueError(
            f"row {longest} has {lengths[longest]} tokens, more than the {max_tokens} a micro-batch may hold"
            " (max_tokens_per_gpu)"
        )
    costs = row_costs(lengths, hidden_size=hidden_size)
    packed = [_pack(rows, lengths, max_tokens) for rows in balanced_partition(costs, num_parts=dp_size)]
    num_micro_batches = max(len(bins) for bins in packed)
    return [_split_to(bins, costs, num_micro_batches) for bins in packed]


def _fixed_schedule(num_rows: int, dp_size: int, micro_batch_size: int) -> Schedule:
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
    if num_rows % dp_size or (num_rows // dp_size) % micro_batch_size:
        raise ValueError(
            f"{num_rows} rows do not divide into {dp_size} data-parallel ranks x micro-batches of {micro_batch_size}"
        )
    per_rank = num_rows // dp_size
    return [
        [
            list(range(start, start + micro_batch_size))
            for start in range(rank * per_rank, (rank + 1) * per_rank, micro_batch_size)
        ]
        for rank in range(dp_size)
    ]


def balanced_partition(costs: np.ndarray, *, num_parts: int, max_swaps: int = 2000) -> list[list[int]]:
    """Split rows into parts of nearly equal total cost whose row counts differ by at most one.

    Rows are dealt in descending order, `num_parts` at a time, the heaviest to the lightest part; then rows are swapped
    between the heaviest and the lightest part while that narrows the gap. Time N log N + (N / P) P log P.
    """
    order = np.argsort(-costs, kind="stable")
    load_P = np.zeros(num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for start in range(0, len(order), num_parts):
        layer = order[start : start + num_parts]
        lightest = np.argsort(load_P, kind="stable")[: len(layer)]
        load_P[lightest] += costs[layer]
        for part, row in zip(lightest.tolist(), layer.tolist(), strict=True):
            parts[part].append(row)
    for _ in range(max_swaps):
        heavy, light = int(load_P.argmax()), int(load_P.argmin())
        gap = load_P[heavy] - load_P[light]
        if load_P[heavy] <= _BALANCED * load_P.mean() or not parts[light]:
            break
        # of all pairs, the one whose exchange comes closest to halving the gap
        light_costs = costs[parts[light]]
        by_cost = np.argsort(light_costs, kind="stable")
        wanted = costs[parts[heavy]] - gap / 2
        above = np.searchsorted(light_costs[by_cost], wanted)
        last = len(by_cost) - 1
        candidates = by_cost[np.stack([(above - 1).clip(0, last), above.clip(0, last)])]
        miss = np.abs(light_costs[candidates] - wanted)
        side, i = divmod(int(miss.argmin()), len(wanted))
        j = int(candidates[side, i])
        moved = costs[parts[heavy][i]] - light_costs[j]
        if not 1e-12 * max(gap, 1.0) < moved < gap:
            break
        parts[heavy][i], parts[light][j] = parts[light][j], parts[heavy][i]
        load_P[heavy] -= moved
        load_P[light] += moved
    return [sorted(rows) for rows in parts]


def _pack(rows: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each row goes to the fullest bin that still has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens still free, bin), ascending
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        at = bisect_left(room, (int(lengths[row]), -1))
        if at == len(room):
            bins.append([])
            free, number = max_tokens, len(bins) - 1
        else:
            free, number = room.pop(at)
        bins[number].append(row)
        insort(room, (free - int(lengths[row]), number))
    return bins


def _split_to(bins: list[list[int]], costs: np.ndarray, count: int) -> list[list[int]]:
    """Split the costliest bins until there are `count`; pad with empty ones when every bin holds a single row."""
    bins = [sorted(rows) for rows in bins]
    while len(bins) < count:
        splittable = [number for number, rows in enumerate(bins) if len(rows) > 1]
        if not splittable:
            return bins + [[] for _ in range(count - len(bins))]
        widest = max(splittable, key=lambda number: (float(costs[bins[number]].sum()), -number))
        rows = bins[widest]
        halves = balanced_partition(costs[rows], num_parts=2)
        bins[widest] = [rows[i] for i in halves[0]]
        bins.append([rows[i] for i in halves[1]])
    return bins


def localize(micro_batches: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Turn one rank's micro-batches of global rows into (global rows in training order, micro-batches of local rows).

    `select_rows(batch, rows)` with the first gives the rank's shard, to which the second refers.
    """
    rows = [row for micro_batch in micro_batches for row in micro_batch]
    local: list[list[int]] = []
    start = 0
    for micro_batch in micro_batches:
        local.append(list(range(start, start + len(micro_batch))))
        start += len(micro_batch)
    return rows, local
