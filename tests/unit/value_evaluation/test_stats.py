"""Explained variance, rank coverage and the gate: formulas A6.1 to A6.3 and A6.5, faults 66 to 68."""

import json
import math
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.value_evaluation import (
    VALUE_EVAL_REPORT_SCHEMA,
    ValueEvalStats,
    build_rank_report,
    combine_rank_stats,
    gate_metrics,
)

FIELDS = ("n", "returns_sum", "returns_sq_sum", "residual_sum", "residual_sq_sum")


def stats(returns, values):
    return ValueEvalStats.from_values(returns=returns, values=values)


def ev_by_two_passes(returns, values) -> float:
    """Var(residual) / Var(return) by centring first, in exact arithmetic."""
    exact = [Fraction(r) for r in returns]
    residuals = [Fraction(r) - Fraction(v) for r, v in zip(returns, values, strict=True)]

    def variance(xs):
        mean = sum(xs) / len(xs)
        return sum((x - mean) ** 2 for x in xs) / len(xs)

    return float(1 - variance(residuals) / variance(exact))


def test_stats_known_answer():
    assert VALUE_EVAL_REPORT_SCHEMA == "miles.value-pretrain-eval.v2"
    result = stats([0, 1, 1, 0], [0.25, 0.75, 0.5, 0.25])
    assert asdict(result) == {
        "n": 4, "returns_sum": 2.0, "returns_sq_sum": 2.0, "residual_sum": 0.25, "residual_sq_sum": 0.4375,
    }  # fmt: skip
    assert result.metrics() == {
        "active_targets": 4,
        "target_mean": 0.5,
        "target_variance": 0.25,
        "residual_mean": 0.0625,
        "residual_variance": 0.10546875,
        "explained_variance": 0.578125,
    }


def test_stats_constant_bias_is_invisible_to_ev_and_seen_by_r_squared():
    result = stats([0.0, 1.0, 1.0, 0.0], [10.0, 11.0, 11.0, 10.0])
    assert result.metrics()["explained_variance"] == 1.0
    bias = result.bias_metrics()
    assert bias["mean_residual"] == -10.0
    assert bias["r_squared"] == 1.0 - 100.0 / 0.25


@pytest.mark.parametrize("returns", [[1.0, 1.0, 1.0], [0.0, 0.0], [0.5, 0.5 + 1e-5]])
def test_stats_zero_target_variance_is_undefined_and_no_number(returns):
    with pytest.raises(ValueError, match="zero target variance; explained variance is undefined"):
        stats(returns, [0.3] * len(returns)).metrics()


def test_stats_one_target_is_refused():
    with pytest.raises(ValueError, match="explained variance requires at least two active targets"):
        stats([1.0], [0.5]).metrics()


def test_stats_of_two_constant_halves_is_the_ev_of_the_whole():
    whole = stats([0, 0, 1, 1], [0.1, 0.2, 0.7, 0.9])
    parts = stats([0, 0], [0.1, 0.2]) + stats([1, 1], [0.7, 0.9])
    assert parts.metrics()["explained_variance"] == pytest.approx(whole.metrics()["explained_variance"], abs=1e-15)


@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1.0), (1e4, 1.0), (1e4, 3e-4), (-1e6, 1.0), (1e12, 1.0)])
def test_stats_far_from_zero_match_two_passes(offset, spread):
    rng = np.random.default_rng(5)
    returns = (offset + spread * rng.normal(size=500)).tolist()
    values = (np.array(returns) + 0.5 * spread * rng.normal(size=500)).tolist()
    expected = ev_by_two_passes(returns, values)
    assert stats(returns, values).metrics()["explained_variance"] == pytest.approx(expected, abs=1e-15)
    # Through ranks and JSON, as a report carries them.
    ranks = []
    for rank, part in enumerate((slice(0, 100), slice(100, 500))):
        one = stats(returns[part], values[part])
        ranks.append({"dp_rank": rank, "sample_indices": [rank], "x": asdict(one), "sum_tails": {"x": one.tails()}})
    total = combine_rank_stats(
        json.loads(json.dumps(ranks)), expected_dp_size=2, expected_sample_indices=[0, 1], stats_field="x"
    )
    assert total.metrics() == stats(returns, values).metrics()


