"""Each rule of `rules.py`, broken alone: the complaint names the flag, and nothing else complains."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from miles.config import Args
from miles.config.rules import _size, check

EXAMPLES = Path(__file__).parents[3] / "examples"


def problems(settings: dict[str, Any], entry: Any) -> list[str]:
    """The complaints about `settings`, given as if by flags."""
    args = Args.from_values(settings, dict.fromkeys(settings, "flag"))
    try:
        check(args, entry=entry)
    except ValueError as error:
        return str(error).splitlines()
    return []


def test_least_settings_break_no_rule(online: dict[str, Any], offline: dict[str, Any]) -> None:
    assert problems(online, "train") == []
    assert problems(offline, "train_value") == []


ONLINE: list[tuple[dict[str, Any], str]] = [
    ({"train_backend": "fsdp"}, "online training currently requires --train-backend megatron, got 'fsdp'"),
    ({"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
    ({"max_tokens_per_gpu": 99}, "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size"),
    (
        {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 3, "critic_num_gpus_per_node": 2},
        "actor: 3 devices (--actor-num-nodes x --actor-num-gpus-per-node) are not divisible",
    ),
    (
        {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 3},
        "actor and critic: 3 devices (--actor-num-nodes x --actor-num-gpus-per-node) are not divisible",
    ),
    (
        {"actor_num_gpus_per_node": 3},
        "--global-batch-size 8 is not divisible by the actor and critic's data-parallel size 3",
    ),
    ({"allow_config_change": ["lr"]}, "--allow-config-change has no effect without --resume"),
    (
        {"critic_tensor_model_parallel_size": 2, "critic_num_gpus_per_node": 3},
        "critic: 3 devices (--critic-num-nodes x --critic-num-gpus-per-node) are not divisible",
    ),
    (
        {"actor_num_gpus_per_node": 3, "critic_num_gpus_per_node": 1},
        "--global-batch-size 8 is not divisible by the actor's data-parallel size 3",
    ),
    (
        {"critic_num_gpus_per_node": 3},
        "--global-batch-size 8 is not divisible by the critic's data-parallel size 3",
    ),
    (
        {"micro_batch_size": 4, "critic_num_gpus_per_node": 4},
        "the critic's local batch 2 (--global-batch-size 8 over 4 replicas) is not divisible by --micro-batch-size 4",
    ),
    (
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "critic_num_gpus_per_node": 9},
        "--global-batch-size 8 leaves some critic replicas of 9 idle",
    ),
    (
        {"sequence_parallel": True},
        "--sequence-parallel needs a tensor-parallel size above 1 for the actor",
    ),
    ({"lr_decay_iters": 9}, "--lr-decay-iters has no effect with --lr-decay-style constant"),
    ({"min_lr": 1e-9}, "--min-lr has no effect with --lr-decay-style constant"),
    ({"lr_decay_style": "linear", "min_lr": 1.0}, "--min-lr 1.0 is above the peak learning rate 1e-06"),
    (
        {"lr_decay_style": "linear", "min_lr": 0.5, "lr": 1.0, "critic_lr": 0.25},
        "--min-lr 0.5 is above the peak learning rate 0.25",
    ),
    (
        {"lr_decay_style": "cosine", "lr_decay_iters": 5, "lr_warmup_iters": 5},
        "--lr-warmup-iters 5 must be below --lr-decay-iters 5",
    ),
    (
        {"lr_decay_style": "cosine", "lr_decay_iters": 5, "critic_lr_warmup_iters": 6},
        "--critic-lr-warmup-iters 6 must be below --lr-decay-iters 5",
    ),
    ({"save": None, "save_interval": 2}, "--save-interval has no effect without --save"),
    (
        {"critic_value_pretrain_contract_sha256": "a" * 64},
        "--critic-value-pretrain-contract-sha256 pins the contract in --critic-load, which is not given",
    ),
    ({"load": "/no/folder"}, "--load /no/folder: no such folder"),
    ({"critic_load": "/no/folder"}, "--critic-load /no/folder: no such folder"),
    (
        {"value_loss_type": "classification", "value_reward_range": (1.0, 1.0)},
        "--value-reward-range 1.0 1.0: the lower end must be below the upper",
    ),
    (
        {"value_loss_type": "classification", "value_num_bins": 1},
        "--value-num-bins 1: classification needs at least 2",
    ),
    *(
        ({name: value}, f"--{name.replace('_', '-')} has no effect with --value-loss-type mse")
        for name, value in (
            ("value_num_bins", 51),
            ("value_reward_range", (0.0, 2.0)),
            ("value_target_type", "two_hot"),
            ("hl_gauss_sigma_ratio", 1.0),
        )
    ),
    (
        {"value_loss_type": "classification", "value_target_type": "two_hot", "hl_gauss_sigma_ratio": 1.0},
        "--hl-gauss-sigma-ratio has no effect with --value-target-type two_hot",
    ),
    (
        {"value_loss_type": "classification", "value_clip": 0.1},
        "--value-clip has no effect with --value-loss-type classification",
    ),
    (
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "micro_batch_size": 2},
        "--micro-batch-size has no effect with --use-dynamic-batch-size",
    ),
    (
        {"lr_decay_style": "cosine", "lr_warmup_iters": 3},
        "--lr-warmup-iters 3 must be below the 3 optimizer steps of the run",
    ),
    (
        # Of 3 rollouts the first 2 are the critic's alone.
        {"lr_decay_style": "cosine", "num_critic_only_steps": 2, "lr_warmup_iters": 1, "critic_lr_warmup_iters": 2},
        "--lr-warmup-iters 1 must be below the 1 optimizer steps of the run",
    ),
    (
        {"lr_decay_style": "cosine", "num_critic_epochs": 2, "critic_lr_warmup_iters": 6},
        "--critic-lr-warmup-iters 6 must be below the 6 optimizer steps of the run",
    ),
    (
        {"critic_value_eval_report": "report.json"},
        "--critic-value-eval-report speaks of the critic in --critic-load, which is not given",
    ),
    ({"rollout_temperature": 0.0}, "--rollout-temperature 0 is greedy, which gives nothing to train on"),
    (
        {"rollout_top_k": 1},
        "--rollout-top-k 1 is greedy, which gives nothing to train on: it must be above 1, or -1 for all tokens",
    ),
    *(
        ({name: None}, f"online training needs --{name.replace('_', '-')}")
        for name in (
            "hf_checkpoint",
            "prompt_data",
            "custom_rm_path",
            "num_rollout",
            "rollout_batch_size",
            "rollout_max_response_len",
        )
    ),
    (
        {"value_pretrain_manifest": "m.json"},
        "--value-pretrain-manifest belongs to value pretraining (train_value.py), not to online training",
    ),
    (
        {"value_gate_max_bias": 0.1},
        "--value-gate-max-bias belongs to value pretraining (train_value.py), not to online training",
    ),
    ({"prompt_data": "/no/train.jsonl"}, "--prompt-data /no/train.jsonl: no such file"),
    (
        {"eval_prompt_data": "/no/heldout.jsonl", "eval_interval": 1},
        "--eval-prompt-data /no/heldout.jsonl: no such file",
    ),
    ({"custom_rm_path": "/no/rm.py:f"}, "--custom-rm-path /no/rm.py:f: no such file /no/rm.py"),
    ({"eval_interval": 1}, "--eval-prompt-data and --eval-interval must be given together"),
    *(
        ({name: value}, f"--{name.replace('_', '-')} has no effect without --eval-prompt-data")
        for name, value in (
            ("eval_sampling", ["a:top_p=1"]),
            ("eval_temperature", 0.5),
            ("n_samples_per_eval_prompt", 2),
            ("eval_max_response_len", 4),
            ("eval_max_prompts", 4),
        )
    ),
    ({"advantage_estimator": "/no/mine.py:f"}, "--advantage-estimator /no/mine.py:f: no such file /no/mine.py"),
    (
        {"dynamic_sampling_filter_path": "/no/f.py:f"},
        "--dynamic-sampling-filter-path /no/f.py:f: no such file /no/f.py",
    ),
    ({"advantage_estimator": "grpo", "lambd": 0.9}, "--lambd has no effect with --advantage-estimator grpo"),
    ({"advantage_estimator": "rloo", "gamma": 1.0}, "--gamma has no effect with --advantage-estimator rloo"),
    ({"gae_adaptive_alpha": 2.0}, "--gae-adaptive-alpha has no effect with --advantage-estimator gae"),
    (
        {"advantage_estimator": "gae_adaptive", "lambd": 0.9},
        "--lambd is not read by the actor with --gae-adaptive-mode adaptive; the critic's is --critic-lambd",
    ),
    ({"advantage_estimator": "grpo", "critic_lr": 1e-5}, "--critic-lr has no effect without a critic"),
    ({"advantage_estimator": "grpo", "num_critic_epochs": 2}, "--num-critic-epochs has no effect without a critic"),
    ({"advantage_estimator": "grpo", "use_critic": True}, "--advantage-estimator grpo has no use for a critic"),
    ({"use_critic": False}, "--advantage-estimator gae needs a critic"),
    (
        {"advantage_estimator": "dr_grpo", "n_samples_per_prompt": 1},
        "--advantage-estimator dr_grpo compares the samples of one prompt: --n-samples-per-prompt must be at least 2",
    ),
    (
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        "--normalize-advantages has no effect with --advantage-estimator reinforce_plus_plus",
    ),
    ({"policy_objective": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c has no effect with --policy-objective cispo"),
    ({"ratio_grad": "in_graph"}, "--ratio-grad has no effect with --policy-objective ppo"),
    ({"tis_clip": 3.0}, "--tis-clip has no effect with --ratio-correction none"),
    (
        {"ratio_correction": "icepop", "mis_veto": 1e-3},
        "--mis-veto has no effect with --ratio-correction icepop",
    ),
    ({"ratio_correction": "mis", "mis_low": 0.1}, "--mis-low has no effect with --mis-mode truncate"),
    (
        {"ratio_correction": "mis", "mis_reject_level": "geometric"},
        "--mis-reject-level has no effect without --mis-reject-low or --mis-reject-high",
    ),
    (
        {"policy_objective": "sao_dis", "use_rollout_logprobs": True, "use_opsm": True},
        "--policy-objective sao_dis weighs tokens itself: --use-opsm excludes it",
    ),
    (
        {"policy_objective": "sao_dis"},
        "--policy-objective sao_dis reads the engine's log-probabilities: it needs --use-rollout-logprobs",
    ),
    (
        {"policy_objective": "decoupled_ppo", "ratio_correction": "tis"},
        "--policy-objective decoupled_ppo weighs tokens itself: --ratio-correction tis excludes it",
    ),
    (
        {"use_rollout_logprobs": True, "ratio_correction": "tis"},
        "--ratio-correction tis compares the old policy with the engine",
    ),
    (
        {"ratio_correction": "tis", "tis_clip": 1.0, "tis_clip_low": 2.0},
        "--tis-clip-low 2.0 is above --tis-clip 1.0",
    ),
    ({"opsm_delta": 1e-3}, "--opsm-delta has no effect without --use-opsm"),
    ({"use_opsm": True}, "--use-opsm has no effect with one step per rollout"),
    ({"loss_agg_length": 8}, "--loss-agg-length has no effect with --loss-agg-mode token-mean"),
    (
        {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True},
        "--kl-coef 0.1 and --kl-loss-coef 0.1 would penalise the KL twice: give one",
    ),
    ({"use_kl_loss": True}, "--use-kl-loss needs --kl-loss-coef above 0"),
    ({"kl_loss_coef": 0.1}, "--kl-loss-coef has no effect without --use-kl-loss"),
    ({"kl_loss_type": "k3"}, "--kl-loss-type has no effect without --kl-coef or --use-kl-loss"),
    ({"ref_load": "."}, "--ref-load has no effect without --kl-coef or --use-kl-loss"),
    ({"kl_coef": 0.1, "ref_load": "/no/ref"}, "--ref-load /no/ref: no such folder"),
    ({"kl_coef": 0.1, "kl_target": 0.2}, "--kl-target has no effect with --kl-controller fixed"),
    ({"kl_controller": "adaptive"}, "--kl-controller adaptive adapts --kl-coef, which must be above 0"),
    (
        # 8 samples a rollout: at 1.6 the factor of one may be 1 - .2 x 8 / 1.6 = 0.
        {"kl_coef": 0.1, "kl_controller": "adaptive", "kl_horizon": 1.6},
        "--kl-horizon 1.6 must exceed a fifth of the 8 samples of a rollout",
    ),
    *(
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind, "use_unbiased_kl": True},
            f"--use-unbiased-kl weighs k3: --kl-loss-type {kind} does not go with it",
        )
        for kind in ("k2", "low_var_kl")
    ),
    (
        {"sao_online_recipe": "coding"},
        "SAO requires exactly one rollout per prompt, --n-samples-per-prompt is 2",
    ),
    (
        {"sao_online_recipe": "coding", "n_samples_per_prompt": 1, "num_steps_per_rollout": 2},
        "SAO makes one actor update per rollout, --num-steps-per-rollout is 2",
    ),
    ({"sao_compaction": True}, "--sao-compaction has no effect without --sao-online-recipe"),
    ({"over_sampling_batch_size": 8}, "--over-sampling-batch-size has no effect without --dynamic-sampling-filter"),
    (
        {"dynamic_sampling_filter_path": "miles.rollout.filters:nonzero_reward_std", "over_sampling_batch_size": 3},
        "--over-sampling-batch-size 3 is below --rollout-batch-size 4",
    ),
    *(
        (
            {"rollout_only": True, "save": None, name: value},
            f"--{name.replace('_', '-')} has no effect with --rollout-only, which",
        )
        for name, value in (
            ("load", "."),
            ("critic_load", "."),
            ("save", "actor"),
            ("eval_max_prompts", 4),
            ("lr", 1e-6),
            ("gamma", 0.5),
            ("check_weight_sync", "always"),
            ("max_restarts", 0),
        )
    ),
    (
        {"sglang_extra_args": ["--sleep-on-idle", "--port=30000"]},
        "--sglang-extra-args --port=30000: --port is given to each engine by miles: --sglang-port-base says it",
    ),
    (
        {"sglang_extra_args": ["--tp", "2"]},
        "--sglang-extra-args --tp: --tp is given to each engine by miles: --roll",
    ),
    ({"sglang_extra_args": ["--host", "::"]}, "--sglang-extra-args --host: --host is given to each engine by miles"),
    ({"fault_injection": ["actor@1"]}, "--fault-injection actor@1: expected STAGE@STEP=ACTION"),
    ({"fault_injection": ["actor@1=sleep:."]}, "--fault-injection actor@1=sleep:.: expected STAGE@STEP=ACTION"),
    ({"fault_injection": ["lunch@1=kill_driver"]}, "--fault-injection lunch@1=kill_driver: unknown stage 'lunch'"),
    ({"fault_injection": ["actor@0=kill_actor"]}, "--fault-injection actor@0=kill_actor: steps count from 1"),
    ({"fault_injection": ["actor@9=kill_actor"]}, "--fault-injection actor@9=kill_actor: the run ends with step"),
    ({"fault_injection": ["actor@1=dance"]}, "--fault-injection actor@1=dance: unknown action 'dance'"),
    ({"fault_injection": ["actor@1=sleep"]}, "--fault-injection actor@1=sleep: sleep, and only sleep, takes seconds"),
    (
        {"advantage_estimator": "grpo", "fault_injection": ["actor@1=kill_critic"]},
        "--fault-injection actor@1=kill_critic: the run has no critic",
    ),
    (
        {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
        "--rollout-num-gpus 3 is not divisible by --rollout-num-gpus-per-engine 2",
    ),
    ({"num_steps_per_rollout": 3}, "--num-steps-per-rollout 3 does not divide the 8 samples of a rollout"),
    (
        {"global_batch_size": 4},
        "--global-batch-size 4 x --num-steps-per-rollout 1 must equal --rollout-batch-size 4 x "
        "--n-samples-per-prompt 2",
    ),
    (
        {"canary_one_step": True, "num_critic_only_steps": 1},
        "--canary-one-step updates the actor, --num-critic-only-steps keeps it from doing so",
    ),
    ({"num_critic_only_steps": 3}, "--num-critic-only-steps 3 leaves the actor no step of --num-rollout 3"),
    ({"canary_one_step": True, "save": None}, "--canary-one-step saves once, which needs --save"),
    ({"hf_checkpoint": "/no/model"}, "--hf-checkpoint: model folder /no/model does not exist"),
    (
        {"rollout_max_prompt_len": 60},
        "--rollout-max-prompt-len 60 + --rollout-max-response-len 8 exceed the model's max_position_embeddings 64",
    ),
    (
        {"sglang_max_total_tokens": 16, "rollout_max_prompt_len": 9, "device": "cuda"},
        "--sglang-max-total-tokens 16 cannot hold one prompt of 9 and its response of 8 tokens",
    ),
    (
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16, "rollout_max_prompt_len": 9},
        "--max-tokens-per-gpu 16 cannot hold one prompt of 9 and its response of 8 tokens",
    ),
    (
        {"rollout_stop_token_ids": [7, 8]},
        "--rollout-stop-token-ids 8 is outside the model's vocabulary of 8",
    ),
]


@pytest.mark.parametrize(("changes", "complaint"), ONLINE, ids=lambda value: value if isinstance(value, str) else "")
def test_broken_rule_of_online_training_is_the_only_complaint(
    online: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    (line,) = problems(online | changes, "train")
    assert line.startswith(complaint)


def test_file_that_lists_every_setting_is_no_complaint(online: dict[str, Any]) -> None:
    """A resolved config of a critic-free run names the critic's settings too, and can be given again."""
    resolved = Args.build(**online, advantage_estimator="grpo").model_dump()
    resolved = {name: value for name, value in resolved.items() if name not in ("value_pretrain_eval_split",)}
    check(Args.from_values(resolved, dict.fromkeys(resolved, "file:config.yaml")), entry="train")


