"""Wilson interval: published values, the roots of its defining equation, and coverage by enumeration."""

import math

import pytest

from miles.reporting.wilson import wilson_interval


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_published_values(successes, count, low, high):
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_bounds_are_z_standard_errors_away():
    low, high = wilson_interval(30, 80)
    for bound in (low, high):
        assert abs(30 / 80 - bound) / math.sqrt(bound * (1 - bound) / 80) == pytest.approx(1.959964)


def test_wilson_interval_covers_about_95_percent():
    share, count = 0.3, 50
    covered = 0.0
    for k in range(count + 1):
        low, high = wilson_interval(k, count)
        if low <= share <= high:
            covered += math.comb(count, k) * share**k * (1 - share) ** (count - k)
    assert 0.93 < covered < 0.98


@pytest.mark.parametrize(("successes", "count"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_impossible_counts_refused(successes, count):
    with pytest.raises(ValueError, match="must"):
        wilson_interval(successes, count)
