"""Settings that a rank refuses name the flags of its role."""

import pytest

from miles.backends.megatron.device import Device
from miles.backends.megatron.parallel import check_layout
from miles.config import Args


def test_warm_up_as_long_as_the_schedule_is_refused_by_the_roles_own_flag() -> None:
    """3 rollouts: 3 steps of the actor, 6 of a critic that goes over each twice."""
    Device("cpu").activate()
    from miles.backends.megatron.optimizer import schedule_length

    settings = {"lr_decay_style": "cosine", "num_rollout": 3, "num_critic_epochs": 2}
    args = Args.build(**settings, lr_warmup_iters=3)
    assert schedule_length(args, role="critic") == 6
    with pytest.raises(ValueError, match=r"^--lr-warmup-iters 3 must be below the schedule's 3 steps"):
        schedule_length(args, role="actor")
    with pytest.raises(ValueError, match=r"^--critic-lr-warmup-iters 6 must be below the schedule's 6 steps"):
        schedule_length(Args.build(**settings, lr_warmup_iters=6), role="critic")


def test_schedule_of_an_actor_leaves_out_the_rollouts_that_train_the_critic_alone() -> None:
    """10 rollouts of 2 steps, 4 of them the critic's alone: 6 x 2 steps; the critic goes twice over all: 40."""
    Device("cpu").activate()
    from miles.backends.megatron.optimizer import schedule_length

    settings = {"lr_decay_style": "linear", "num_rollout": 10, "num_critic_only_steps": 4}
    args = Args.build(**settings, num_steps_per_rollout=2, num_critic_epochs=2)
    assert schedule_length(args, role="actor") == 12
    assert schedule_length(args, role="critic") == 40


def test_layout_that_the_ranks_cannot_form_is_refused_by_the_roles_own_flags() -> None:
    sizes = {"world_size": 3, "tensor_size": 2, "pipeline_size": 1, "context_size": 1, "sequence_parallel": False}
    check_layout(**(sizes | {"world_size": 4}))
    with pytest.raises(ValueError, match=r"3 ranks cannot hold --critic-tensor-model-parallel-size 2 x --critic-pipe"):
        check_layout(**sizes, role="critic")
