"""Which rows each data-parallel rank trains on, and in which micro-batches.

Invariants of every schedule: each row appears exactly once; every rank has a row and runs the same number of
micro-batches (pipeline and gradient synchronisation wait for one another); row counts of two ranks differ by at most
one, unless that would cost more than a hundredth of the balance; the result depends on the arguments alone.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Schedule = list[list[list[int]]]

_BALANCED = 1.005  # heaviest part over the least possible below which no row is swapped any more
_PAIRS = 1 << 22  # exchanges weighed at once
_TOLERATED = 1.01  # heaviest part over the least possible above which row counts may differ


def row_costs(lengths: Sequence[int], *, hidden_size: int) -> np.ndarray:
    """Relative training FLOPs of rows of `lengths` tokens, float64 [N], in units of one token's dense layers.

    A transformer layer spends about 24 h^2 operations per token in its matrices and, causally, 2 h L in attention
    over L tokens, so a row costs L * (1 + L / (12 h)).
    """
    length_N = np.asarray(lengths, dtype=np.float64)
    return length_N * (1.0 + length_N / (12.0 * hidden_size))


def build_schedule(
    lengths: Sequence[int],
    *,
    dp_size: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    hidden_size: int | None = None,
) -> Schedule:
    """Deal rows to data-parallel ranks and micro-batches: `schedule[rank][micro_batch]` is a list of row numbers.

    Fixed mode (`micro_batch_size`): rank r takes the r-th contiguous block of rows, cut into micro-batches of exactly
    that many rows. Dynamic mode (`max_tokens`): rows are dealt so that ranks have equal FLOPs, then packed so that no
    micro-batch holds more than `max_tokens` tokens. A micro-batch is empty only where a rank has fewer rows than the
    others have micro-batches (it still has to take part in the collectives).

    Args:
        lengths: tokens per row (prompt and response), each >= 1.
        hidden_size: model width, weighs attention against the dense layers where FLOPs are compared (dynamic mode).

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
    assert max_tokens is not None and hidden_size is not None, "FLOPs depend on the model's width"
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
    """Split rows into parts of nearly equal total cost.

    Row counts differ by at most one, unless the heaviest part would then be more than a hundredth above the least
    possible (the mean, or the costliest row).
    """
    highest = float(costs.max(initial=0.0))
    tolerated = _TOLERATED * max(float(costs.sum()) / num_parts, highest)
    # With equal counts the costliest row shares its part with as many others as every part has.
    company = np.sort(costs)[: max(len(costs) // num_parts - 1, 0)].sum()
    part_N = _deal_evenly(costs, num_parts)
    heaviest = _swap(part_N, costs, num_parts, max_swaps if highest + company <= tolerated else 0)
    if heaviest > tolerated:
        uneven_N = _deal_to_lightest(costs, num_parts)
        if _swap(uneven_N, costs, num_parts, max_swaps) < heaviest:
            part_N = uneven_N
    order = np.argsort(part_N, kind="stable")
    ends = np.cumsum(np.bincount(part_N, minlength=num_parts))[:-1]
    return [rows.tolist() for rows in np.split(order, ends)]


def _deal_evenly(costs: np.ndarray, num_parts: int) -> np.ndarray:
    """Part of each row: rows in descending order, `num_parts` at a time, the heaviest to the lightest part."""
    order = np.argsort(-costs, kind="stable")
    load_P = np.zeros(num_parts)
    part_N = np.empty(len(costs), dtype=np.int64)
    for start in range(0, len(order), num_parts):
        layer = order[start : start + num_parts]
        part_N[layer] = lightest = np.argsort(load_P, kind="stable")[: len(layer)]
        load_P[lightest] += costs[layer]
    return part_N


def _deal_to_lightest(costs: np.ndarray, num_parts: int) -> np.ndarray:
    """Part of each row: rows in descending order, each to the part that is lightest then."""
    part_N = np.empty(len(costs), dtype=np.int64)
    heap = [(0.0, part) for part in range(num_parts)]
    for row in np.argsort(-costs, kind="stable").tolist():
        load, part = heap[0]
        part_N[row] = part
        heapq.heapreplace(heap, (load + float(costs[row]), part))
    return part_N


def _swap(part_N: np.ndarray, costs: np.ndarray, num_parts: int, max_swaps: int) -> float:
    """Lighten the heaviest part by exchanging rows in place, with the lightest or else with any; its load at last."""
    load_P = np.bincount(part_N, weights=costs, minlength=num_parts)
    enough = _BALANCED * max(float(load_P.mean()), float(costs.max(initial=0.0)))
    everything = np.arange(len(costs))
    for _ in range(max_swaps):
        heavy = int(load_P.argmax())
        if load_P[heavy] <= enough:
            break
        ours = np.flatnonzero(part_N == heavy)
        for theirs in (np.flatnonzero(part_N == load_P.argmin()), everything):
            if not len(theirs):
                continue
            # Pairs grow with the square of the rows: look at a share of the heaviest part's where there are millions.
            ours = ours[:: 1 + len(ours) * len(theirs) // _PAIRS]
            # Of all pairs, the one that leaves the heavier of its two parts lightest.
            moved_KM = costs[ours][:, None] - costs[theirs]
            worse_KM = np.maximum(load_P[heavy] - moved_KM, load_P[part_N[theirs]] + moved_KM)
            i, j = divmod(int(worse_KM.argmin()), len(theirs))
            if worse_KM[i, j] < load_P[heavy] * (1 - 1e-9):
                give, take = ours[i], theirs[j]
                other = part_N[take]
                part_N[give], part_N[take] = other, heavy
                load_P[[heavy, other]] += moved_KM[i, j] * np.array([-1.0, 1.0])
                break
        else:
            break
    return float(load_P.max())


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
