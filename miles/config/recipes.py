"""Recipes: one flag that stands for many settings."""

from typing import Any

SAO_BANDS = {"coding": (0.8, 3.0), "reasoning": (0.3, 5.0)}
"""Lower and upper width of the DIS band by domain."""


def sao_online_settings(domain: str, *, compaction: bool = False) -> dict[str, Any]:
    """What `--sao-online-recipe` sets (SAO, arXiv 2607.07508); batch sizes, layout and paths stay as they are.

    With `compaction` (CompactionRL, arXiv 2607.05378, Eq. 12) all optimised tokens of a batch share one normaliser,
    and a rollout holds as many rows as its trajectories have segments.
    """
    low, high = SAO_BANDS[domain]
    settings: dict[str, Any] = {
        "advantage_estimator": "gae_adaptive",
        "policy_objective": "sao_dis",
        "gae_adaptive_mode": "adaptive",
        "gae_adaptive_alpha": 1.5,
        "gae_adaptive_min_length": 1,
        "gamma": 1.0,
        "critic_lambd": 1.0,
        "num_critic_epochs": 2,
        "refresh_values": True,
        "critic_freeze_attention": True,
        "lr": 1e-6,
        "kl_coef": 0.0,
        "kl_loss_coef": 0.0,
        "use_kl_loss": False,
        "entropy_coef": 0.0,
        "critic_lr": 5e-6,
        "critic_lr_warmup_iters": 10,
        "use_rollout_logprobs": True,
        "eps_clip": low,
        "eps_clip_high": high,
    }
    if compaction:
        settings |= {"loss_agg_mode": "token-mean", "use_dynamic_global_batch_size": True}
    return settings
