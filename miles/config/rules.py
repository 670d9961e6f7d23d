"""Every rule that ties several settings together, or a setting to the disk, checked before Ray starts.

A rule is a generator of complaints about `Args`; `check` runs all that apply and reports every broken one at once.
Nothing heavy is imported: no torch, no ray, no transformers.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from miles.config.args import Args, Entry, Role
from miles.config.choices import (
    CORRECTION_SETTINGS,
    CORRECTIONS,
    CRITIC_SETTINGS,
    ESTIMATOR_SETTINGS,
    OBJECTIVE_SETTINGS,
    OBJECTIVES,
    OF_ROLLOUT_ENGINE,
    estimator_facts,
    is_greedy,
    is_hook,
    split_function,
)
from miles.config.groups import (
    AlgorithmGroup,
    BatchGroup,
    EngineGroup,
    EvalGroup,
    Group,
    OptimizerGroup,
    ParallelGroup,
    RolloutGroup,
    ValueHeadGroup,
    ValuePretrainGroup,
    fields_of,
    flag_of,
)
from miles.config.hf_folder import HfFolder, inspect_hf_folder
from miles.contracts.canonical import real_path

_BYTES_PER_PARAMETER = 12
"""A checkpoint holds a float32 weight and Adam's two moments of each parameter."""


def check(args: Args, *, entry: Entry) -> list[str]:
    """Check every rule of a program.

    Returns:
        Warnings: what is allowed but probably not meant.

    Raises:
        ValueError: a line for each broken rule, naming the flags and files.
    """
    problems = [*_backend(args, entry), *_batch(args, entry), *_schedule(args, entry), *_checkpoints(args, entry)]
    problems += [*_value_head(args, entry), *_tracking(args)]
    problems += [*(_online_rules(args) if entry == "train" else _value_pretraining(args))]
    model = None
    try:
        model = _model(args)
    except ValueError as error:
        problems.append(f"{flag_of('hf_checkpoint')}: {error}")
    if model is not None:
        problems += [*_model_layout(args, entry, model), *_lengths(args, entry, model), *_disk(args, entry, model)]
    if problems:
        raise ValueError("\n".join(problems))
    return [*_warnings(args, entry), *(_without_effect(args) if entry == "train_value" else ())]


def roles_of(args: Args, entry: Entry) -> tuple[Role, ...]:
    """The training groups a program runs."""
    if entry == "train_value":
        return ("critic",)
    if args.rollout_only:
        return ()
    return ("actor", "critic") if args.has_critic else ("actor",)


def _settings_of(*groups: type[Group]) -> set[str]:
    return {name for group in groups for name in fields_of(group)}


def _unread(args: Args, settings: Iterable[str], because: str) -> Iterator[str]:
    """A complaint for each of the settings that the user gave."""
    for name in sorted(settings):
        if args.is_user_set(name):
            yield f"{flag_of(name)} has no effect {because}"


def _unread_flags(args: Args, settings: Iterable[str], because: str) -> Iterator[str]:
    """As `_unread`, of flags alone: a file may serve several programs, a flag is meant for this one."""
    yield from _unread(args, (name for name in settings if args.source_of(name) == "flag"), because)


def _backend(args: Args, entry: Entry) -> Iterator[str]:
    if args.train_backend != "megatron":
        program = "online training" if entry == "train" else "offline value pretraining"
        yield f"{program} currently requires --train-backend megatron, got {args.train_backend!r}"


def _batch(args: Args, entry: Entry) -> Iterator[str]:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu"
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        yield "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size"
    # Programs written against the flags of value pretraining may give both: `_without_effect`.
    if args.use_dynamic_batch_size and entry == "train":
        yield from _unread_flags(args, {"micro_batch_size"}, "with --use-dynamic-batch-size")
    yield from _per_role(args, entry, _batch_of_role)


def _per_role(args: Args, entry: Entry, rule: Callable[[Args, Entry, Role], Iterable[str]]) -> Iterator[str]:
    """What a rule says of each role, once where it says the same of both.

    In its text @role stands for the roles' names, and --@role for a flag of the first one's.
    """
    whose: dict[str, list[Role]] = {}
    for role in roles_of(args, entry):
        for text in rule(args, entry, role):
            whose.setdefault(text, []).append(role)
    for text, roles in whose.items():
        yield text.replace("--@role", f"--{roles[0]}").replace("@role", " and ".join(roles))


