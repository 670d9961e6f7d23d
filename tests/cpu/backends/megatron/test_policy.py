"""Which loss the flags ask for, written out."""

import math
from typing import Any

import pytest

from miles.algorithms.corrections import Correction
from miles.algorithms.policy_losses import PolicyLoss
from miles.backends.megatron.policy import constant_length, correction_of, policy_loss_of
from miles.config import Args


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"eps_clip_high": 0.28, "eps_clip_c": 3.0}, {"eps_clip_high": 0.28, "dual_clip": 3.0}),
        ({"policy_objective": "gspo", "eps_clip": 3e-4}, {"objective": "gspo", "eps_clip": 3e-4}),
        ({"policy_objective": "cispo", "entropy_coef": 0.1}, {"objective": "cispo", "entropy_coef": 0.1}),
        (
            {"policy_objective": "sao_dis", "eps_clip": 0.8, "eps_clip_high": 3.0, "ratio_grad": "in_graph"},
            {"objective": "sao_dis", "eps_clip": 0.8, "eps_clip_high": 3.0, "ratio_grad": "in_graph"},
        ),
        ({"use_opsm": True, "opsm_delta": 0.2}, {"opsm_delta": 0.2}),
        ({"opsm_delta": 0.2}, {}),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
            {"kl_loss_coef": 0.1, "kl_loss_type": "k3"},
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
            {"kl_loss_coef": 0.1, "kl_loss_type": "unbiased"},
        ),
    ],
)
def test_policy_loss_of_flags(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    own = {"kl_loss_type": "k1", "eps_clip_high": settings.get("eps_clip", 0.2)}
    assert policy_loss_of(Args.build(**settings)) == PolicyLoss(**own | expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        (
            {"ratio_correction": "tis", "tis_clip": 1.5, "tis_clip_low": 0.2},
            Correction(mode="clip", low=0.2, high=1.5),
        ),
        (
            {"ratio_correction": "icepop", "icepop_low": 0.4, "icepop_high": 4.0},
            Correction(mode="mask", low=0.4, high=4.0),
        ),
        (
            {
                "ratio_correction": "mis",
                "mis_level": "geometric",
                "mis_mode": "mask",
                "mis_low": 0.9,
                "mis_veto": None,
            },
            Correction(level="geometric", mode="mask", low=0.9, high=2.0),
        ),
        (
            {"ratio_correction": "mis", "mis_reject_low": 0.5, "mis_batch_normalize": True},
            Correction(
                low=0.5,
                reject_level="sequence",
                reject_low=0.5,
                reject_high=math.exp(20),
                veto=1e-4,
                batch_normalize=True,
            ),
        ),
        (
            {"ratio_correction": "mis", "mis_reject_high": 1.001, "mis_reject_level": "geometric", "mis_high": 0.5},
            Correction(low=0.5, high=0.5, reject_level="geometric", reject_low=0.0, reject_high=1.001, veto=1e-4),
        ),
        (
            {"ratio_correction": "mis", "mis_level": "geometric", "mis_reject_high": 1.001},
            Correction(
                level="geometric", low=0.5, reject_level="geometric", reject_low=0.0, reject_high=1.001, veto=1e-4
            ),
        ),
    ],
)
def test_correction_of_flags(settings: dict[str, Any], expected: Correction | None) -> None:
    assert correction_of(Args.build(**settings)) == expected


def test_decoupled_ppo_weighs_by_the_whole_ratio_to_the_engine() -> None:
    import torch

    from miles.algorithms.corrections import importance_weights

    correction = policy_loss_of(Args.build(policy_objective="decoupled_ppo")).effective_correction
    assert correction is not None
    difference = torch.tensor([-6.0, 0.0, 1.5, 7.0])
    weights, _ = importance_weights(
        correction,
        old_log_probs=difference,
        rollout_log_probs=torch.zeros(4),
        loss_mask=torch.ones(4),
        row_T=torch.zeros(4, dtype=torch.long),
        num_rows=1,
    )
    torch.testing.assert_close(weights, difference.exp())


def test_constant_length_is_the_longest_response_unless_given() -> None:
    assert constant_length(Args.build(rollout_max_response_len=512)) == 512
    assert constant_length(Args.build(rollout_max_response_len=512, loss_agg_length=100)) == 100
