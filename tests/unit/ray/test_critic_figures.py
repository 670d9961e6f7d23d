"""What is logged of a critic's update: means over its steps, and no figure of the loss that is not used."""

from miles.ray.critic_figures import critic_figures


def test_figures_of_two_steps_are_their_means_under_stable_names() -> None:
    first = {"value_loss": 1.0, "grad_norm": 2.0, "lr": 0.5, "value_accuracy": 0.25, "tokens": 7.0, "_ev_n": 7.0}
    second = first | {"value_loss": 3.0, "value_accuracy": 0.75}
    assert critic_figures([first, second]) == {
        "value/loss": 2.0,
        "value/grad_norm": 2.0,
        "value/lr": 0.5,
        "value/accuracy": 0.5,
    }
