"""What ranks with shares of unequal size, or of none, make of the whole."""

from typing import Any

import pytest


def test_whiten_rank_without_tokens_takes_part_and_changes_nothing(ranks: Any) -> None:
    # faults.md row 11: a rank that skipped the reduction left the others waiting for ever
    results = ranks("whiten_share", world_size=2, shares=[[1.0, 2.0, 3.0], []])
    assert results[0] == pytest.approx([-1.2247449, 0.0, 1.2247449], abs=1e-6)
    assert results[1] == []