def _batch_of_role(args: Args, entry: Entry, role: Role) -> Iterator[str]:
    devices, replica = args.world_size(role), args.model_parallel_size(role)
    tensor = args.for_role(role).tensor_model_parallel_size
    # A critic beside an actor drops sequence parallelism by itself where it has one tensor rank.
    own = role == "actor" or entry == "train_value"
    if own and args.sequence_parallel and tensor == 1:
        yield "--sequence-parallel needs a tensor-parallel size above 1 for the @role"
    if devices % replica:
        yield (
            f"@role: {devices} devices (--@role-num-nodes x --@role-num-gpus-per-node) are not divisible by "
            f"the model-parallel size {replica} (tensor x pipeline x context)"
        )
        return
    if args.global_batch_size is None or args.use_dynamic_global_batch_size:
        return
    replicas = devices // replica
    # Token-balanced micro-batches deal uneven shares; the batch plan of value pretraining never does.
    if args.use_dynamic_batch_size and entry == "train":
        if args.global_batch_size < replicas:
            yield f"--global-batch-size {args.global_batch_size} leaves some @role replicas of {replicas} idle"
    elif args.global_batch_size % replicas:
        yield (
            f"--global-batch-size {args.global_batch_size} is not divisible by the @role's data-parallel size "
            f"{replicas}"
        )
    elif not args.use_dynamic_batch_size and args.global_batch_size // replicas % args.micro_batch_size:
        yield (
            f"the @role's local batch {args.global_batch_size // replicas} (--global-batch-size "
            f"{args.global_batch_size} over {replicas} replicas) is not divisible by --micro-batch-size "
            f"{args.micro_batch_size}"
        )


def _dynamic_global_batch(args: Args) -> Iterator[str]:
    if not args.use_dynamic_global_batch_size:
        return
    if not args.use_dynamic_batch_size:
        yield "--use-dynamic-global-batch-size takes any number of rows, which needs --use-dynamic-batch-size"
    if args.num_steps_per_rollout != 1:
        yield "--use-dynamic-global-batch-size is one step per rollout, --num-steps-per-rollout asks for more"
    if args.is_user_set("global_batch_size"):
        yield "--global-batch-size has no effect with --use-dynamic-global-batch-size"


def _schedule(args: Args, entry: Entry) -> Iterator[str]:
    if args.lr_decay_style == "constant":
        for field in ("lr_decay_iters", "min_lr"):
            if getattr(args, field) != type(args).model_fields[field].default:
                yield f"{flag_of(field)} has no effect with --lr-decay-style constant"
    elif entry == "train" or not args.value_pretrain_eval_only:
        yield from _per_role(args, entry, _decay_of_role)


def _decay_of_role(args: Args, entry: Entry, role: Role) -> Iterator[str]:
    own = args.for_role(role)
    if own.min_lr > own.lr:
        yield f"--min-lr {own.min_lr} is above the peak learning rate {own.lr} of the @role"
    steps = args.lr_decay_iters or (args.num_rollout if entry == "train_value" else args.optimizer_steps(role))
    if steps is not None and own.lr_warmup_iters >= steps:
        end = f"--lr-decay-iters {steps}" if args.lr_decay_iters else f"the {steps} optimizer steps of the run"
        yield f"{flag_of('lr_warmup_iters', role)} {own.lr_warmup_iters} must be below {end}"


def _checkpoints(args: Args, entry: Entry) -> Iterator[str]:
    target = "save" if entry == "train" else "critic_save"
    if args.save_interval is not None and getattr(args, target) is None:
        yield f"--save-interval has no effect without {flag_of(target)}"
    if args.critic_value_pretrain_contract_sha256 is not None and args.critic_load is None:
        yield "--critic-value-pretrain-contract-sha256 pins the contract in --critic-load, which is not given"
    if entry == "train" and args.critic_value_eval_report is not None and args.critic_load is None:
        yield "--critic-value-eval-report speaks of the critic in --critic-load, which is not given"
    # A run that goes on reads its own save, and what it began with may be gone.
    for field in () if entry == "train" and args.resume else ("load", "critic_load"):
        folder = getattr(args, field)
        # An explicit resume never starts afresh in silence.
        if folder is not None and not Path(folder).is_dir():
            yield f"{flag_of(field)} {folder}: no such folder"
        elif folder is not None and not any(Path(folder).iterdir()):
            yield f"{flag_of(field)} {folder}: the folder is empty, there is nothing to resume from"
    written = {"run_dir": args.run_dir} | {field: getattr(args, field) for field in saved_to(args, entry)}
    unusable = {field: why for field, folder in written.items() if folder and (why := _not_writable(Path(folder)))}
    for field, why in unusable.items():
        # A folder that was put into the run folder has nothing of its own to tell.
        if field == "run_dir" or args.source_of(field) != "generated" or "run_dir" not in unusable:
            yield f"{flag_of(field)} {written[field]}: {why}"
    if args.save and args.critic_save and real_path(args.save) == real_path(args.critic_save):
        yield f"--save and --critic-save name the same folder {args.save}"


def check_value_head(args: Args) -> None:
    """Check the rules of an online run's value head once what the critic starts from has stated it.

    Raises:
        ValueError: a line for each broken one.
    """
    if problems := [*_value_head(args, "train", settled=True)]:
        raise ValueError("\n".join(problems))