def test_rollouts_that_are_loaded_need_neither_prompts_nor_reward(online: dict[str, Any], tmp_path: Path) -> None:
    del online["prompt_data"], online["custom_rm_path"]
    assert problems(online | {"load_rollouts": str(tmp_path)}, "train") == []
    (line,) = problems(online | {"load_rollouts": "/no/rollouts"}, "train")
    assert line == "--load-rollouts /no/rollouts: no such folder"
    (line,) = problems(online | {"load_rollouts": str(tmp_path), "custom_rm_path": "m:f"}, "train")
    assert line == "--custom-rm-path has no effect with --load-rollouts, which starts no engine"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_num_gpus", 1),
        ("sglang_max_restarts", 0),
        ("rm_timeout_s", 9.0),
        ("rollout_seed", 1),
        ("eval_top_p", 0.5),
    ],
)
def test_setting_of_the_engines_is_refused_where_rollouts_are_loaded(
    online: dict[str, Any], tmp_path: Path, name: str, value: Any
) -> None:
    del online["prompt_data"], online["custom_rm_path"]
    online["load_rollouts"] = str(tmp_path)
    (line,) = problems(online | {name: value}, "train")
    assert line == f"--{name.replace('_', '-')} has no effect with --load-rollouts, which starts no engine"
    # A file may serve runs that sample, too.
    sources = dict.fromkeys(online, "flag") | {name: "file:shared.yaml"}
    check(Args.from_values(online | {name: value}, sources), entry="train")


