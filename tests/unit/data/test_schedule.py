"""Schedules: every row once, equal micro-batch counts, token budgets, balance. Checked over random inputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.schedule import balanced_partition, build_schedule, localize, row_costs


def rows_of(rank: list[list[int]]) -> list[int]:
    return [row for micro_batch in rank for row in micro_batch]


def evenly_dealt(costs: np.ndarray, num_parts: int) -> float:
    """Heaviest part when rows are dealt in descending order, one to each part in turn, back and forth."""
    loads = np.zeros(num_parts)
    for start, row in enumerate(np.argsort(-costs)):
        lap, place = divmod(start, num_parts)
        loads[place if lap % 2 == 0 else num_parts - 1 - place] += costs[row]
    return loads.max()


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    dp_size=st.integers(1, 9),
    budget=st.integers(100, 400),
)
def test_build_schedule_dynamic_keeps_its_invariants(lengths, dp_size, budget):
    dp_size = min(dp_size, len(lengths))
    schedule = build_schedule(lengths, dp_size=dp_size, max_tokens=budget, hidden_size=64)
    assert sorted(row for rank in schedule for row in rows_of(rank)) == list(range(len(lengths)))
    assert len(schedule) == dp_size
    assert len({len(rank) for rank in schedule}) == 1
    counts = [len(rows_of(rank)) for rank in schedule]
    assert min(counts) >= 1
    if max(counts) - min(counts) > 1:
        # only where equal counts weigh more than a hundredth above the least possible
        costs = row_costs(lengths, hidden_size=64)
        heaviest = max(costs[rows_of(rank)].sum() for rank in schedule)
        assert heaviest < evenly_dealt(costs, dp_size)
    for rank in schedule:
        assert all(sum(lengths[row] for row in micro_batch) <= budget for micro_batch in rank)
        # an empty micro-batch only where every other one of that rank is down to a single row
        if any(not micro_batch for micro_batch in rank):
            assert all(len(micro_batch) <= 1 for micro_batch in rank)
    assert schedule == build_schedule(lengths, dp_size=dp_size, max_tokens=budget, hidden_size=64)


@settings(max_examples=80, deadline=None)
@given(dp_size=st.integers(1, 6), micro_batch_size=st.integers(1, 5), per_rank=st.integers(1, 6))
def test_build_schedule_fixed_deals_contiguous_blocks(dp_size, micro_batch_size, per_rank):
    num_rows = dp_size * micro_batch_size * per_rank
    schedule = build_schedule([3] * num_rows, dp_size=dp_size, micro_batch_size=micro_batch_size)
    assert [row for rank in schedule for row in rows_of(rank)] == list(range(num_rows))
    assert all(len(rank) == per_rank for rank in schedule)
    assert all(len(micro_batch) == micro_batch_size for rank in schedule for micro_batch in rank)


def test_build_schedule_ten_rows_on_four_ranks_balances_tokens():
    # faults.md row 61
    lengths = [9, 8, 7, 6, 5, 5, 4, 3, 2, 1]
    schedule = build_schedule(lengths, dp_size=4, max_tokens=100, hidden_size=4096)
    assert sorted(len(rows_of(rank)) for rank in schedule) == [2, 2, 3, 3]
    tokens = [sum(lengths[row] for row in rows_of(rank)) for rank in schedule]
    assert max(tokens) - min(tokens) <= 1


def test_build_schedule_full_length_rows_leave_an_empty_micro_batch_where_a_rank_has_fewer():
    schedule = build_schedule([5] * 10, dp_size=4, max_tokens=5, hidden_size=64)
    assert [[len(micro_batch) for micro_batch in rank] for rank in schedule] == [
        [1, 1, 1],
        [1, 1, 1],
        [1, 1, 0],
        [1, 1, 0],
    ]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 3, 3], {"dp_size": 2, "micro_batch_size": 1}, "3 rows do not divide into 2 data-parallel ranks"),
        ([3] * 4, {"dp_size": 2, "micro_batch_size": 3}, "do not divide"),
        ([3] * 4, {"dp_size": 1, "micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ([3, 9], {"dp_size": 1, "max_tokens": 8}, "row 1 has 9 tokens, more than the 8"),
        ([3], {"dp_size": 2, "max_tokens": 8}, "1 rows cannot be dealt to 2"),
        ([3, 0], {"dp_size": 1, "max_tokens": 8}, "row 1 has 0 tokens"),
        ([3], {"dp_size": 0, "max_tokens": 8}, "dp_size must be at least 1"),
        ([3], {"dp_size": 1}, "either micro_batch_size or max_tokens"),
        ([3], {"dp_size": 1, "max_tokens": 8, "micro_batch_size": 1}, "either micro_batch_size or max_tokens"),
    ],
)
def test_build_schedule_bad_arguments_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        build_schedule(lengths, hidden_size=64, **options)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_rows=st.integers(1, 40), num_parts=st.integers(1, 6))
def test_balanced_partition_loses_and_repeats_no_row(seed, num_rows, num_parts):
    costs = np.random.default_rng(seed).lognormal(0, 1, num_rows)
    parts = balanced_partition(costs, num_parts=num_parts)
    assert sorted(row for part in parts for row in part) == list(range(num_rows))
    if num_rows >= num_parts:
        assert all(parts)


def test_balanced_partition_small_case_comes_near_the_best_by_enumeration():
    from itertools import combinations

    rng = np.random.default_rng(3)
    for _ in range(20):
        costs = rng.lognormal(0, 0.6, 10)
        best = min(
            max(costs[list(half)].sum(), costs.sum() - costs[list(half)].sum()) for half in combinations(range(10), 5)
        )
        got = max(costs[part].sum() for part in balanced_partition(costs, num_parts=2))
        assert got <= 1.03 * best


@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_build_schedule_realistic_lengths_within_one_percent_of_even(num_ranks):
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(3000), 0.8, 4096), 128, 8192).astype(int).tolist()
    costs = row_costs(lengths, hidden_size=1024)
    schedule = build_schedule(lengths, dp_size=num_ranks, max_tokens=16384, hidden_size=1024)
    loads = [costs[rows_of(rank)].sum() for rank in schedule]
    assert max(loads) / np.mean(loads) < 1.01


def test_build_schedule_row_longer_than_a_fair_share_has_a_rank_to_itself():
    lengths = [1000, *[100] * 15]
    schedule = build_schedule(lengths, dp_size=4, max_tokens=1000, hidden_size=1024)
    assert sorted(len(rows_of(rank)) for rank in schedule) == [1, 5, 5, 5]
    (alone,) = (rows_of(rank) for rank in schedule if len(rows_of(rank)) == 1)
    assert alone == [0]


def test_row_costs_attention_weighs_in_with_length():
    # at L = 12 h causal attention costs as much as the dense layers, so the row costs twice its tokens
    np.testing.assert_allclose(row_costs([12, 120], hidden_size=10), [12 * 1.1, 120 * 2.0])


def test_localize_numbers_rows_in_training_order():
    rows, local = localize([[7, 3], [], [5]])
    assert rows == [7, 3, 5]
    assert local == [[0, 1], [], [2]]