def _value_head(args: Args, entry: Entry, *, settled: bool = False) -> Iterator[str]:
    low, high = args.value_reward_range
    if low >= high:
        yield f"--value-reward-range {low} {high}: the lower end must be below the upper"
    if args.value_loss_type == "classification" and args.value_num_bins < 2:
        yield f"--value-num-bins {args.value_num_bins}: classification needs at least 2"
    # A contract in --critic-load, or a save, states the head, which is compared with what the user states of it.
    elsewhere = args.critic_load is not None or args.resume
    unknown = not settled and elsewhere and args.source_of("value_loss_type") == "default"
    if "critic" not in roles_of(args, entry) or unknown:
        return
    if args.value_loss_type == "mse":
        yield from _unread(args, _settings_of(ValueHeadGroup) - {"value_loss_type"}, "with --value-loss-type mse")
        return
    if entry == "train":
        yield from _unread(args, {"value_clip"}, "with --value-loss-type classification")
    if args.value_target_type == "two_hot":
        yield from _unread(args, {"hl_gauss_sigma_ratio"}, "with --value-target-type two_hot")


def _tracking(args: Args) -> Iterator[str]:
    for field, package, remedy in (
        ("tensorboard", "tensorboard", "--no-tensorboard or pip install tensorboard"),
        ("use_wandb", "wandb", "pip install 'miles[wandb]'"),
    ):
        if getattr(args, field) and importlib.util.find_spec(package) is None:
            yield f"{flag_of(field)}: {package} is not installed; {remedy}"


def _online_rules(args: Args) -> Iterator[str]:
    for rules in (_online, _engines, _rollout, _evaluation, _estimator, _objective, _kl, _sao, _dynamic_global_batch):
        yield from rules(args)


def _online(args: Args) -> Iterator[str]:
    needed = ["hf_checkpoint", "num_rollout", "rollout_batch_size", "rollout_max_response_len"]
    if args.load_rollouts is None:
        needed += ["prompt_data", "custom_rm_path"]
    for field in needed:
        if getattr(args, field) is None:
            yield f"online training needs {flag_of(field)}"
    if args.resume and args.source_of("run_dir") == "generated":
        yield "--resume needs --run-dir, the folder of the run to go on with"
    if not args.resume:
        yield from _unread(args, {"allow_config_change"}, "without --resume")
    for field in fields_of(ValuePretrainGroup):
        # A file may serve both programs; a flag is meant for this one.
        if args.source_of(field) in ("flag", "code"):
            yield f"{flag_of(field)} belongs to value pretraining (train_value.py), not to online training"
    if args.prompt_data is not None and not Path(args.prompt_data).is_file():
        yield f"--prompt-data {args.prompt_data}: {_what_is_there(args.prompt_data)}"
    for field in ("custom_rm_path", "dynamic_sampling_filter_path", "advantage_estimator"):
        path = getattr(args, field)
        if path is not None and is_hook(path):
            where, _ = split_function(path)
            if where.endswith(".py") and not Path(where).is_file():
                yield f"{flag_of(field)} {path}: no such file {where}"
    try:
        faults = args.faults()
    except ValueError as error:
        yield str(error)
        return
    for fault, text in zip(faults, args.fault_injection, strict=True):
        if fault.action == "kill_critic" and not args.has_critic:
            yield f"--fault-injection {text}: the run has no critic"
        if args.rollouts_to_run is not None and fault.step > args.rollouts_to_run:
            which = "--canary-one-step" if args.canary_one_step else "--num-rollout"
            yield f"--fault-injection {text}: the run ends with step {args.rollouts_to_run} ({which})"
    if args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} is not divisible by --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}"
        )
    if args.rollout_batch_size is not None:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        steps = args.num_steps_per_rollout
        if args.global_batch_size is None:
            yield f"--num-steps-per-rollout {steps} does not divide the {samples} samples of a rollout"
        elif args.global_batch_size * steps != samples and not args.use_dynamic_global_batch_size:
            yield (
                f"--global-batch-size {args.global_batch_size} x --num-steps-per-rollout {steps} must equal "
                f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
            )
    if args.canary_one_step and args.num_critic_only_steps:
        yield "--canary-one-step updates the actor, --num-critic-only-steps keeps it from doing so"
    elif args.num_rollout is not None and args.num_critic_only_steps >= args.num_rollout:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps} leaves the actor no step of --num-rollout "
            f"{args.num_rollout}"
        )
    if args.canary_one_step and args.save is None:
        yield "--canary-one-step saves once, which needs --save"


_OF_AN_ENGINE = {
    **dict.fromkeys(("model-path", "model"), "--hf-checkpoint"),
    **dict.fromkeys(("host", "nccl-port"), None),
    "port": "--sglang-port-base",
    "dtype": "--bf16",
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), "--rollout-num-gpus-per-engine"),
}
"""What miles itself tells an engine and rests on, and the flag that says it."""


def _engines(args: Args) -> Iterator[str]:
    for text in args.sglang_extra_args:
        name = text.partition("=")[0].lstrip("-").replace("_", "-")
        if text.startswith("--") and name in _OF_AN_ENGINE:
            instead = "" if (ours := _OF_AN_ENGINE[name]) is None else f": {ours} says it"
            yield f"--sglang-extra-args {text}: --{name} is given to each engine by miles{instead}"