def test_evaluation_of_a_file_is_refused_where_rollouts_are_loaded(online: dict[str, Any], tmp_path: Path) -> None:
    settings = online | {"load_rollouts": str(tmp_path), "eval_interval": 1}
    settings["eval_prompt_data"] = [str(tmp_path / "heldout.jsonl")]
    with pytest.raises(ValueError, match=r"^--eval-prompt-data has no effect with --load-rollouts"):
        check(Args.from_values(settings, dict.fromkeys(settings, "file:run.yaml")), entry="train")


def test_training_settings_of_a_file_are_left_aside_where_rollouts_are_only_sampled(online: dict[str, Any]) -> None:
    settings = online | {"lr": 1e-3, "gamma": 0.5, "micro_batch_size": 2, "rollout_only": True}
    check(Args.from_values(settings, dict.fromkeys(settings, "file:run.yaml")), entry="train")
    settings["load"] = "."
    with pytest.raises(ValueError, match=r"^--load has no effect with --rollout-only, which samples from"):
        check(Args.from_values(settings, dict.fromkeys(settings, "file:run.yaml")), entry="train")


def test_greedy_rollouts_may_be_sampled_alone(online: dict[str, Any]) -> None:
    assert problems(online | {"rollout_only": True, "save": None, "rollout_temperature": 0.0}, "train") == []