def test_stats_values_ten_thousand_apart_match_two_passes():
    rng = np.random.default_rng(6)
    returns = (1e4 * rng.integers(0, 2, size=400) + rng.normal(size=400)).tolist()
    values = (np.array(returns) + rng.normal(size=400)).tolist()
    actual = stats(returns, values).metrics()["explained_variance"]
    assert actual == pytest.approx(ev_by_two_passes(returns, values), abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e8, 1e8), st.floats(-1e8, 1e8)), min_size=1, max_size=12),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_stats_sums_are_exact_in_any_order_and_grouping(pairs, cut, rng):
    returns, values = map(list, zip(*pairs, strict=True))
    residuals = [r - v for r, v in pairs]
    exact = [
        sum(map(Fraction, returns)), sum(Fraction(r) ** 2 for r in returns),
        sum(map(Fraction, residuals)), sum(Fraction(e) ** 2 for e in residuals),
    ]  # fmt: skip
    whole = stats(returns, values)
    # Below 1e-140 a square's own rounding is no float64 any more.
    if all(x == 0 or abs(x) > 1e-140 for x in (*returns, *residuals)):
        assert list(whole.sums()) == exact
        assert list(asdict(whole).values())[1:] == [float(x) for x in exact]
    rng.shuffle(pairs)
    parts = [part for part in (pairs[:cut], pairs[cut:]) if part]
    again = ValueEvalStats.total([stats(*map(list, zip(*part, strict=True))) for part in parts])
    assert again == whole
    assert again.sums() == whole.sums()


def test_stats_from_mapping_with_tails_of_other_sums_is_refused():
    whole = stats([0.1, 0.2, 0.7], [0.3, 0.1, 0.9])
    again = ValueEvalStats.from_mapping(asdict(whole), whole.tails())
    assert again.sums() == whole.sums()
    with pytest.raises(ValueError, match=r"value statistics returns_sum is 1\.5, its exact sum rounds to 1\.75"):
        ValueEvalStats.from_mapping({**asdict(whole), "returns_sum": 1.5}, {**whole.tails(), "returns_sum": [0.25]})
    with pytest.raises(ValueError, match="tails must be lists named returns_sum"):
        ValueEvalStats.from_mapping(asdict(whole), {"returns_sum": []})


def test_stats_sum_that_overflows_is_refused():
    for returns in ([1e200, 1.0], [1.7e308, 1.7e308], [math.inf, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="value statistics: a sum is not finite"):
            stats(returns, [0.0, 0.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.floats(-2, 2)), min_size=2, max_size=30))
def test_stats_equal_two_passes_and_numpy(pairs):
    returns, values = map(list, zip(*pairs, strict=True))
    if len(set(returns)) < 2:
        with pytest.raises(ValueError, match="zero target variance"):
            stats(returns, values).metrics()
        return
    actual = stats(returns, values).metrics()
    assert actual["explained_variance"] == pytest.approx(ev_by_two_passes(returns, values), abs=1e-12)
    residuals = np.array(returns) - np.array(values)
    assert actual["explained_variance"] == pytest.approx(1 - residuals.var() / np.var(returns), abs=1e-9)


def test_stats_negative_variance_within_rounding_is_zero_and_beyond_is_refused():
    good = {"n": 2, "returns_sum": 1.0, "returns_sq_sum": 1.0}
    almost = ValueEvalStats(**good, residual_sum=2.0, residual_sq_sum=2.0 - 1e-13)
    assert almost.metrics()["residual_variance"] == 0.0
    assert almost.metrics()["explained_variance"] == 1.0
    with pytest.raises(ValueError, match="contradict each other"):
        ValueEvalStats(**good, residual_sum=2.0, residual_sq_sum=1.0).metrics()


VALID = {"n": 2, "returns_sum": 1.0, "returns_sq_sum": 1, "residual_sum": 0.0, "residual_sq_sum": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "value statistics n must be an integer of at least 1"),
        ({"n": True}, "value statistics n must be an integer"),
        ({"n": 2.0}, "value statistics n must be an integer"),
        ({"returns_sum": float("nan")}, "value statistics returns_sum must be a finite number"),
        ({"returns_sq_sum": None}, "value statistics returns_sq_sum must be a finite number"),
        ({"residual_sum": True}, "value statistics residual_sum must be a finite number"),
        ({"residual_sq_sum": float("inf")}, "value statistics residual_sq_sum must be a finite number"),
    ],
)
def test_stats_from_mapping_refuses_naming_the_field(changes, message):
    assert asdict(ValueEvalStats.from_mapping({**VALID, "other": 1})) == VALID
    with pytest.raises(ValueError, match=message):
        ValueEvalStats.from_mapping({**VALID, **changes})
    with pytest.raises(ValueError, match="must be a mapping"):
        ValueEvalStats.from_mapping(None)