_SAMPLING_ALONE = (
    _settings_of(RolloutGroup, EvalGroup, EngineGroup) | {"rollout_num_gpus", "rollout_num_gpus_per_engine"}
) - {
    *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "rollout_temperature"),
    *("load_rollouts", "rollout_only", "over_sampling_batch_size", "dynamic_sampling_max_replacements"),
}
"""Settings that nothing reads where rollouts are loaded; those of the filter have a complaint of their own."""

_TRAINING_ALONE = (
    _settings_of(ParallelGroup, OptimizerGroup, BatchGroup, EvalGroup, AlgorithmGroup, ValueHeadGroup)
    | {"save", "critic_load", "critic_save", "ref_load", "check_weight_sync", "max_restarts"}
    | {"critic_value_eval_report", "critic_value_pretrain_contract_sha256"}
) - {
    *("rollout_num_gpus", "rollout_num_gpus_per_engine"),
    # They bound the prompts.
    *("use_dynamic_batch_size", "max_tokens_per_gpu", "context_parallel_size"),
}
"""Settings that nothing reads where rollouts are only sampled."""


def _rollout(args: Args) -> Iterator[str]:
    for field, greedy, other in (("rollout_temperature", 0, ""), ("rollout_top_k", 1, ", or -1 for all tokens")):
        if getattr(args, field) == greedy and not args.rollout_only:
            must = f"it must be above {greedy}{other}"
            yield f"{flag_of(field)} {greedy} is greedy, which gives nothing to train on: {must}"
    if args.load_rollouts is not None:
        if not Path(args.load_rollouts).is_dir():
            yield f"--load-rollouts {args.load_rollouts}: no such folder"
        if args.rollout_only:
            yield "--load-rollouts trains without sampling, --rollout-only samples without training"
        because = "with --load-rollouts, which starts no engine"
        yield from _unread_flags(args, _SAMPLING_ALONE - {"eval_prompt_data"}, because)
        yield from _unread(args, {"eval_prompt_data"}, because)
    if args.rollout_only:
        because = "with --rollout-only, which trains nothing"
        yield from _unread(args, {"canary_one_step", "save_interval", "fault_injection"}, because)
        yield from _unread(args, {"load"}, "with --rollout-only, which samples from --hf-checkpoint")
        yield from _unread_flags(args, _TRAINING_ALONE, because)
    wanted, sampled = args.rollout_batch_size, args.over_sampling_batch_size
    if wanted is not None and sampled is not None and sampled < wanted:
        yield f"--over-sampling-batch-size {sampled} is below --rollout-batch-size {wanted}"
    if args.dynamic_sampling_filter_path is None:
        unread = {"over_sampling_batch_size", "dynamic_sampling_max_replacements"}
        yield from _unread(args, unread, "without --dynamic-sampling-filter-path")


def _evaluation(args: Args) -> Iterator[str]:
    if bool(args.eval_prompt_data) != (args.eval_interval is not None):
        yield "--eval-prompt-data and --eval-interval must be given together"
    if not args.eval_prompt_data:
        if args.load_rollouts is None and not args.rollout_only:
            unread = _settings_of(EvalGroup) - {"eval_prompt_data", "eval_interval"}
            yield from _unread(args, unread, "without --eval-prompt-data")
        return
    try:
        sets = args.eval_sets()
    except ValueError as error:
        yield str(error)
        return
    for one in sets:
        if not Path(one.path).is_file():
            yield f"--eval-prompt-data {one.path}: {_what_is_there(one.path)}"


def _estimator(args: Args) -> Iterator[str]:
    name = args.advantage_estimator
    facts = estimator_facts(name)
    yield from _unread(args, ESTIMATOR_SETTINGS - facts.reads, f"with --advantage-estimator {name}")
    if name == "gae_adaptive":
        if args.gae_adaptive_mode == "fixed":
            unread = ("gae_adaptive_alpha", "gae_adaptive_min_length")
            yield from _unread(args, unread, "with --gae-adaptive-mode fixed")
        elif args.is_user_set("lambd"):
            yield "--lambd is not read by the actor with --gae-adaptive-mode adaptive; the critic's is --critic-lambd"
    if facts.critic is not None and args.use_critic != facts.critic:
        needs = "needs a critic" if facts.critic else "has no use for a critic"
        yield f"--advantage-estimator {name} {needs}; --use-critic decides for monte_carlo and functions of yours"
    if not args.has_critic:
        yield from _unread(args, CRITIC_SETTINGS, "without a critic")
    if facts.groups and args.n_samples_per_prompt < 2:
        yield (
            f"--advantage-estimator {name} compares the samples of one prompt: --n-samples-per-prompt must be at "
            f"least 2, got {args.n_samples_per_prompt}"
        )
    whitens = name.startswith("reinforce_plus_plus")
    if whitens and args.normalize_advantages and args.is_user_set("normalize_advantages"):
        yield f"--normalize-advantages has no effect with --advantage-estimator {name}, which whitens anyway"