def test_head_that_the_contract_states_may_be_stated_too(online: dict[str, Any]) -> None:
    """Which loss it goes with is the contract's to say."""
    assert problems(online | {"critic_load": ".", "value_num_bins": 51}, "train") == []


def test_derived_bound_of_a_resolved_file_is_no_complaint(online: dict[str, Any]) -> None:
    settings = online | {"ratio_correction": "mis", "mis_low": 0.5, "mis_high": 2.0}
    check(Args.from_values(settings, dict.fromkeys(settings, "file:config.yaml")), entry="train")


@pytest.mark.parametrize(("device", "lines"), [("cpu", 1), ("auto", 0), ("cuda", 0)])
def test_engine_cache_bounds_lengths_where_its_size_is_known(
    online: dict[str, Any], hf_folder: Path, device: str, lines: int
) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    found = problems(online | {"rollout_max_response_len": 32768, "device": device}, "train")
    complaint = "--sglang-max-total-tokens 32768 cannot hold one prompt of 1 and its response of 32768 tokens"
    assert found == [complaint] * lines


def test_dynamic_global_batch_needs_dynamic_batches_and_one_step(online: dict[str, Any]) -> None:
    lines = problems(online | {"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 2}, "train")
    assert [line.split()[0] for line in lines] == ["--use-dynamic-global-batch-size"] * 2
    dynamic = {"use_dynamic_global_batch_size": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
    assert problems(online | dynamic, "train") == []


OFFLINE: list[tuple[dict[str, Any], str]] = [
    (
        {"train_backend": "fsdp"},
        "offline value pretraining currently requires --train-backend megatron, got 'fsdp'",
    ),
    ({"value_pretrain_manifest": None}, "value pretraining needs --value-pretrain-manifest"),
    ({"hf_checkpoint": None}, "value pretraining needs --hf-checkpoint, which says what model to build"),
    ({"global_batch_size": None}, "value pretraining needs --global-batch-size"),
    *(
        ({name: value}, f"--{name.replace('_', '-')} belongs to online training (train.py), not to value pretraining")
        for name, value in (
            ("advantage_estimator", "grpo"),
            ("num_critic_epochs", 2),
            ("rollout_temperature", 0.5),
            ("resume", True),
            ("ref_load", "."),
            ("rollout_num_gpus", 1),
            ("rollout_num_gpus_per_engine", 1),
        )
    ),
    (
        {"lr_warmup_iters": 5},
        "--lr-warmup-iters has no effect in value pretraining: a critic's warm-up is --critic-lr-warmup-iters",
    ),
    *(
        ({name: value, own: value}, f"--{name.replace('_', '-')} has no effect in value pretraining beside --critic-")
        for name, own, value in (
            ("lr", "critic_lr", 1e-3),
            ("lr_warmup_iters", "critic_lr_warmup_iters", 2),
            ("actor_num_gpus_per_node", "critic_num_gpus_per_node", 2),
            ("pipeline_model_parallel_size", "critic_pipeline_model_parallel_size", 1),
        )
    ),
    ({"critic_save": None}, "value pretraining needs --critic-save, the folder for the critic and its contract"),
    ({"canary_one_step": True}, "--canary-one-step belongs to online training"),
    *(
        ({name: value}, f"--{name.replace('_', '-')} has no effect without --value-pretrain-eval-only")
        for name, value in (
            ("value_pretrain_eval_report", "r.json"),
            ("value_pretrain_eval_num_batches", 2),
            ("value_pretrain_eval_split", "heldout"),
            ("value_gate_max_bias", 0.1),
        )
    ),
    (
        {"lr_decay_style": "cosine", "num_rollout": 2, "critic_lr_warmup_iters": 2},
        "--critic-lr-warmup-iters 2 must be below the 2 optimizer steps of the run",
    ),
    (
        {"lr_decay_style": "cosine", "min_lr": 2e-6},
        "--min-lr 2e-06 is above the peak learning rate 1e-06 of the critic",
    ),
    (
        {"critic_num_gpus_per_node": 3},
        "--global-batch-size 4 is not divisible by the critic's data-parallel size 3",
    ),
    (
        {"critic_num_gpus_per_node": 3, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
        "--global-batch-size 4 is not divisible by the critic's data-parallel size 3",
    ),
    (
        {"critic_num_gpus_per_node": 2, "micro_batch_size": 3},
        "the critic's local batch 2 (--global-batch-size 4 over 2 replicas) is not divisible by --micro-batch-size 3",
    ),
    (
        {"sequence_parallel": True},
        "--sequence-parallel needs a tensor-parallel size above 1 for the critic",
    ),
]


@pytest.mark.parametrize(("changes", "complaint"), OFFLINE, ids=lambda value: value if isinstance(value, str) else "")
def test_broken_rule_of_value_pretraining_is_the_only_complaint(
    offline: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    (line,) = problems(offline | changes, "train_value")
    assert line.startswith(complaint)


def test_interval_without_a_folder_is_one_of_the_complaints(offline: dict[str, Any]) -> None:
    assert "--save-interval has no effect without --critic-save" in problems(
        offline | {"critic_save": None, "save_interval": 2}, "train_value"
    )


@pytest.fixture
def evaluation(offline: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    critic = tmp_path / "contracted"
    critic.mkdir()
    (critic / "latest").write_text("iter_0000001\n")
    return offline | {
        "value_pretrain_eval_only": True,
        "critic_load": str(critic),
        "critic_save": None,
        "value_pretrain_eval_report": str(tmp_path / "report.json"),
        "value_pretrain_eval_num_batches": 2,
    }


def test_evaluation_needs_no_folder_to_save_to(evaluation: dict[str, Any]) -> None:
    assert problems(evaluation, "train_value") == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        *(
            ({name: None}, f"--value-pretrain-eval-only needs --{name.replace('_', '-')}")
            for name in ("critic_load", "value_pretrain_eval_report", "value_pretrain_eval_num_batches")
        ),
        (
            {"value_pretrain_canary_one_step": True},
            "--value-pretrain-canary-one-step trains a step, --value-pretrain-eval-only trains none",
        ),
    ],
)
def test_broken_rule_of_evaluation_is_the_only_complaint(
    evaluation: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert problems(evaluation | changes, "train_value") == [complaint]


def test_evaluation_report_is_never_replaced_not_even_a_dangling_link(
    evaluation: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "report.json").symlink_to(tmp_path / "nowhere")
    (line,) = problems(evaluation, "train_value")
    assert line.endswith("report.json exists already and is never replaced")


def test_flags_of_the_other_program_are_accepted_from_a_shared_file(online: dict[str, Any]) -> None:
    settings = online | {"value_pretrain_epochs": 3, "value_gate_max_bias": 0.1}
    sources = dict.fromkeys(settings, "file:shared.yaml")
    check(Args.from_values(settings, sources), entry="train")


def test_settings_of_online_training_in_a_shared_file_are_not_value_pretrainings(offline: dict[str, Any]) -> None:
    shared = {"rollout_num_gpus": 4, "num_critic_epochs": 2, "value_clip": 0.1, "critic_lr": 1e-5, "lr": 1e-6}
    shared |= {"lr_warmup_iters": 5, "critic_lr_warmup_iters": 2, "micro_batch_size": 2}
    settings = offline | shared
    check(Args.from_values(settings, dict.fromkeys(settings, "file:shared.yaml")), entry="train_value")


def test_global_batch_is_not_that_of_the_rollouts_in_a_shared_file(offline: dict[str, Any]) -> None:
    settings = offline | {"rollout_batch_size": 8, "global_batch_size": None}
    with pytest.raises(ValueError, match=r"^value pretraining needs --global-batch-size$"):
        check(Args.from_values(settings, dict.fromkeys(settings, "file:shared.yaml")), entry="train_value")


def test_command_that_trained_a_critic_may_be_repeated_to_judge_it(
    evaluation: dict[str, Any], offline: dict[str, Any]
) -> None:
    repeated: dict[str, Any] = {"lr": 1e-3, "value_pretrain_epochs": 5, "lr_decay_style": "cosine"}
    repeated |= {"critic_save": offline["critic_save"], "save_interval": 2}
    settings = evaluation | repeated
    warnings = check(Args.from_values(settings, dict.fromkeys(settings, "flag")), entry="train_value")
    assert warnings == [
        f"--{name.replace('_', '-')} has no effect with --value-pretrain-eval-only, which trains nothing"
        for name in sorted(repeated)
    ]
    assert check(Args.from_values(settings, dict.fromkeys(settings, "file:value.yaml")), entry="train_value") == []


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"value_pretrain_eval_split": "train"}, "--value-pretrain-eval-split has no effect without --value-pretrain"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "micro_batch_size": 4},
            "--micro-batch-size has no effect with --use-dynamic-batch-size",
        ),
    ],
)
def test_flag_of_value_pretraining_without_effect_is_warned_of(
    offline: dict[str, Any], given: dict[str, Any], warning: str
) -> None:
    settings = offline | given
    (line,) = check(Args.from_values(settings, dict.fromkeys(settings, "flag")), entry="train_value")
    assert line.startswith(warning)


