"""What a recipe sets, and what it says of what the user gave beside it (formulas A10)."""

from typing import Any

import pytest

from miles.config import Args
from miles.config.rules import check

SET_BY_SAO = {
    "advantage_estimator": "gae_adaptive",
    "policy_objective": "sao_dis",
    "gae_adaptive_mode": "adaptive",
    "gae_adaptive_alpha": 1.5,
    "gae_adaptive_min_length": 1,
    "gamma": 1.0,
    "critic_lambd": 1.0,
    "num_critic_epochs": 2,
    "critic_freeze_attention": True,
    "lr": 1e-6,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "use_kl_loss": False,
    "entropy_coef": 0.0,
    "critic_lr": 5e-6,
    "critic_lr_warmup_iters": 10,
}


@pytest.mark.parametrize(("domain", "band"), [("coding", (0.8, 3.0)), ("reasoning", (0.3, 5.0))])
def test_sao_recipe_sets_what_the_paper_has(online: dict[str, Any], domain: str, band: tuple[float, float]) -> None:
    args = Args.build(check=True, **(online | {"n_samples_per_prompt": 1}), sao_online_recipe=domain)
    assert {name: getattr(args, name) for name in SET_BY_SAO} == SET_BY_SAO
    assert (args.eps_clip, args.eps_clip_high) == band
    assert args.use_rollout_logprobs and args.refresh_values and args.has_critic
    assert args.source_of("lr") == f"recipe:sao-{domain}"
    assert (args.rollout_batch_size, args.global_batch_size) == (4, 4)


def test_roles_keep_the_rates_of_the_recipe(online: dict[str, Any]) -> None:
    args = Args.build(**online, sao_online_recipe="coding")
    assert args.for_role("critic").lr == 5e-6
    assert args.for_role("actor").lr == 1e-6
    assert args.replace(source="resume", seed=3).for_role("critic").lr_warmup_iters == 10


def test_what_the_user_gave_beside_the_recipe_is_named(online: dict[str, Any]) -> None:
    long_enough = {"n_samples_per_prompt": 1, "num_rollout": 20, "save_interval": 5}
    args = Args.build(**(online | long_enough), sao_online_recipe="reasoning", lr=3e-4, gamma=1.0)
    assert args.lr == 1e-6
    assert check(args, entry="train") == ["--sao-online-recipe reasoning sets lr to 1e-06, 0.0003 was given"]


def test_unknown_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="--sao-online-recipe: unknown SAO online recipe: painting; must be one"):
        Args.build(sao_online_recipe="painting")


def test_recipe_in_value_pretraining_is_refused(offline: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is for online training, not offline value pretraining"):
        Args.build(check=True, entry="train_value", **offline, sao_online_recipe="coding")


def test_compaction_takes_all_rows_under_one_token_normaliser(online: dict[str, Any]) -> None:
    args = Args.build(**online, sao_online_recipe="coding", sao_compaction=True)
    assert args.loss_agg_mode == "token-mean"
    assert args.use_dynamic_global_batch_size