def _objective(args: Args) -> Iterator[str]:
    objective, correction = args.policy_objective, args.ratio_correction
    yield from _unread(args, OBJECTIVE_SETTINGS - OBJECTIVES[objective], f"with --policy-objective {objective}")
    yield from _unread(args, CORRECTION_SETTINGS - CORRECTIONS[correction], f"with --ratio-correction {correction}")
    if correction == "mis" and args.mis_mode == "truncate":
        yield from _unread(args, {"mis_low"}, "with --mis-mode truncate")
    if not args.use_opsm:
        yield from _unread(args, {"opsm_delta"}, "without --use-opsm")
    if args.loss_agg_mode != "seq-mean-token-sum-norm":
        yield from _unread(args, {"loss_agg_length"}, f"with --loss-agg-mode {args.loss_agg_mode}")
    if objective in OF_ROLLOUT_ENGINE:
        if correction != "none":
            yield f"--policy-objective {objective} weighs tokens itself: --ratio-correction {correction} excludes it"
        if args.use_opsm:
            yield f"--policy-objective {objective} weighs tokens itself: --use-opsm excludes it"
    if args.use_rollout_logprobs and correction != "none":
        yield (
            f"--ratio-correction {correction} compares the old policy with the engine, which "
            "--use-rollout-logprobs makes one and the same"
        )
    if args.use_rollout_logprobs and objective == "decoupled_ppo":
        yield "--policy-objective decoupled_ppo needs an old policy beside the engine's: not --use-rollout-logprobs"
    if objective == "sao_dis" and not args.use_rollout_logprobs:
        yield "--policy-objective sao_dis reads the engine's log-probabilities: it needs --use-rollout-logprobs"
    for low, high in (("tis_clip_low", "tis_clip"), ("icepop_low", "icepop_high"), ("mis_low", "mis_high")):
        below, above = getattr(args, low), getattr(args, high)
        if below is not None and below > above:
            yield f"{flag_of(low)} {below} is above {flag_of(high)} {above}"
    below, above = args.mis_reject_low, args.mis_reject_high
    if correction == "mis" and below is None and above is None:
        yield from _unread(args, {"mis_reject_level"}, "without --mis-reject-low or --mis-reject-high")
    if below is not None and above is not None and below > above:
        yield f"--mis-reject-low {below} is above --mis-reject-high {above}"
    if args.use_opsm and args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs:
        yield "--use-opsm has no effect with one step per rollout, where the old policy is the current one"


def _kl(args: Args) -> Iterator[str]:
    if args.kl_coef > 0 and args.kl_loss_coef > 0:
        yield f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} would penalise the KL twice: give one"
    if args.use_kl_loss and args.kl_loss_coef == 0:
        yield "--use-kl-loss needs --kl-loss-coef above 0"
    if not args.use_kl_loss:
        yield from _unread(args, {"kl_loss_coef", "use_unbiased_kl"}, "without --use-kl-loss")
    if not args.needs_reference:
        yield from _unread(args, {"ref_load", "kl_loss_type"}, "without --kl-coef or --use-kl-loss")
    elif args.ref_load is not None and not Path(args.ref_load).is_dir():
        yield f"--ref-load {args.ref_load}: no such folder"
    if args.kl_controller == "fixed":
        yield from _unread(args, {"kl_target", "kl_horizon"}, "with --kl-controller fixed")
    elif args.kl_coef == 0:
        yield "--kl-controller adaptive adapts --kl-coef, which must be above 0"
    elif args.rollout_batch_size is not None:
        samples = args.rollout_batch_size * args.n_samples_per_prompt
        # One rollout's factor is at least 1 - .2 samples / horizon, and a coefficient of 0 never moves again.
        if 5 * args.kl_horizon <= samples:
            yield (
                f"--kl-horizon {args.kl_horizon} must exceed a fifth of the {samples} samples of a rollout "
                "(--rollout-batch-size x --n-samples-per-prompt): a single one may take the coefficient to 0 for good"
            )
    if args.use_unbiased_kl and args.kl_loss_type != "k3":
        yield f"--use-unbiased-kl weighs k3: --kl-loss-type {args.kl_loss_type} does not go with it"


def _sao(args: Args) -> Iterator[str]:
    if args.sao_compaction and args.sao_online_recipe is None:
        yield "--sao-compaction has no effect without --sao-online-recipe"
    if args.sao_online_recipe is None:
        return
    if args.value_pretrain_manifest is not None:
        yield "--sao-online-recipe is for online training, not offline value pretraining"
    if args.n_samples_per_prompt != 1:
        yield f"SAO requires exactly one rollout per prompt, --n-samples-per-prompt is {args.n_samples_per_prompt}"
    if args.num_steps_per_rollout != 1:
        yield f"SAO makes one actor update per rollout, --num-steps-per-rollout is {args.num_steps_per_rollout}"
    if args.sao_compaction and args.load_rollouts is None:
        yield "--sao-compaction trains on kept rollouts of segments (--load-rollouts): none are sampled here yet"


