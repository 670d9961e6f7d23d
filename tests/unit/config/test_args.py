"""`Args`: immutability, sources, values that follow from others, and what a role sees."""

import pickle
from typing import Any

import pytest

from miles.config import GROUPS, Args
from miles.config.groups import fields_of, flag_of


def test_assignment_to_a_setting_raises() -> None:
    args = Args.build()
    with pytest.raises(ValueError, match="frozen"):
        args.lr = 1.0
    with pytest.raises(ValueError, match="frozen"):
        args.no_such_setting = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_underscored_attribute_survives_pickle_and_replace() -> None:
    args = Args.build(lr=2e-5)
    args._note = {"a": 1}  # pyright: ignore[reportAttributeAccessIssue]
    copy: Any = pickle.loads(pickle.dumps(args))
    assert copy._note == {"a": 1}
    assert copy.source_of("lr") == "code"
    assert copy == args
    changed: Any = args.replace(source="contract", seed=7)
    assert changed._note == {"a": 1}


def test_unset_fields_follow_the_field_they_name() -> None:
    args = Args.build(
        lr=3e-4,
        lambd=0.9,
        eps_clip=0.1,
        actor_num_nodes=2,
        actor_num_gpus_per_node=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        save="out/actor/",
        rollout_batch_size=8,
        n_samples_per_prompt=3,
        num_steps_per_rollout=2,
    )
    followed = {
        "critic_lr": 3e-4,
        "critic_lambd": 0.9,
        "eps_clip_high": 0.1,
        "critic_num_nodes": 2,
        "critic_num_gpus_per_node": 4,
        "critic_tensor_model_parallel_size": 2,
        "critic_pipeline_model_parallel_size": 2,
        "critic_save": "out/actor_critic",
        "global_batch_size": 12,
    }
    assert {name: getattr(args, name) for name in followed} == followed
    assert args.source_of("critic_lr") == "derived:lr"
    assert args.source_of("critic_save") == "derived:save"


def test_a_given_zero_is_not_replaced_by_the_followed_value() -> None:
    args = Args.build(critic_lr=0.0, lr=1.0, critic_lambd=0.0)
    assert (args.critic_lr, args.critic_lambd) == (0.0, 0.0)


def test_replace_derives_anew_and_keeps_explicit_values() -> None:
    args = Args.build(lr=1e-4, critic_lambd=0.5)
    changed = args.replace(source="recipe", lr=1e-3, lambd=0.8)
    assert (changed.critic_lr, changed.critic_lambd) == (1e-3, 0.5)
    assert changed.source_of("lr") == "recipe"
    assert changed.source_of("critic_lambd") == "code"
    assert changed.source_of("gamma") == "default"
    assert args.lr == 1e-4


def test_replace_validates() -> None:
    with pytest.raises(ValueError, match=r"--seed: .*got -1"):
        Args.build().replace(source="x", seed=-1)
    with pytest.raises(ValueError, match=r"--seed: must be less than 4294967296, got 9{20}"):
        Args.build(seed=int("9" * 20))
    with pytest.raises(ValueError, match=r"--rollout-seed: must be less than 4294967296"):
        Args.build(rollout_seed=2**32)
    assert Args.build(seed=2**32 - 1).seed == 2**32 - 1
    with pytest.raises(ValueError, match=r"unknown setting 'sed' \(did you mean seed\?\)"):
        Args.build().replace(source="x", sed=1)


def test_for_role_critic_reads_the_critics_own_settings() -> None:
    args = Args.build(
        tensor_model_parallel_size=4,
        critic_tensor_model_parallel_size=1,
        critic_pipeline_model_parallel_size=2,
        sequence_parallel=True,
        lr=1e-6,
        critic_lr=5e-6,
        lr_warmup_iters=3,
        critic_lr_warmup_iters=10,
        load="actor_in",
        critic_load="critic_in",
        save="actor_out",
        critic_save="critic_out",
    )
    critic = args.for_role("critic")
    assert (critic.tensor_model_parallel_size, critic.pipeline_model_parallel_size) == (1, 2)
    assert (critic.lr, critic.lr_warmup_iters) == (5e-6, 10)
    assert (critic.load, critic.save) == ("critic_in", "critic_out")
    assert critic.sequence_parallel is False
    assert critic.source_of("lr") == "role:critic"
    assert args.for_role("actor") is args


def test_for_role_critic_without_its_own_folder_loads_the_actors() -> None:
    critic = Args.build(load="actor_in").for_role("critic")
    assert (critic.load, critic.critic_load) == ("actor_in", None)


def test_for_role_unknown_raises() -> None:
    with pytest.raises(ValueError, match="expected 'actor' or 'critic'"):
        Args.build().for_role("judge")  # pyright: ignore[reportArgumentType]


