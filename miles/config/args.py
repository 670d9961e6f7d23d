"""`Args`: all settings of one run, flat, frozen, each knowing where it came from."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import PrivateAttr, ValidationError

from miles.config.choices import estimator_facts, is_hook
from miles.config.eval_sets import EvalSet, Sampling, parse_eval_sets
from miles.config.fault_plan import Fault, parse_faults
from miles.config.groups import (
    AlgorithmGroup,
    BatchGroup,
    DeviceGroup,
    EngineGroup,
    EvalGroup,
    ModelGroup,
    OptimizerGroup,
    ParallelGroup,
    RolloutGroup,
    RunGroup,
    ValueHeadGroup,
    ValuePretrainGroup,
    flag_of,
)
from miles.config.recipes import sao_online_settings

Entry = Literal["train", "train_value"]
Role = Literal["actor", "critic"]

_CPU_CACHE_TOKENS = 32768
"""SGLang would take most of the machine's memory."""

_INHERITED = {
    "critic_num_nodes": "actor_num_nodes",
    "critic_num_gpus_per_node": "actor_num_gpus_per_node",
    "critic_tensor_model_parallel_size": "tensor_model_parallel_size",
    "critic_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "critic_lr": "lr",
    "critic_lambd": "lambd",
    "eps_clip_high": "eps_clip",
}
"""Fields that, when unset, take another field's value."""

_ELSEWHERE = {
    **dict.fromkeys(("learning-rate", "actor-lr", "actor-learning-rate"), "lr"),
    **dict.fromkeys(("critic-learning-rate", "value-lr"), "critic_lr"),
    **dict.fromkeys(("batch-size", "train-batch-size", "ppo-mini-batch-size", "mini-batch-size"), "global_batch_size"),
    **dict.fromkeys(("per-device-train-batch-size", "micro-train-batch-size"), "micro_batch_size"),
    **dict.fromkeys(("model", "model-path", "model-name", "model-name-or-path", "base-model"), "hf_checkpoint"),
    **dict.fromkeys(("pretrain", "pretrained-checkpoint", "actor-model-path"), "hf_checkpoint"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "tensor_model_parallel_size"),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size"), "pipeline_model_parallel_size"),
    **dict.fromkeys(("cp", "cp-size"), "context_parallel_size"),
    **dict.fromkeys(("max-steps", "total-steps", "num-steps", "train-iters", "total-training-steps"), "num_rollout"),
    **dict.fromkeys(("epochs", "num-epochs", "num-train-epochs"), "value_pretrain_epochs"),
    **dict.fromkeys(("max-new-tokens", "max-response-length", "max-completion-length"), "rollout_max_response_len"),
    **dict.fromkeys(("generate-max-len", "max-response-len"), "rollout_max_response_len"),
    **dict.fromkeys(("max-prompt-length", "prompt-max-len", "max-prompt-len"), "rollout_max_prompt_len"),
    **dict.fromkeys(("temperature", "sampling-temperature"), "rollout_temperature"),
    "top-p": "rollout_top_p",
    "top-k": "rollout_top_k",
    **dict.fromkeys(("num-generations", "num-return-sequences", "group-size", "rollout-n"), "n_samples_per_prompt"),
    **dict.fromkeys(("dataset", "data", "data-path", "train-data", "train-files", "dataset-name"), "prompt_data"),
    **dict.fromkeys(("eval-data", "val-data", "val-files", "eval-dataset"), "eval_prompt_data"),
    **dict.fromkeys(("reward-fn", "reward-function", "reward-func", "reward-funcs", "reward-model"), "custom_rm_path"),
    **dict.fromkeys(("clip-range", "cliprange", "clip-ratio", "clip-eps", "epsilon"), "eps_clip"),
    **dict.fromkeys(("max-grad-norm", "gradient-clipping", "grad-clip"), "clip_grad"),
    **dict.fromkeys(("warmup-steps", "lr-warmup-steps", "num-warmup-steps"), "lr_warmup_iters"),
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler"), "lr_decay_style"),
    **dict.fromkeys(("gae-lambda", "lam", "lambda"), "lambd"),
    **dict.fromkeys(("beta", "kl-beta", "init-kl-coef"), "kl_coef"),
    **dict.fromkeys(("adv-estimator",), "advantage_estimator"),
    **dict.fromkeys(("save-steps", "save-freq"), "save_interval"),
    **dict.fromkeys(("eval-steps", "test-freq", "eval-freq"), "eval_interval"),
    **dict.fromkeys(("resume-from-checkpoint", "resume-from"), "resume"),
    **dict.fromkeys(("output-dir", "output-path", "out", "log-dir", "default-local-dir"), "run_dir"),
}
"""What other stacks call our commonest settings."""


