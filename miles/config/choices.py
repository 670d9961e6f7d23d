"""What each choice of estimator, objective and correction reads: who needs a critic, groups, and which settings.

A setting that the choices of a run do not read is refused when the user gave it (see `rules`).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator.

    Attributes:
        critic: it needs values; None: it takes them where there are some, which is the default.
        groups: it compares the samples of one prompt, so it needs more than one.
        reads: settings that belong to it and not to every estimator.
    """

    critic: bool | None
    groups: bool
    reads: frozenset[str] = field(default_factory=frozenset)


_GAE = frozenset({"gamma", "lambd", "critic_lambd"})
_ADAPTIVE = frozenset({"gae_adaptive_mode", "gae_adaptive_alpha", "gae_adaptive_min_length"})

ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(critic=True, groups=False, reads=_GAE),
    "gae_adaptive": Estimator(critic=True, groups=False, reads=_GAE | _ADAPTIVE),
    "monte_carlo": Estimator(critic=None, groups=False, reads=frozenset({"gamma"})),
    "grpo": Estimator(critic=False, groups=True),
    "dr_grpo": Estimator(critic=False, groups=True),
    "rloo": Estimator(critic=False, groups=True),
    "reinforce_plus_plus": Estimator(critic=False, groups=False, reads=frozenset({"gamma"})),
    "reinforce_plus_plus_baseline": Estimator(critic=False, groups=True, reads=frozenset({"gamma"})),
}

ESTIMATOR_SETTINGS = _GAE | _ADAPTIVE
"""Settings that only some estimators read."""

CRITIC_SETTINGS = frozenset(
    {
        "critic_load",
        "critic_save",
        "critic_lr",
        "critic_lr_warmup_iters",
        "critic_num_nodes",
        "critic_num_gpus_per_node",
        "critic_tensor_model_parallel_size",
        "critic_pipeline_model_parallel_size",
        "critic_value_eval_report",
        "critic_value_pretrain_contract_sha256",
        "critic_freeze_attention",
        "num_critic_epochs",
        "num_critic_only_steps",
        "refresh_values",
        "value_clip",
        "value_loss_type",
        "value_num_bins",
        "value_reward_range",
        "value_target_type",
        "hl_gauss_sigma_ratio",
    }
)
"""Settings that nothing reads in a run without a critic."""

OBJECTIVES: dict[str, frozenset[str]] = {
    "ppo": frozenset({"eps_clip_c"}),
    "decoupled_ppo": frozenset({"eps_clip_c"}),
    "gspo": frozenset(),
    "cispo": frozenset(),
    "sao_dis": frozenset({"ratio_grad"}),
}
"""Policy objectives, each with the settings that belong to it and not to every objective."""

OBJECTIVE_SETTINGS = frozenset({"eps_clip_c", "ratio_grad"})

OF_ROLLOUT_ENGINE = frozenset({"sao_dis", "decoupled_ppo"})
"""Objectives that read the engine's log-probabilities themselves: no further correction goes on top."""

CORRECTIONS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "tis": frozenset({"tis_clip", "tis_clip_low"}),
    "icepop": frozenset({"icepop_low", "icepop_high"}),
    "mis": frozenset(
        {"mis_level", "mis_mode", "mis_low", "mis_high", "mis_reject_low", "mis_reject_high", "mis_veto"}
        | {"mis_reject_level", "mis_batch_normalize"}
    ),
}
"""Corrections for the distance of trainer and engine, each with its own settings."""

CORRECTION_SETTINGS = frozenset().union(*CORRECTIONS.values())


LEAST_TEMPERATURE = 1e-6
"""SGLang takes the likeliest token below it, and gives log-probabilities at temperature 1."""


def is_greedy(temperature: float, top_k: int) -> bool:
    """Whether every sample of a prompt is the same."""
    return temperature == 0 or top_k == 1


def is_top_k(count: int) -> bool:
    """Whether an engine can sample among the `count` likeliest tokens; -1: among all."""
    return count == -1 or count >= 1


def is_hook(estimator: str) -> bool:
    """Whether an estimator is a function of the user's: FILE.py:FUNCTION or MODULE:FUNCTION."""
    return ":" in estimator


def split_function(path: str) -> tuple[str, str]:
    """Module or file, and name, of a function of the user's.

    Raises:
        ValueError: the path has another form.
    """
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        raise ValueError("a function is written MODULE:FUNCTION or FILE.py:FUNCTION")
    return where, name


def estimator_facts(estimator: str) -> Estimator:
    """What is known of an estimator; a function of the user's may read everything."""
    if is_hook(estimator):
        return Estimator(critic=None, groups=False, reads=ESTIMATOR_SETTINGS)
    return ESTIMATORS[estimator]
