"""Spans of one step: order, overlap, and how long a lane was busy."""

import pytest

from miles.ray.timeline import Timeline


def timeline(*spans: tuple[str, str, float, float]) -> Timeline:
    made = Timeline()
    made.spans = list(spans)
    return made


def test_busy_counts_overlapping_spans_once() -> None:
    spans = timeline(("actor", "log_probs", 1.0, 2.0), ("actor", "log_probs", 1.5, 4.0), ("actor", "actor", 6.0, 7.0))
    assert spans.busy("actor") == pytest.approx(4.0)
    assert spans.busy("critic") == 0.0


def test_seconds_of_a_stage_that_ran_twice_leave_out_what_lay_between() -> None:
    spans = timeline(("critic", "values", 1.0, 2.0), ("critic", "critic", 2.0, 5.0), ("critic", "values", 5.0, 6.5))
    assert spans.seconds("values") == pytest.approx(2.5)
    assert spans.seconds("sync") is None


def test_span_that_raises_is_not_recorded_and_json_is_in_order() -> None:
    spans = Timeline()
    with pytest.raises(KeyError), spans.span("actor", "actor"):
        raise KeyError
    with spans.span("critic", "critic"), spans.span("actor", "actor"):
        pass
    assert [(lane, name) for lane, name, _, _ in spans.to_json()] == [("critic", "critic"), ("actor", "actor")]
    assert all(0 <= start <= end for _, _, start, end in spans.to_json())
