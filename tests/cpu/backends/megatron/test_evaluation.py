"""A critic's evaluation on real ranks: the same figures on any layout, and whose rows are whose plays no part."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles.value_evaluation import combine_rank_stats, gate_metrics

WEIGHTINGS = ("token_weighted", "trajectory_weighted")
LAYOUTS = {
    "dp2": {"world_size": 2},
    "dp4": {"world_size": 4},
    "tp2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pp2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "dp2_tp2": {"world_size": 4, "tensor_model_parallel_size": 2},
    "dp2_pp2": {"world_size": 4, "pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def evaluate(ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]) -> Callable[..., list[Any]]:
    """evaluate(layout, order) -> a report per rank, of one and the same critic."""

    def run(layout: dict[str, Any], order: list[int]) -> list[Any]:
        layout = dict(layout)
        size = layout.pop("world_size")
        settings = {
            "hf_checkpoint": model_folder("llama", tied=False),
            "value_loss_type": "classification",
            "value_num_bins": 11,
            "critic_num_gpus_per_node": size,
            "actor_num_gpus_per_node": size,
            **layout,
        }
        return ranks("evaluate", world_size=size, batch=batch, settings=settings, order=order)

    return run


@pytest.fixture(scope="module")
def alone(evaluate: Callable[..., list[Any]]) -> dict[str, Any]:
    (report,) = evaluate({"world_size": 1}, list(range(8)))
    return report


def combined(reports: list[Any], dp_size: int, batch: dict[str, Any], weighting: str) -> Any:
    return combine_rank_stats(
        reports,
        expected_dp_size=dp_size,
        expected_sample_indices=batch["sample_indices"],
        stats_field=weighting,
        expected_active_targets=sum(map(sum, batch["loss_masks"])) if weighting == "token_weighted" else 8,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_any_layout_and_any_order_of_rows_gives_the_figures_of_one_process(
    layout: str, evaluate: Callable[..., list[Any]], alone: dict[str, Any], batch: dict[str, Any]
) -> None:
    reports = evaluate(LAYOUTS[layout], [5, 0, 7, 2, 1, 6, 3, 4])
    dp_size = int(layout[2]) if layout.startswith("dp") else 1
    for weighting in WEIGHTINGS:
        ours = gate_metrics([combined(reports, dp_size, batch, weighting)])[1]
        theirs = gate_metrics([combined([alone], 1, batch, weighting)])[1]
        metrics, expected = ours.pop("aggregate_metrics"), theirs.pop("aggregate_metrics")
        assert ours == theirs
        # float32 forward passes add up in another order; the statistics themselves are exact.
        assert metrics == pytest.approx(expected, abs=1e-6)
        assert metrics["target_variance"] == expected["target_variance"]
    values = {i: v for r in reports if r for i, v in zip(r["sample_indices"], r["values"], strict=True)}
    for index, row in zip(alone["sample_indices"], alone["values"], strict=True):
        assert [v is None for v in values[index]] == [v is None for v in row]
        mine, theirs = ([v for v in x if v is not None] for x in (values[index], row))
        assert np.abs(np.array(mine) - np.array(theirs)).max() < 1e-5