def test_sizes_of_a_role_multiply_its_own_layout() -> None:
    args = Args.build(
        actor_num_nodes=2,
        actor_num_gpus_per_node=8,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        critic_num_nodes=1,
        critic_num_gpus_per_node=6,
        critic_tensor_model_parallel_size=3,
        critic_pipeline_model_parallel_size=1,
    )
    assert (args.world_size("actor"), args.model_parallel_size("actor")) == (16, 8)
    assert (args.world_size("critic"), args.model_parallel_size("critic")) == (6, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", True),
        ("seed", False),
        ("hf_checkpoint", True),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("num_rollout", 0),
        ("num_rollout", 1.5),
        ("bf16", 2),
        ("device", "tpu"),
        ("gamma", 1.01),
        ("rollout_top_p", 0.0),
        ("mis_veto", 1.0),
        ("value_reward_range", [0.0, 1.0, 2.0]),
        ("rollout_stop_token_ids", [1, -1]),
        ("value_pretrain_manifest_sha256", "A" * 64),
        ("value_pretrain_manifest_sha256", "a" * 63),
        ("custom_rm_path", "no_function"),
        ("hf_checkpoint", ""),
    ],
)
def test_value_of_the_wrong_kind_names_its_flag(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="^--" + field.replace("_", "-")):
        Args.build(**{field: value})


def test_every_wrong_value_is_named() -> None:
    with pytest.raises(ValueError, match="--lr") as error:
        Args.build(lr="fast", seed=-1)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["--lr", "--seed"]


def test_every_field_belongs_to_one_group_and_says_what_it_is() -> None:
    names = [name for group in GROUPS for name in fields_of(group)]
    assert sorted(names) == sorted(Args.model_fields)
    assert len(set(names)) == len(names)
    assert all(len(field.description or "") > 10 for field in Args.model_fields.values())
    assert all(group.title for group in GROUPS)


def test_defaults_are_those_of_the_field() -> None:
    """What scripts written for such trainers take for granted (formulas, part D)."""
    args = Args.build()
    expected = {
        "lr": 1e-6,
        "n_samples_per_prompt": 1,
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "eps_clip_c": None,
        "value_clip": 0.2,
        "kl_coef": 0.0,
        "kl_loss_type": "k1",
        "kl_loss_coef": 0.0,
        "entropy_coef": 0.0,
        "gamma": 1.0,
        "lambd": 1.0,
        "normalize_advantages": False,
        "num_critic_only_steps": 0,
        "critic_lr": 1e-6,
        "critic_lr_warmup_iters": 0,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "opsm_delta": 1e-4,
        "use_critic": True,
    }
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "reused"),
    [
        ({}, True),
        ({"num_steps_per_rollout": 2}, False),
        ({"kl_coef": 0.1}, False),
        ({"use_rollout_logprobs": True}, False),
        ({"ratio_correction": "mis", "mis_batch_normalize": True}, False),
    ],
)
def test_training_forward_gives_old_log_probs_only_where_nothing_needs_them_before(
    settings: dict[str, Any], reused: bool
) -> None:
    assert Args.build(**settings).training_forward_gives_old_log_probs is reused


@pytest.mark.parametrize(
    ("estimator", "critic"),
    [("gae", True), ("gae_adaptive", True), ("monte_carlo", True), ("grpo", False), ("mine.py:f", False)],
)
def test_critic_follows_from_the_estimator(estimator: str, critic: bool) -> None:
    assert Args.build(advantage_estimator=estimator).has_critic is critic


def test_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--advantage-estimator: must be one of gae, .*, or FILE.py:FUNCTION"):
        Args.build(advantage_estimator="gea")


def test_default_in_a_file_is_not_the_users_wish_but_a_flag_is() -> None:
    args = Args.from_values({"gamma": 1.0, "lambd": 0.9}, {"gamma": "file:x", "lambd": "file:x"})
    assert (args.is_user_set("gamma"), args.is_user_set("lambd")) == (False, True)
    assert not args.is_user_set("critic_lambd")
    assert Args.from_values({"gamma": 1.0}, {"gamma": "flag"}).is_user_set("gamma")


@pytest.mark.parametrize(
    ("settings", "field", "followed"),
    [
        ({"lr": 1e-3}, "critic_lr", 1e-3),
        ({"ratio_correction": "mis", "mis_high": 4.0}, "mis_low", 0.25),
        ({"rollout_batch_size": 4, "n_samples_per_prompt": 2}, "global_batch_size", 8),
        ({"advantage_estimator": "grpo"}, "use_critic", False),
    ],
)
def test_value_in_a_file_that_would_follow_anyway_is_not_the_users_wish(
    settings: dict[str, Any], field: str, followed: Any
) -> None:
    def given(value: Any) -> bool:
        values = settings | {field: value}
        return Args.from_values(values, dict.fromkeys(values, "file:x")).is_user_set(field)

    assert not given(followed)
    assert given(not followed if isinstance(followed, bool) else followed * 2)


def test_null_takes_back_the_users_wish() -> None:
    assert not Args.from_values({"load": None}, {"load": "flag"}).is_user_set("load")
    assert Args.from_values({"mis_veto": None}, {"mis_veto": "flag"}).is_user_set("mis_veto")


def test_engine_cache_is_sglangs_choice_on_a_gpu_alone() -> None:
    unset, stated = Args.build(), Args.build(sglang_max_total_tokens=512)
    assert [unset.engine_cache_tokens(device) for device in ("cpu", "cuda")] == [32768, None]
    assert [stated.engine_cache_tokens(device) for device in ("cpu", "cuda")] == [512, 512]


def test_flag_of_a_critic_is_its_own_where_it_has_one() -> None:
    fields = ("lr_warmup_iters", "save", "tensor_model_parallel_size", "context_parallel_size")
    assert [flag_of(field, "critic") for field in fields] == [
        *("--critic-lr-warmup-iters", "--critic-save", "--critic-tensor-model-parallel-size"),
        "--context-parallel-size",
    ]