_ONLINE_ALONE = (
    _settings_of(RolloutGroup, EvalGroup, EngineGroup, AlgorithmGroup)
    | {"resume", "max_restarts", "fault_injection", "allow_config_change", "ref_load", "critic_value_eval_report"}
    | {"use_dynamic_global_batch_size", "rollout_num_gpus", "rollout_num_gpus_per_engine"}
) - {"num_rollout", "critic_freeze_attention", "sao_online_recipe"}
"""Settings that value pretraining does not read; the recipe has a complaint of its own."""

_OF_EACH_ROLE = (
    *("lr", "lr_warmup_iters", "load", "save", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("actor_num_nodes", "actor_num_gpus_per_node"),
)
"""Settings of which the critic has one of its own."""


def _value_pretraining(args: Args) -> Iterator[str]:
    for field in sorted(_ONLINE_ALONE):
        # A file may serve both programs; a flag is meant for this one.
        if args.source_of(field) == "flag":
            yield f"{flag_of(field)} belongs to online training (train.py), not to value pretraining"
    if args.sao_online_recipe is not None:
        yield "--sao-online-recipe is for online training, not offline value pretraining"

    if args.value_pretrain_manifest is None:
        yield "value pretraining needs --value-pretrain-manifest"
    if args.hf_checkpoint is None:
        yield "value pretraining needs --hf-checkpoint, which says what model to build"
    if args.global_batch_size is None or args.source_of("global_batch_size").startswith("derived:"):
        yield "value pretraining needs --global-batch-size"
    yield from _critic_alone(args)
    if args.canary_one_step:
        yield "--canary-one-step belongs to online training; value pretraining has --value-pretrain-canary-one-step"
    if args.value_pretrain_eval_only:
        for field in ("critic_load", "value_pretrain_eval_report", "value_pretrain_eval_num_batches"):
            if getattr(args, field) is None:
                yield f"--value-pretrain-eval-only needs {flag_of(field)}"
        if args.value_pretrain_canary_one_step:
            yield "--value-pretrain-canary-one-step trains a step, --value-pretrain-eval-only trains none"
        report = args.value_pretrain_eval_report
        if report is not None and os.path.lexists(report):
            yield f"--value-pretrain-eval-report {report} exists already and is never replaced"
    else:
        if args.critic_save is None:
            yield "value pretraining needs --critic-save, the folder for the critic and its contract"
        unread = {"value_pretrain_eval_report", "value_pretrain_eval_num_batches", "value_gate_max_bias"}
        # Training reads the train split, so to say as much is no mistake: `_without_effect`.
        unread |= {"value_pretrain_eval_split"} if args.value_pretrain_eval_split == "heldout" else set()
        yield from _unread_flags(args, unread, "without --value-pretrain-eval-only")


_LEARNING = _settings_of(OptimizerGroup) | {
    *("value_pretrain_epochs", "num_rollout", "critic_save", "save_interval"),
    *("use_distributed_optimizer", "critic_freeze_attention"),
}
"""Settings that an evaluation does not read."""


def _without_effect(args: Args) -> Iterator[str]:
    """Flags that programs written against those of value pretraining may give everywhere, and that change nothing."""
    if args.value_pretrain_eval_only:
        yield from _unread_flags(args, _LEARNING, "with --value-pretrain-eval-only, which trains nothing")
    else:
        yield from _unread_flags(args, {"value_pretrain_eval_split"}, "without --value-pretrain-eval-only")
    if args.use_dynamic_batch_size:
        yield from _unread_flags(args, {"micro_batch_size"}, "with --use-dynamic-batch-size")


def _critic_alone(args: Args) -> Iterator[str]:
    """The critic is the only role, so what is given of an actor is given in vain."""
    for field in _OF_EACH_ROLE:
        own = "critic_" + field.removeprefix("actor_")
        stated = getattr(args, own) is not None and not args.source_of(own).startswith(("default", "derived:"))
        if args.source_of(field) == "flag" and stated:
            yield f"{flag_of(field)} has no effect in value pretraining beside {flag_of(own)}"
    if args.is_user_set("lr_warmup_iters") and args.source_of("critic_lr_warmup_iters") == "default":
        yield "--lr-warmup-iters has no effect in value pretraining: a critic's warm-up is --critic-lr-warmup-iters"


def _what_is_there(path: str) -> str:
    if Path(path).is_dir():
        return "is a folder; a JSONL file is expected"
    return "is not a regular file" if Path(path).exists() else "no such file"


def _model(args: Args) -> HfFolder | None:
    return None if args.hf_checkpoint is None else inspect_hf_folder(args.hf_checkpoint)


def _model_layout(args: Args, entry: Entry, model: HfFolder) -> Iterator[str]:
    heads = model.number("num_attention_heads")

    def of_role(args: Args, entry: Entry, role: Role) -> Iterator[str]:
        sizes = args.for_role(role)

        def flag(field: str) -> str:
            derived = role == "actor" or args.source_of(f"critic_{field}").startswith(("default", "derived:"))
            return flag_of(field, "actor" if derived else "critic")

        for key, size, field in (
            ("num_attention_heads", sizes.tensor_model_parallel_size, "tensor_model_parallel_size"),
            ("num_key_value_heads", sizes.tensor_model_parallel_size, "tensor_model_parallel_size"),
            ("intermediate_size", sizes.tensor_model_parallel_size, "tensor_model_parallel_size"),
            ("num_hidden_layers", sizes.pipeline_model_parallel_size, "pipeline_model_parallel_size"),
        ):
            count = model.number(key) or (heads if key == "num_key_value_heads" else None)
            if count is not None and count % size:
                yield f"@role: {flag(field)} {size} does not divide {key} {count} of {model.path / 'config.json'}"

    yield from _per_role(args, entry, of_role)


def _lengths(args: Args, entry: Entry, model: HfFolder) -> Iterator[str]:
    if entry != "train":
        return
    response, prompt = args.rollout_max_response_len, args.rollout_max_prompt_len or 1
    limit = model.number("max_position_embeddings")
    if response is not None and limit is not None and prompt + response > limit:
        yield (
            f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {response} exceed the model's "
            f"max_position_embeddings {limit}"
        )
    cache = None if args.load_rollouts is not None else args.engine_cache_tokens(args.device)
    if response is not None and cache is not None and prompt + response > cache:
        yield (
            f"--sglang-max-total-tokens {cache} cannot hold one prompt of {prompt} and its response of {response} "
            "tokens"
        )
    budget = args.max_tokens_per_gpu and args.max_tokens_per_gpu * args.context_parallel_size
    if budget is not None and response is not None and prompt + response > budget:
        yield (
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} cannot hold one prompt of {prompt} and its response of "
            f"{response} tokens"
        )
    yield from _eval_lengths(args, limit=limit, cache=cache)
    vocab_size = model.number("vocab_size")
    for token in args.rollout_stop_token_ids:
        if vocab_size is not None and token >= vocab_size:
            yield f"--rollout-stop-token-ids {token} is outside the model's vocabulary of {vocab_size}"