def rank(dp_rank, rows, **changes):
    return {"dp_rank": dp_rank, "sample_indices": rows, **VALID, **changes}


def test_combine_sums_ranks_in_any_order_and_skips_none():
    reports = [rank(1, [9]), None, rank(0, [3], returns_sum=0.0, returns_sq_sum=0.0), None]
    total = combine_rank_stats(reports, expected_dp_size=2, expected_sample_indices=(9, 3), expected_active_targets=4)
    assert asdict(total) == {**VALID, "n": 4}


def test_combine_reads_a_named_field():
    reports = [{"dp_rank": 0, "sample_indices": [1, 2], "token_weighted": VALID}]
    total = combine_rank_stats(
        reports, expected_dp_size=1, expected_sample_indices=[2, 1], stats_field="token_weighted"
    )
    assert total.n == 2
    with pytest.raises(ValueError, match="must be a mapping"):
        combine_rank_stats(
            reports, expected_dp_size=1, expected_sample_indices=[2, 1], stats_field="trajectory_weighted"
        )


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([rank(0, [3, 9])], "expected 2 data-parallel reports, got 1"),
        ([rank(0, [3]), rank(1, [9]), rank(2, [])], "expected 2 data-parallel reports, got 3"),
        ([rank(0, [3]), rank(0, [9])], r"must cover data-parallel ranks 0\.\.1"),
        ([rank(0, [3]), rank(2, [9])], r"must cover data-parallel ranks 0\.\.1"),
        ([rank(0, [3]), rank(True, [9])], "integer dp_rank"),
        ([rank(0, [3]), rank("1", [9])], "integer dp_rank"),
        ([rank(0, [3]), rank(1, [4])], r"sample coverage differs from the deterministic batch plan: missing \[9\]"),
        ([rank(0, [3, 9]), rank(1, [9])], r"sample coverage differs .* unexpected \[9\]"),
        ([rank(0, [3]), rank(1, (9,))], "sample_indices must be a list of integers"),
        ([rank(0, [3]), rank(1, [9.0])], "sample_indices must be a list of integers"),
    ],
)
def test_combine_coverage_that_differs_is_a_runtime_error(reports, message):
    with pytest.raises(RuntimeError, match=message):
        combine_rank_stats(reports, expected_dp_size=2, expected_sample_indices=(3, 9))


def test_combine_active_targets_that_differ_are_a_runtime_error():
    with pytest.raises(RuntimeError, match="active-target coverage differs from the dataset: expected 3, got 2"):
        combine_rank_stats([rank(0, [3])], expected_dp_size=1, expected_sample_indices=[3], expected_active_targets=3)


def test_combine_bad_statistic_is_a_value_error():
    with pytest.raises(ValueError, match="residual_sum"):
        combine_rank_stats([rank(0, [3], residual_sum=None)], expected_dp_size=1, expected_sample_indices=[3])


PERFECT = ValueEvalStats(n=2, returns_sum=1.0, returns_sq_sum=1.0, residual_sum=0.0, residual_sq_sum=0.0)
NEGATIVE = ValueEvalStats(n=2, returns_sum=1.0, returns_sq_sum=1.0, residual_sum=0.0, residual_sq_sum=0.72)
ZERO = ValueEvalStats(n=2, returns_sum=1.0, returns_sq_sum=1.0, residual_sum=0.0, residual_sq_sum=0.5)
AWFUL = ValueEvalStats(n=2, returns_sum=1.0, returns_sq_sum=1.0, residual_sum=0.0, residual_sq_sum=9.0)