class Args(
    RunGroup,
    ValuePretrainGroup,
    ValueHeadGroup,
    AlgorithmGroup,
    EngineGroup,
    EvalGroup,
    RolloutGroup,
    BatchGroup,
    OptimizerGroup,
    ParallelGroup,
    DeviceGroup,
    ModelGroup,
):
    """Every setting of a run as a flat, frozen, picklable model.

    Names that begin with an underscore may be attached by entry programs; every other assignment raises.
    """

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _overwritten: dict[str, Any] = PrivateAttr(default_factory=dict)
    """What the user gave and a recipe replaced."""

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], sources: Mapping[str, str], *, where: Mapping[str, str] | None = None
    ) -> Self:
        """Validate explicit values, put a recipe's on top, then fill what derives from them.

        Args:
            values: explicitly given values by field name; the rest take their defaults.
            sources: where each of `values` came from, by field name.
            where: how an error message should name each of `values` (default: its flag).

        Raises:
            ValueError: a name is unknown or a value has the wrong type; the message has a line per value.
        """
        args = cls._validated(values, sources, where or {})
        if args.sao_online_recipe is None:
            return args
        recipe = sao_online_settings(args.sao_online_recipe, compaction=args.sao_compaction)
        given = {name: getattr(args, name) for name in recipe if args.is_user_set(name)}
        args = args.replace(source=f"recipe:sao-{args.sao_online_recipe}", **recipe)
        args._overwritten = {name: value for name, value in given.items() if value != recipe[name]}
        return args

    @classmethod
    def _validated(cls, values: Mapping[str, Any], sources: Mapping[str, str], where: Mapping[str, str]) -> Self:
        refuse_unknown_fields(values)
        try:
            args = cls.model_validate(dict(values))
        except ValidationError as error:
            raise ValueError(_readable(error, where)) from None
        derived = _derived_values(args)
        if derived:
            args = args.model_copy(update={name: value for name, (value, _) in derived.items()})
        args._sources = dict(sources) | {name: f"derived:{origin}" for name, (_, origin) in derived.items()}
        return args

    @classmethod
    def build(cls, *, check: bool = False, entry: Entry = "train", **overrides: Any) -> Self:
        """Defaults plus `overrides`, for programs and tests that need no command line.

        Raises:
            ValueError: an override is unknown or invalid, or (with `check`) a rule across fields is broken.
        """
        args = cls.from_values(overrides, dict.fromkeys(overrides, "code"))
        if check:
            from miles.config.rules import check as check_rules

            check_rules(args, entry=entry)
        return args

    def replace(self, *, source: str, **changes: Any) -> Self:
        """A new validated `Args` with `changes`; fields derived from a changed one are derived anew.

        Raises:
            ValueError: a change is unknown or invalid.
        """
        sources = {name: origin for name, origin in self._sources.items() if not origin.startswith("derived:")}
        values = {name: getattr(self, name) for name in sources} | changes
        changed = type(self)._validated(values, sources | dict.fromkeys(changes, source), {})
        changed._overwritten = self._overwritten
        for name, value in vars(self).items():
            if name.startswith("_"):
                setattr(changed, name, value)
        return changed

    def for_role(self, role: Role) -> Self:
        """The settings as one role's trainer should read them: sizes, learning rate, warm-up, load and save.

        The critic loads from `critic_load` where that is set and from `load` otherwise.
        """
        if role == "actor":
            return self
        if role != "critic":
            raise ValueError(f"unknown role {role!r}: expected 'actor' or 'critic'")
        return self.replace(
            source="role:critic",
            tensor_model_parallel_size=self.critic_tensor_model_parallel_size,
            pipeline_model_parallel_size=self.critic_pipeline_model_parallel_size,
            # One tensor rank has nothing to split the sequence over.
            sequence_parallel=self.sequence_parallel and self.critic_tensor_model_parallel_size != 1,
            lr=self.critic_lr,
            lr_warmup_iters=self.critic_lr_warmup_iters,
            load=self.critic_load if self.critic_load is not None else self.load,
            save=self.critic_save,
            critic_save=self.critic_save,
        )

    def source_of(self, field: str) -> str:
        """Where a value came from: 'default', 'file:PATH', 'flag', 'derived:FIELD', 'code', 'role:critic', ..."""
        refuse_unknown_fields([field])
        return self._sources.get(field, "default")

    def is_user_set(self, field: str) -> bool:
        """Whether the user gave this value: by a flag, or in a file or program with another value than without it.

        A resolved config lists every setting: a default in a file, or what follows from other settings, says nothing.
        """
        source = self.source_of(field)
        value, default = getattr(self, field), type(self).model_fields[field].default
        if value is None and default is None:
            # A null on the command line takes back what a file says.
            return False
        if source == "flag":
            return True
        if source != "code" and not source.startswith("file:"):
            return False
        if field == "critic_save":
            # Every online run has a folder for it, needed or not.
            return False
        if default is None:
            followed = _derived_values(self.model_copy(update={field: None})).get(field, (None, ""))[0]
            return value != followed
        return value != default

    @property
    def has_critic(self) -> bool:
        """Whether a critic group runs beside the actor."""
        return bool(self.use_critic)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference model are read."""
        return self.kl_coef > 0 or self.use_kl_loss

    @property
    def training_forward_gives_old_log_probs(self) -> bool:
        """Whether the old policy is the one of the training forward, so that no pass before it has to read it.

        With one optimizer step per rollout both are the same weights; only a penalty in the reward, and a weight
        normalised over the batch, need it earlier.
        """
        needed_before = self.kl_coef > 0 or self.mis_batch_normalize
        return self.num_steps_per_rollout == 1 and not self.use_rollout_logprobs and not needed_before

    def eval_sets(self) -> list[EvalSet]:
        """The evaluation sets, each with its sampling.

        Raises:
            ValueError: a name that is given twice, or sampling that cannot be read.
        """
        default = Sampling(
            temperature=self.eval_temperature,
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
            n_samples=self.n_samples_per_eval_prompt,
            max_response_len=self.eval_max_response_len or self.rollout_max_response_len,
            max_prompts=self.eval_max_prompts,
        )
        return parse_eval_sets(self.eval_prompt_data, self.eval_sampling, default)

    def faults(self) -> list[Fault]:
        """The faults that tests asked for.

        Raises:
            ValueError: one that cannot be read.
        """
        return parse_faults(self.fault_injection)

    def world_size(self, role: Role) -> int:
        """Devices of a role's group."""
        if role == "actor":
            return self.actor_num_nodes * self.actor_num_gpus_per_node
        assert self.critic_num_nodes is not None and self.critic_num_gpus_per_node is not None
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def rollouts_to_run(self) -> int | None:
        """Rollouts after which a start ends: `num_rollout`, of which a canary makes the first."""
        return 1 if self.canary_one_step and self.num_rollout is not None else self.num_rollout

    def optimizer_steps(self, role: Role) -> int | None:
        """Optimizer steps of a role in the whole of an online run, None where its length is not known.

        A critic goes `num_critic_epochs` times over each rollout, an actor passes over the first
        `num_critic_only_steps` rollouts.
        """
        if self.num_rollout is None:
            return None
        if role == "critic":
            return self.num_rollout * self.num_steps_per_rollout * self.num_critic_epochs
        # A rule refuses a run that trains the critic alone.
        return max(1, self.num_rollout - self.num_critic_only_steps) * self.num_steps_per_rollout

    def engine_cache_tokens(self, device: str) -> int | None:
        """Tokens of a rollout engine's key-value cache on a kind of device; None leaves them to SGLang."""
        if self.sglang_max_total_tokens is None and device == "cpu":
            return _CPU_CACHE_TOKENS
        return self.sglang_max_total_tokens

    def engine_dtype(self, device: str) -> Literal["bfloat16", "float32"]:
        """Of a rollout engine's parameters on a kind of device; on a CPU SGLang's bfloat16 is slow and not seeded."""
        return "bfloat16" if self.bf16 and device == "cuda" else "float32"

    def model_parallel_size(self, role: Role) -> int:
        """Devices that hold one replica of a role's model: tensor x pipeline x context."""
        if role == "actor":
            return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        assert self.critic_tensor_model_parallel_size is not None
        assert self.critic_pipeline_model_parallel_size is not None
        return (
            self.critic_tensor_model_parallel_size
            * self.critic_pipeline_model_parallel_size
            * self.context_parallel_size
        )