def _eval_lengths(args: Args, *, limit: int | None, cache: int | None) -> Iterator[str]:
    """Responses of evaluation that leave no room for a prompt of one token."""
    try:
        sets = args.eval_sets()
    except ValueError:
        # `_evaluation` tells it.
        return
    rooms = (("the model's max_position_embeddings", limit), ("--sglang-max-total-tokens", cache))
    for one in sets:
        response = one.sampling.max_response_len
        if response is None or response == args.rollout_max_response_len:
            continue
        for what, room in rooms:
            if room is not None and response >= room:
                yield (
                    f"--eval-prompt-data {one.path}: responses of {response} tokens (--eval-max-response-len, or "
                    f"max_response_len in --eval-sampling) leave no room for a prompt in {what} {room}"
                )


def _disk(args: Args, entry: Entry, model: HfFolder) -> Iterator[str]:
    need = model.num_parameters * _BYTES_PER_PARAMETER
    on_disk: dict[int, list[tuple[str, str]]] = {}
    for field in saved_to(args, entry):
        folder = getattr(args, field)
        if folder is not None and not _not_writable(Path(folder)):
            on_disk.setdefault(_nearest_existing(Path(folder)).stat().st_dev, []).append((flag_of(field), folder))
    for there in on_disk.values():
        usage = shutil.disk_usage(_nearest_existing(Path(there[0][1])))
        # A file system that has no size to tell, as some of networks, says 0.
        if usage.total and usage.free < need * len(there):
            folders = " and ".join(f"{flag} {folder}" for flag, folder in there)
            what = "a checkpoint of this model takes" if len(there) == 1 else "one checkpoint of each takes"
            yield f"{folders}: {_size(usage.free)} are free, {what} about {_size(need * len(there))}"


def saved_to(args: Args, entry: Entry) -> tuple[str, ...]:
    """The settings that name a folder for checkpoints, of the groups a program trains."""
    if entry == "train_value" and args.value_pretrain_eval_only:
        return ()
    return tuple("save" if role == "actor" else "critic_save" for role in roles_of(args, entry))


def generated_saves(run_dir: str) -> dict[str, str]:
    """Where an online run saves to that names no folder, by setting."""
    folder = Path(run_dir) / "checkpoints"
    return {"save": str(folder / "actor"), "critic_save": str(folder / "critic")}