@pytest.mark.parametrize(
    ("batches", "passed", "aggregate", "majority", "positive", "required"),
    [
        ([PERFECT], True, True, True, 1, 1),
        ([PERFECT, PERFECT, NEGATIVE], True, True, True, 2, 2),
        ([PERFECT, NEGATIVE], False, True, False, 1, 2),
        ([PERFECT, ZERO, ZERO], False, True, False, 1, 2),
        ([PERFECT, PERFECT, AWFUL], False, False, True, 2, 2),
        ([NEGATIVE], False, False, False, 0, 1),
    ],
)
def test_gate_needs_positive_aggregate_and_strict_majority(batches, passed, aggregate, majority, positive, required):
    total, gate = gate_metrics([{"sufficient_stats": asdict(batch), "metrics": batch.metrics()} for batch in batches])
    assert gate.pop("aggregate_metrics") == total.metrics()
    assert total.n == 2 * len(batches)
    assert gate == {
        "passed": passed,
        "aggregate_ev_positive": aggregate,
        "strict_majority_batch_ev_positive": majority,
        "positive_batches": positive,
        "evaluable_batches": len(batches),
        "required_positive_batches": required,
    }
    assert gate_metrics(batches)[1]["passed"] is passed


def test_gate_recomputes_figures_it_is_given():
    lie = {"sufficient_stats": asdict(NEGATIVE), "metrics": {"explained_variance": 0.9}}
    assert gate_metrics([lie])[1]["passed"] is False


def test_gate_without_batches_is_refused():
    with pytest.raises(ValueError, match="at least one evaluation batch"):
        gate_metrics([])


def test_gate_constant_returns_are_refused():
    constant = stats([1.0, 1.0], [0.2, 0.3])
    with pytest.raises(ValueError, match="zero target variance"):
        gate_metrics([PERFECT, constant])


def test_rank_report_two_weightings_by_hand():
    report = build_rank_report(
        dp_rank=1,
        sample_indices=[4, 2],
        values=[[0.5, math.nan, 1.0], [0.25, 0.0]],
        returns=[[1.0, 1.0, 1.0], [0.0, 0.0]],
        loss_masks=[[1, 0, 1], [1, 1]],
    )
    assert (report["dp_rank"], report["sample_indices"]) == (1, [4, 2])
    assert report["token_weighted"] == dict(zip(FIELDS, (4, 2.0, 2.0, 0.25, 0.3125), strict=True))
    # Mean predictions .75 and .125 against labels 1 and 0.
    assert report["trajectory_weighted"] == dict(zip(FIELDS, (2, 1.0, 1.0, 0.125, 0.078125), strict=True))
    assert report["values"] == [[0.5, None, 1.0], [0.25, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": [[math.nan, 0.0]]}, "sample index 5: the critic predicts a value that is not finite"),
        ({"returns": [[0.0, 1.0]]}, "sample index 5: must have one scalar active label, got 2"),
        ({"loss_masks": [[0, 0]]}, "sample index 5: no active target"),
    ],
)
def test_rank_report_refuses_what_has_no_statistic(changes, message):
    row = {"values": [[0.1, 0.2]], "returns": [[1.0, 1.0]], "loss_masks": [[1, 1]], **changes}
    with pytest.raises(ValueError, match=message):
        build_rank_report(dp_rank=0, sample_indices=[5], **row)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=st.integers(2, 8))
def test_rank_reports_any_layout_gives_the_same_figures(data, rows):
    """Rows dealt to one rank or to several: coverage holds and every figure agrees."""
    labels = [float(i % 2) for i in range(rows)]
    values = [data.draw(st.lists(st.floats(-1, 2), min_size=1, max_size=4)) for _ in range(rows)]
    owners = [data.draw(st.integers(0, 2)) for _ in range(rows)]

    def reports(owner_of, size):
        made = []
        for r in range(size):
            mine = [i for i in range(rows) if owner_of[i] == r]
            if mine:
                made.append(
                    build_rank_report(
                        dp_rank=len(made),
                        sample_indices=mine,
                        values=[values[i] for i in mine],
                        returns=[[labels[i]] * len(values[i]) for i in mine],
                        loss_masks=[[1] * len(values[i]) for i in mine],
                    )
                )
        return made

    one, several = reports([0] * rows, 1), reports(owners, 3)
    for field in ("token_weighted", "trajectory_weighted"):
        expected = combine_rank_stats(one, expected_dp_size=1, expected_sample_indices=range(rows), stats_field=field)
        actual = combine_rank_stats(
            several, expected_dp_size=len(several), expected_sample_indices=range(rows), stats_field=field
        )
        assert actual == expected
        assert actual.sums() == expected.sums()
