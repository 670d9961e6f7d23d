"""What value pretraining makes of settings before it reserves devices."""

from miles.config import Args
from miles.ray.placement_group import one_update_a_step


def test_schedule_of_value_pretraining_has_one_update_a_step_whatever_a_shared_file_says() -> None:
    shared = {"num_rollout": 7, "num_critic_epochs": 2, "num_steps_per_rollout": 4}
    args = one_update_a_step(Args.from_values(shared, dict.fromkeys(shared, "file:shared.yaml"))).for_role("critic")
    assert args.num_rollout is not None
    assert args.num_rollout * args.num_steps_per_rollout * args.num_critic_epochs == 7