def _size(count: int) -> str:
    """Bytes as a reader wants them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


_FEW_ROLLOUTS = 10
"""So much work may be lost without a word."""


def _warnings(args: Args, entry: Entry) -> Iterator[str]:
    for name, value in args._overwritten.items():
        yield f"--sao-online-recipe {args.sao_online_recipe} sets {name} to {getattr(args, name)}, {value} was given"
    if args.use_kl_loss and args.kl_loss_type != "k2" and not args.use_unbiased_kl:
        what = "has an expected gradient of zero" if args.kl_loss_type == "k1" else "has a biased gradient"
        yield f"--kl-loss-type {args.kl_loss_type} in the loss {what}: on samples of the policy itself k2 has the KL's"
    if entry == "train" and not args.rollout_only:
        yield from _learning_otherwise(args)
    if args.lr_decay_style == "constant":
        yield from _per_role(args, entry, _warm_up_of_role)
    rollouts = 0 if entry == "train_value" or args.rollout_only or args.canary_one_step else args.num_rollout or 0
    if rollouts > _FEW_ROLLOUTS and (args.save_interval is None or args.save_interval > rollouts):
        every = args.save_interval
        interval = "without --save-interval" if every is None else f"--save-interval {every}:"
        yield (
            f"{interval} nothing is saved before the last of {rollouts} rollouts: a run that ends before it has "
            "nothing to resume from"
        )
    if args.bf16 and args.device == "cpu":
        yield "--bf16 on a CPU is two to three times slower than float32"
    greedy = is_greedy(args.rollout_temperature, args.rollout_top_k)
    if args.rollout_only and greedy and args.n_samples_per_prompt > 1:
        yield (
            f"{args.n_samples_per_prompt} samples of a prompt (--n-samples-per-prompt) repeat the same greedy answer "
            "(--rollout-temperature 0, or --rollout-top-k 1)"
        )
    for one in args.eval_sets() if entry == "train" else ():
        if is_greedy(one.sampling.temperature, one.sampling.top_k) and one.sampling.n_samples > 1:
            yield (
                f"--eval-prompt-data {one.path}: {one.sampling.n_samples} samples of a prompt repeat the same greedy "
                "answer (temperature 0, or top_k 1)"
            )


def _warm_up_of_role(args: Args, entry: Entry, role: Role) -> Iterator[str]:
    warm_up = args.for_role(role).lr_warmup_iters
    steps = args.num_rollout if entry == "train_value" else args.optimizer_steps(role)
    if not args.canary_one_step and steps is not None and steps <= warm_up:
        yield (
            f"{flag_of('lr_warmup_iters', role)} {warm_up} is not over within the {steps} optimizer steps of the run, "
            "which never come to the full learning rate"
        )


def _learning_otherwise(args: Args) -> Iterator[str]:
    """Settings with which the run learns something else than their names say."""
    objective, mode = args.policy_objective, args.loss_agg_mode
    if args.kl_coef > 0 and args.kl_loss_type != "k1":
        yield (
            f"--kl-loss-type {args.kl_loss_type} in the reward (--kl-coef) hardly pulls towards the reference: there "
            "only k1 has the KL's gradient"
        )
    if objective == "gspo" and mode != "seq-mean-token-mean":
        yield (
            f"--policy-objective gspo with --loss-agg-mode {mode} weighs sequences by their length: its paper takes "
            "the mean of sequences, --loss-agg-mode seq-mean-token-mean"
        )
    if args.advantage_estimator == "dr_grpo" and mode in ("token-mean", "seq-mean-token-mean"):
        yield (
            f"--advantage-estimator dr_grpo with --loss-agg-mode {mode} keeps the bias by length that it is meant to "
            "avoid: its paper divides by a constant, --loss-agg-mode seq-mean-token-sum-norm"
        )
    old_is_current = args.num_steps_per_rollout == 1 and not args.use_rollout_logprobs and objective != "sao_dis"
    if old_is_current:
        because = "with one step per rollout, where the old policy is the current one"
        yield from _unread(args, {"eps_clip", "eps_clip_high", "eps_clip_c"}, because)
        if objective in ("gspo", "cispo"):
            yield f"--policy-objective {objective} has the gradient of ppo {because}"
    if args.has_critic and args.num_critic_epochs * args.num_steps_per_rollout == 1:
        because = "with one critic update per rollout, where the old values are the current ones"
        yield from _unread(args, {"value_clip"}, because)
    filters = [
        f"{flag_of(name)} {getattr(args, name)}"
        for name, cuts in (("rollout_top_p", args.rollout_top_p < 1), ("rollout_top_k", args.rollout_top_k > 0))
        if cuts
    ]
    reads_engine = args.ratio_correction != "none" or objective in OF_ROLLOUT_ENGINE or args.use_unbiased_kl
    if filters and args.load_rollouts is None and (reads_engine or args.use_rollout_logprobs):
        yield (
            f"{' and '.join(filters)}: the engine's log-probabilities are those before the cut, so ratios to the "
            "policy that sampled are too large, by one over the probability that the cut leaves"
        )


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _not_writable(folder: Path) -> str | None:
    if folder.parts[:1] == ("~",):
        return "a shell makes the home folder of ~, a file or a program does not: write it out"
    if os.path.lexists(folder) and not folder.is_dir():
        return "is not a folder"
    parent = _nearest_existing(folder)
    if not parent.is_dir():
        return f"{parent} is not a folder"
    try:
        # Permission bits tell neither the superuser nor of /proc and file systems that are read-only; this file has
        # no name where the system can do without.
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"cannot be written: {parent}: {error.strerror}"