def refuse_unknown_fields(names: Iterable[str], *, told_by: str = "") -> None:
    """Raise a ValueError, which begins with `told_by`, for the first name that is no field, with the nearest one."""
    for name in names:
        if name not in Args.model_fields:
            raise ValueError(f"{told_by}unknown setting {name!r}{nearest(name, Args.model_fields)}")


def nearest(name: str, candidates: Iterable[str]) -> str:
    """' (did you mean X?)' for the candidate that other stacks call `name` or that is closest, if there is one."""
    spelled = {candidate.replace("_", "-").strip("-").lower(): candidate for candidate in candidates}
    sought = name.replace("_", "-").strip("-").lower()
    ours = _ELSEWHERE.get(sought, "").replace("_", "-")
    found = [ours] if ours in spelled else difflib.get_close_matches(sought, spelled, n=1, cutoff=0.6)
    return f" (did you mean {spelled[found[0]]}?)" if found else ""


def _derived_values(args: Args) -> dict[str, tuple[Any, str]]:
    """Values of unset fields that follow from other fields, each with the field it follows from."""
    derived: dict[str, tuple[Any, str]] = {
        name: (getattr(args, origin), origin) for name, origin in _INHERITED.items() if getattr(args, name) is None
    }
    if args.use_critic is None:
        needed = estimator_facts(args.advantage_estimator).critic
        own = is_hook(args.advantage_estimator)
        derived["use_critic"] = (not own if needed is None else needed, "advantage_estimator")
    if args.ratio_correction == "mis" and args.mis_low is None:
        # Truncation has no lower bound: one above the upper would be nobody's mistake.
        low = 1.0 / args.mis_high
        derived["mis_low"] = (min(low, args.mis_high) if args.mis_mode == "truncate" else low, "mis_high")
    if args.loss_agg_mode == "seq-mean-token-sum-norm" and args.loss_agg_length is None:
        derived["loss_agg_length"] = (args.rollout_max_response_len, "rollout_max_response_len")
    if args.over_sampling_batch_size is None:
        derived["over_sampling_batch_size"] = (args.rollout_batch_size, "rollout_batch_size")
    if args.dynamic_sampling_max_replacements is None and args.rollout_batch_size is not None:
        derived["dynamic_sampling_max_replacements"] = (4 * args.rollout_batch_size, "rollout_batch_size")
    if args.value_pretrain_eval_split is None:
        split = "heldout" if args.value_pretrain_eval_only else "train"
        derived["value_pretrain_eval_split"] = (split, "value_pretrain_eval_only")
    if args.critic_save is None and args.save is not None:
        derived["critic_save"] = (args.save.rstrip("/") + "_critic", "save")
    if args.global_batch_size is None and args.rollout_batch_size is not None:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        # A remainder is left for the rules to name.
        if samples % args.num_steps_per_rollout == 0:
            derived["global_batch_size"] = (samples // args.num_steps_per_rollout, "rollout_batch_size")
    return derived


def _readable(error: ValidationError, where: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        inside = "".join(f"[{part}]" for part in problem["loc"][1:] if isinstance(part, int))
        reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should", "must", 1)
        lines.append(f"{where.get(name, flag_of(name))}{inside}: {reason}, got {problem['input']!r}")
    return "\n".join(dict.fromkeys(lines))