def test_sequence_parallel_actor_beside_a_critic_of_one_tensor_rank_is_accepted(online: dict[str, Any]) -> None:
    layout = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "critic_tensor_model_parallel_size": 1}
    assert problems(online | layout | {"sequence_parallel": True}, "train") == []


def test_dynamic_batches_need_no_divisible_global_batch_online(online: dict[str, Any]) -> None:
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "actor_num_gpus_per_node": 3}
    assert problems(online | dynamic, "train") == []


# ---------------------------------------------------------------- folders and files


def test_resume_from_an_empty_folder_is_refused(online: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (line,) = problems(online | {"load": str(tmp_path / "empty")}, "train")
    assert line == f"--load {tmp_path}/empty: the folder is empty, there is nothing to resume from"


@pytest.mark.parametrize("field", ["save", "critic_save", "run_dir"])
def test_output_folder_that_cannot_be_made_is_refused(online: dict[str, Any], tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("")
    flag = "--" + field.replace("_", "-")
    assert problems(online | {field: f"{tmp_path}/file"}, "train")[0] == f"{flag} {tmp_path}/file: is not a folder"
    (line,) = [
        line for line in problems(online | {field: f"{tmp_path}/file/sub"}, "train") if line.startswith(f"{flag} ")
    ]
    assert line == f"{flag} {tmp_path}/file/sub: {tmp_path}/file is not a folder"


def test_output_folder_without_permission_is_refused(
    online: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser, as which a container runs tests, may write everywhere.
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(dir / "tmp123"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    lines = problems(online, "train")
    assert lines[0] == f"--save {tmp_path}/actor: cannot be written: {tmp_path}: Permission denied"


def test_output_folder_on_a_file_system_without_files_is_refused_as_such(online: dict[str, Any]) -> None:
    lines = problems(
        online | {"run_dir": "/proc/x", "save": "/proc/x/actor", "critic_save": "/proc/x/critic"}, "train"
    )
    assert [line.split(": cannot be written: /proc: ")[0] for line in lines] == [
        "--run-dir /proc/x",
        "--save /proc/x/actor",
        "--critic-save /proc/x/critic",
    ]
    assert os.listdir("/proc") and not any("free" in line for line in lines)


def test_run_folder_that_cannot_be_made_is_refused_once(online: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"
    args = Args.build(**{name: value for name, value in online.items() if name != "save"}, run_dir=str(run))
    args = args.replace(source="generated", save=str(run / "actor"), critic_save=str(run / "critic"))
    with pytest.raises(ValueError, match=r".") as refused:
        check(args, entry="train")
    assert str(refused.value) == f"--run-dir {run}: {tmp_path}/file is not a folder"


def test_critic_folder_of_a_run_without_a_critic_is_not_looked_at(online: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = Args.build(**online, advantage_estimator="grpo")
    check(args.replace(source="generated", critic_save=f"{tmp_path}/file/critic"), entry="train")


def test_looking_whether_a_folder_can_be_written_leaves_nothing(online: dict[str, Any], tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert problems(online, "train") == []
    assert sorted(tmp_path.iterdir()) == before


def test_actor_and_critic_may_not_share_a_folder(online: dict[str, Any], tmp_path: Path) -> None:
    (line,) = problems(online | {"critic_save": f"{tmp_path}/x/../actor"}, "train")
    assert line.startswith("--save and --critic-save name the same folder")


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_full_disk_is_refused_before_training(online: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has 8 parameters, so a checkpoint takes 8 x 12 bytes; actor and critic share the file system."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(1, 1, 192))
    assert problems(online, "train") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(1, 1, 191))
    (line,) = problems(online, "train")
    assert line.startswith(f"--save {online['save']} and --critic-save {online['save']}_critic: 0.0 MiB are free")
    # The actor alone needs half of it; a file system that tells no size is not judged.
    alone = {"advantage_estimator": "grpo", "n_samples_per_prompt": 4, "rollout_batch_size": 2}
    assert problems(online | alone, "train") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(0, 0, 0))
    assert problems(online, "train") == []


@pytest.mark.parametrize(
    ("count", "text"), [(3 << 30, "3.0 GiB"), (5 << 19, "2.5 MiB"), ((1 << 30) - 1, "1024.0 MiB")]
)
def test_size_takes_the_unit_that_fits(count: int, text: str) -> None:
    assert _size(count) == text


@pytest.mark.parametrize(("flag", "package"), [("tensorboard", "tensorboard"), ("use_wandb", "wandb")])
def test_missing_logger_is_refused(
    online: dict[str, Any], monkeypatch: pytest.MonkeyPatch, flag: str, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    (line,) = problems(online | {flag: True}, "train")
    assert f"{package} is not installed" in line


# ---------------------------------------------------------------- the model folder


@pytest.mark.parametrize(
    ("key", "settings", "flag"),
    [
        ("num_attention_heads", {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2"),
        ("num_key_value_heads", {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2"),
        ("intermediate_size", {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2"),
        ("num_hidden_layers", {"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 2"),
    ],
)
def test_layout_that_the_model_cannot_be_split_into_is_refused(
    online: dict[str, Any], hf_folder: Path, key: str, settings: dict[str, Any], flag: str
) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {key: 3}))
    lines = problems(online | settings | {"actor_num_gpus_per_node": 2}, "train")
    assert lines == [
        f"actor and critic: {flag} does not divide {key} 3 of {hf_folder}/config.json",
    ]


def test_warnings_are_returned_not_raised(online: dict[str, Any]) -> None:
    heldout = {"eval_prompt_data": online["prompt_data"], "eval_interval": 1, "n_samples_per_eval_prompt": 4}
    args = Args.build(**online, **heldout, bf16=True, device="cpu")
    bf16, greedy = check(args, entry="train")
    assert bf16.startswith("--bf16 on a CPU")
    path = online["prompt_data"]
    assert greedy.startswith(f"--eval-prompt-data {path}: 4 samples of a prompt repeat the same greedy answer")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"num_rollout": 10}, False),
        ({"num_rollout": 11}, True),
        ({"num_rollout": 11, "save_interval": 11}, False),
        ({"num_rollout": 11, "save_interval": 12}, True),
        ({"num_rollout": 11, "canary_one_step": True}, False),
    ],
)
def test_long_run_that_saves_only_at_its_end_is_warned_of(
    online: dict[str, Any], settings: dict[str, Any], warned: bool
) -> None:
    lines = check(Args.build(**(online | settings)), entry="train")
    every = settings.get("save_interval")
    start = "without --save-interval" if every is None else f"--save-interval {every}:"
    assert [line.startswith(f"{start} nothing is saved before the last of 11") for line in lines] == (
        [True] if warned else []
    )


@pytest.mark.parametrize(("kind", "words"), [("k1", "an expected gradient of zero"), ("k3", "a biased gradient")])
def test_kl_loss_whose_gradient_is_not_the_kls_is_warned_of_once(
    online: dict[str, Any], kind: str, words: str
) -> None:
    loss = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind}
    (line,) = check(Args.build(**online, **loss), entry="train")
    assert words in line
    assert check(Args.build(**online, **(loss | {"kl_loss_type": "k2"})), entry="train") == []


_TWO_STEPS = {"num_steps_per_rollout": 2}
_KL_IN_REWARD = {"kl_coef": 0.1, "kl_loss_type": "k3"}
_GSPO = _TWO_STEPS | {"policy_objective": "gspo"}
_DR_GRPO = {"advantage_estimator": "dr_grpo"}
_CUT = {"rollout_top_p": 0.7, "rollout_top_k": 50}
_CUT_WARNING = "--rollout-top-p 0.7 and --rollout-top-k 50: the engine's log-probabilities are those before the cut"


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        (_KL_IN_REWARD, ["--kl-loss-type k3 in the reward (--kl-coef) hardly pulls"]),
        (_KL_IN_REWARD | {"kl_loss_type": "k1"}, []),
        (_GSPO, ["--policy-objective gspo with --loss-agg-mode token-mean weighs sequences by their length"]),
        (_GSPO | {"loss_agg_mode": "seq-mean-token-mean"}, []),
        (_DR_GRPO, ["--advantage-estimator dr_grpo with --loss-agg-mode token-mean keeps the bias by length"]),
        (_DR_GRPO | {"loss_agg_mode": "seq-mean-token-sum-norm"}, []),
        (
            {"eps_clip": 0.2, "eps_clip_c": 3.0},
            ["--eps-clip has no effect with one step per rollout", "--eps-clip-c has no effect with one step"],
        ),
        (_TWO_STEPS | {"eps_clip": 0.2, "eps_clip_c": 3.0}, []),
        ({"use_rollout_logprobs": True, "eps_clip": 0.1}, []),
        ({"policy_objective": "cispo"}, ["--policy-objective cispo has the gradient of ppo with one step"]),
        ({"value_clip": 0.1}, ["--value-clip has no effect with one critic update per rollout"]),
        ({"value_clip": 0.1, "num_critic_epochs": 2}, []),
        (_CUT, []),
        (_CUT | {"ratio_correction": "tis"}, [_CUT_WARNING]),
        (_TWO_STEPS | _CUT | {"policy_objective": "decoupled_ppo"}, [_CUT_WARNING]),
        (_CUT | {"use_rollout_logprobs": True}, [_CUT_WARNING]),
        ({"ratio_correction": "tis"}, []),
        (_GSPO | {"rollout_only": True, "save": None}, []),
        ({"ratio_correction": "mis", "mis_high": 0.5}, []),
    ],
)
def test_setting_that_learns_something_else_than_it_says_is_warned_of(
    online: dict[str, Any], settings: dict[str, Any], warnings: list[str]
) -> None:
    settings = online | settings
    sources = {name: "flag" if name.startswith(("eps_clip", "value_clip")) else "file:run.yaml" for name in settings}
    lines = check(Args.from_values(settings, sources), entry="train")
    assert len(lines) == len(warnings)
    assert all(line.startswith(start) for line, start in zip(lines, warnings, strict=True))


@pytest.mark.parametrize("plan", ["quickstart/quickstart.yaml", "smollm2/smollm2.yaml"])
def test_recipes_print_no_warning_for_what_they_set(online: dict[str, Any], plan: str) -> None:
    stages = yaml.safe_load((EXAMPLES / plan).read_text())
    paths = {name: online[name] for name in ("hf_checkpoint", "prompt_data", "custom_rm_path", "save")}
    for name in ("online_rl", "online_canary"):
        if name in stages:
            settings = stages["common"] | stages[name]["settings"] | paths | {"rollout_max_prompt_len": None}
            settings |= {"rollout_max_response_len": 6}
            if "eval_prompt_data" in settings:
                settings["eval_prompt_data"] = online["prompt_data"]
            assert check(Args.from_values(settings, dict.fromkeys(settings, "file:run.yaml")), entry="train") == []


def test_canary_ends_after_one_rollout_and_takes_the_first_step_of_the_whole_schedule(online: dict[str, Any]) -> None:
    settings = online | {"num_rollout": 30, "lr_decay_style": "cosine", "lr_warmup_iters": 10}
    canary = Args.build(**settings, canary_one_step=True)
    check(canary, entry="train")
    assert (canary.rollouts_to_run, canary.num_rollout) == (1, 30)
    assert canary.optimizer_steps("actor") == Args.build(**settings).optimizer_steps("actor")
    with pytest.raises(ValueError, match=r"save@2=kill_actor: the run ends with step 1 \(--canary-one-step\)"):
        check(canary.replace(source="flag", fault_injection=["save@2=kill_actor"]), entry="train")


def test_folder_that_a_resumed_run_began_with_may_be_gone(online: dict[str, Any], tmp_path: Path) -> None:
    args = Args.build(**online, load="/no/folder", critic_load="/no/critic", resume=True, run_dir=str(tmp_path))
    assert check(args, entry="train") == []


def test_build_checks_only_when_asked(online: dict[str, Any]) -> None:
    Args.build(max_tokens_per_gpu=3)
    with pytest.raises(ValueError, match="--max-tokens-per-gpu has no effect"):
        Args.build(check=True, **online, max_tokens_per_gpu=3)


@pytest.mark.parametrize("how", [{"eval_max_response_len": 64}, {"eval_sampling": ["a:max_response_len=64"]}])
def test_evaluation_whose_responses_leave_no_room_for_a_prompt_is_refused(
    online: dict[str, Any], how: dict[str, Any]
) -> None:
    settings = online | {"eval_prompt_data": [f"a:{online['prompt_data']}"], "eval_interval": 1, **how}
    (line,) = problems(settings, "train")
    assert line.startswith(f"--eval-prompt-data {online['prompt_data']}: responses of 64 tokens")
    assert line.endswith("leave no room for a prompt in the model's max_position_embeddings 64")


def test_folder_behind_a_loop_of_links_is_one_line(online: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    settings = online | {"save": str(tmp_path / "loop"), "critic_save": str(tmp_path / "critic")}
    assert problems(settings, "train") == [f"--save {tmp_path / 'loop'}: is not a folder"]


def test_layout_of_the_critic_alone_that_the_model_does_not_divide_names_the_critics_flag(
    online: dict[str, Any], hf_folder: Path
) -> None:
    settings = online | {"critic_pipeline_model_parallel_size": 4, "critic_num_gpus_per_node": 4}
    flag = "--critic-pipeline-model-parallel-size 4"
    assert problems(settings, "train") == [
        f"critic: {flag} does not divide num_hidden_layers 2 of {hf_folder}/config.json"
    ]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"eval_sampling": ["a:n_samples=4"]}, True),
        ({"eval_sampling": ["a:n_samples=4,temperature=1.0,top_k=1"]}, True),
        ({"eval_sampling": ["a:n_samples=4,temperature=1.0"]}, False),
        ({}, False),
    ],
)
def test_evaluation_set_that_repeats_a_greedy_answer_is_warned_of(
    online: dict[str, Any], settings: dict[str, Any], warned: bool
) -> None:
    heldout = {"eval_prompt_data": [f"a:{online['prompt_data']}"], "eval_interval": 1}
    lines = check(Args.build(**online, **heldout, **settings), entry="train")
    assert [line.startswith("--eval-prompt-data") and "the same greedy answer" in line for line in lines] == (
        [True] * warned
    )


@pytest.mark.parametrize(("warm_up", "warned"), [(3, False), (4, True), (1000, True)])
def test_constant_rate_whose_warm_up_does_not_end_is_warned_of(
    online: dict[str, Any], warm_up: int, warned: bool
) -> None:
    args = Args.build(**(online | {"num_rollout": 4, "lr_warmup_iters": warm_up}))
    assert [line.partition(" is not over within the 4 optimizer steps")[0] for line in check(args, entry="train")] == (
        [f"--lr-warmup-iters {warm_up}"] * warned
    )


@pytest.mark.parametrize("field", ["over_sampling_batch_size", "dynamic_sampling_max_replacements"])
def test_setting_of_a_filter_out_of_a_file_is_refused_without_one(
    online: dict[str, Any], tmp_path: Path, field: str
) -> None:
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag} has no effect without --dynamic-sampling-filter-path"):
        check(Args.build(**online, **{field: 8}), entry="train")


@pytest.mark.parametrize("field", ["rollout_temperature", "eval_temperature"])
def test_temperature_that_sglang_takes_for_greedy_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=r"must be 0 \(greedy\) or at least 1e-06"):
        Args.build(**{field: 1e-7})
    assert getattr(Args.build(**{field: 1e-6}), field) == 1e-6


@pytest.mark.parametrize("field", ["run_dir", "save", "critic_save"])
def test_home_folder_that_no_shell_wrote_out_is_refused(online: dict[str, Any], field: str) -> None:
    lines = problems(online | {field: "~/run"}, "train")
    assert lines[0].startswith(f"--{field.replace('_', '-')} ~/run: a shell makes the home folder of ~, a file")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"rollout_temperature": 0.0}, True), ({"rollout_top_k": 1}, True), ({}, False), ({"rollout_top_k": 2}, False)],
)
def test_rollouts_that_repeat_a_greedy_answer_are_warned_of(
    online: dict[str, Any], settings: dict[str, Any], warned: bool
) -> None:
    lines = check(Args.build(**(online | {"rollout_only": True} | settings)), entry="train")
    assert [line.startswith("2 samples of a prompt (--n-samples-per-prompt) repeat") for line in lines] == (
        [True] * warned
    )
