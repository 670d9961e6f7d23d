"""What is logged of a critic's update: means over its steps, and no figure of the loss that is not used."""

import pytest

from miles.ray.critic_figures import critic_figures, over_steps


def test_figures_of_two_steps_are_their_means_under_stable_names() -> None:
    first = {"value_loss": 1.0, "grad_norm": 2.0, "lr": 0.5, "value_accuracy": 0.25, "tokens": 7.0, "_ev_n": 7.0}
    second = first | {"value_loss": 3.0, "value_accuracy": 0.75}
    assert critic_figures([first, second]) == {
        "value/loss": 2.0,
        "value/grad_norm": 2.0,
        "value/lr": 0.5,
        "value/accuracy": 0.5,
    }


def test_figure_of_uneven_steps_is_the_mean_over_all_their_tokens() -> None:
    """1,000 tokens of which none is clipped and 10 that all are: 10 of 1,010, not half."""
    first = {"clip_fraction": 0.0, "ratio_max": 1.0, "lr": 1.0, "tokens": 1000.0}
    steps = [first, {"clip_fraction": 1.0, "ratio_max": 3.0, "lr": 2.0, "tokens": 10.0}]
    assert over_steps(steps, "clip_fraction") == pytest.approx(10 / 1010)
    assert over_steps(steps, "ratio_max") == 3.0
    assert over_steps(steps, "lr") == 1.5
