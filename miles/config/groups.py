"""The typed groups of the configuration.

One class per group, one field per flag: `lr` is `--lr` on the command line and `lr:` in a file. A field's description
is its help text. Bounds of one value live here; rules that tie several values together live in `rules.py`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import CliVariadicArg

from miles.config.choices import ESTIMATORS, LEAST_TEMPERATURE, is_hook, is_top_k, split_function
from miles.config.recipes import SAO_BANDS


def _lower_case_digest(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("a SHA-256 is 64 lower-case hexadecimal digits")
    return text


def _hook_path(text: str) -> str:
    split_function(text)
    return text


def _estimator(text: str) -> str:
    if is_hook(text):
        return _hook_path(text)
    if text not in ESTIMATORS:
        raise ValueError(f"must be one of {', '.join(ESTIMATORS)}, or FILE.py:FUNCTION")
    return text


def _recipe(domain: Any) -> Any:
    if domain is not None and (not isinstance(domain, str) or domain not in SAO_BANDS):
        raise ValueError(f"unknown SAO online recipe: {domain}; must be one of {', '.join(SAO_BANDS)}")
    return domain


def _top_k(count: int) -> int:
    if not is_top_k(count):
        raise ValueError("must be at least 1, or -1 for all")
    return count


def _temperature(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}: below, SGLang is greedy too")
    return temperature


def _without_zero_byte(text: str) -> str:
    if "\0" in text:
        raise ValueError("a zero byte is not accepted here")
    return text


def _one_or_more(value: Any) -> Any:
    """A file may give a list's only item without brackets, or null for none."""
    return [value] if isinstance(value, str) else [] if value is None else value


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What NumPy can be seeded with, here and in SGLang."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
TopK = Annotated[int, AfterValidator(_top_k)]
Temperature = Annotated[NonNegativeFloat, AfterValidator(_temperature)]
Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(ge=0, lt=1)]
Sha256 = Annotated[str, AfterValidator(_lower_case_digest)]
HookPath = Annotated[str, AfterValidator(_hook_path)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_without_zero_byte)]
TextList = Annotated[list[Text], BeforeValidator(_one_or_more)]


class Group(BaseModel):
    """Base of the groups: frozen, no unknown keys, no silent conversions from a boolean to a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=False
    )

    title: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        given = value if isinstance(value, list | tuple) else [value]
        plain = cls.model_fields[info.field_name].annotation in (bool, bool | None)
        if not plain and any(isinstance(one, bool) for one in given):
            raise ValueError("a boolean is not accepted here")
        return value


class ModelGroup(Group):
    title: ClassVar[str] = "model and checkpoints"

    hf_checkpoint: Text | None = Field(
        None, description="Hugging Face model folder: architecture, tokenizer and the weights a fresh run starts from."
    )
    load: Text | None = Field(
        None,
        description="Folder of actor checkpoints to start from, weights only; --resume alone goes on with a run. A "
        "fresh critic takes its backbone from it too.",
    )
    save: Text | None = Field(
        None, description="Folder to write actor checkpoints to (unset: RUN_DIR/checkpoints/actor)."
    )
    save_interval: Positive | None = Field(
        None, description="Save every this many steps; unset saves once, at the end."
    )
    critic_load: Text | None = Field(
        None,
        description="Folder of critic checkpoints, for example a contracted, pretrained critic: train_value.py "
        "resumes from it, train.py starts from its weights.",
    )
    critic_value_eval_report: Text | None = Field(
        None, description="Evaluation report of the critic in --critic-load; refused unless it passed its gate."
    )
    critic_save: Text | None = Field(
        None,
        description="Folder to write critic checkpoints to. train_value.py needs it to train; train.py takes, unset, "
        "RUN_DIR/checkpoints/critic, or the value of a given --save with '_critic' appended.",
    )
    ref_load: Text | None = Field(
        None,
        description="Folder of actor checkpoints, or Hugging Face folder, of the reference model that KL is measured "
        "against (unset: --hf-checkpoint).",
    )
    critic_value_pretrain_contract_sha256: Sha256 | None = Field(
        None, description="SHA-256 that the contract file in --critic-load must have."
    )


class DeviceGroup(Group):
    title: ClassVar[str] = "device"

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="cuda runs over NCCL, cpu over gloo; auto takes cuda where it is available."
    )
    bf16: bool = Field(False, description="Train in bfloat16 with float32 main parameters (slow on a CPU).")
    train_backend: str = Field("megatron", description="Training backend; only megatron exists.")


class ParallelGroup(Group):
    title: ClassVar[str] = "parallel layout"

    tensor_model_parallel_size: Positive = Field(1, description="Ranks that share each layer's matrices.")
    pipeline_model_parallel_size: Positive = Field(1, description="Ranks that share the stack of layers.")
    context_parallel_size: Positive = Field(1, description="Ranks that share one sequence.")
    sequence_parallel: bool = Field(
        False, description="Split activations outside the matrices along the sequence over the tensor-parallel ranks."
    )
    use_distributed_optimizer: bool = Field(False, description="Shard optimizer state over the data-parallel ranks.")
    actor_num_nodes: Positive = Field(1, description="Machines of the actor group.")
    actor_num_gpus_per_node: Positive = Field(1, description="Devices per machine of the actor group.")
    critic_num_nodes: Positive | None = Field(None, description="Machines of the critic group (unset: the actor's).")
    critic_num_gpus_per_node: Positive | None = Field(
        None, description="Devices per machine of the critic group (unset: the actor's)."
    )
    critic_tensor_model_parallel_size: Positive | None = Field(
        None, description="Tensor-parallel size of the critic (unset: the actor's)."
    )
    critic_pipeline_model_parallel_size: Positive | None = Field(
        None, description="Pipeline-parallel size of the critic (unset: the actor's)."
    )
    rollout_num_gpus: Positive = Field(1, description="Devices of all rollout engines together.")
    rollout_num_gpus_per_engine: Positive = Field(1, description="Devices (tensor-parallel ranks) of one engine.")


class OptimizerGroup(Group):
    title: ClassVar[str] = "optimizer"

    lr: NonNegativeFloat = Field(1e-6, description="Peak learning rate.")
    critic_lr: NonNegativeFloat | None = Field(
        None, description="Peak learning rate of the critic (unset: the value of --lr)."
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the learning rate after the warm-up."
    )
    lr_warmup_iters: NonNegative = Field(0, description="Optimizer steps of linear warm-up of the actor.")
    critic_lr_warmup_iters: NonNegative = Field(0, description="Optimizer steps of linear warm-up of the critic.")
    lr_decay_iters: Positive | None = Field(
        None, description="Optimizer steps until the learning rate reaches --min-lr (unset: the length of the run)."
    )
    min_lr: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the decay.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay.")
    adam_beta1: OpenFraction = Field(0.9, description="Adam's first-moment decay.")
    adam_beta2: OpenFraction = Field(0.95, description="Adam's second-moment decay.")
    adam_eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Clip the global gradient norm to this; 0 does not clip.")


class BatchGroup(Group):
    title: ClassVar[str] = "batch"

    global_batch_size: Positive | None = Field(
        None,
        description="Samples of one optimizer step over all ranks (unset, in online training: "
        "rollout-batch-size x n-samples-per-prompt / num-steps-per-rollout).",
    )
    micro_batch_size: Positive = Field(
        1, description="Samples of one forward pass on one rank, without --use-dynamic-batch-size."
    )
    use_dynamic_batch_size: bool = Field(
        False, description="Fill micro-batches up to --max-tokens-per-gpu tokens instead of a fixed count of samples."
    )
    max_tokens_per_gpu: Positive | None = Field(
        None, description="Token budget of one micro-batch with --use-dynamic-batch-size."
    )
    use_dynamic_global_batch_size: bool = Field(
        False,
        description="One optimizer step on all rows of a rollout, however many they are; --global-batch-size is not "
        "read.",
    )
    seed: Seed = Field(
        1234, description="Seed of initialisation and of the value-pretraining batch plan, at least 0 and below 2^32."
    )


class RolloutGroup(Group):
    title: ClassVar[str] = "rollout"

    prompt_data: Text | None = Field(None, description="JSONL file of training prompts.")
    input_key: Text = Field("prompt", description="Key of a row that holds the prompt.")
    label_key: Text = Field("label", description="Key of a row that holds the label given to the reward function.")
    metadata_key: Text = Field("metadata", description="Key of a row that holds an object passed through.")
    apply_chat_template: bool = Field(False, description="Render prompts with the tokenizer's chat template.")
    rollout_shuffle: bool = Field(True, description="Shuffle the prompts anew in each epoch.")
    rollout_seed: Seed = Field(42, description="Seed of the prompt order and of sampling, at least 0 and below 2^32.")
    num_rollout: Positive | None = Field(
        None,
        description="Rollouts of the run; in value pretraining, where data and epochs decide, it must equal the steps "
        "of the batch plan, if given.",
    )
    rollout_batch_size: Positive | None = Field(None, description="Prompts of one rollout.")
    n_samples_per_prompt: Positive = Field(1, description="Responses sampled for each prompt.")
    rollout_max_prompt_len: Positive | None = Field(
        None,
        description="Longest prompt in tokens (unset: what the model, the engine and, in training, "
        "--max-tokens-per-gpu leave beside the response).",
    )
    overlong_prompts: Literal["refuse", "drop"] = Field(
        "refuse", description="What happens to a file with a prompt beyond the limit: refused, or read without it."
    )
    rollout_max_response_len: Positive | None = Field(None, description="Tokens of a response at most.")
    rollout_temperature: Temperature = Field(1.0, description="Sampling temperature.")
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling mass.")
    rollout_top_k: TopK = Field(-1, description="Sample among the k likeliest; -1: all.")
    rollout_stop_token_ids: CliVariadicArg[list[NonNegative]] = Field(
        [], description="Token ids that end a response, beside the tokenizer's end of sequence."
    )
    custom_rm_path: HookPath | None = Field(None, description="Reward function, MODULE:FUNCTION or FILE.py:FUNCTION.")
    rm_timeout_s: PositiveFloat = Field(
        60.0,
        description="Seconds the reward of one sample may take; a function of all samples has as many for every "
        "--rm-concurrency of them. A filter has them for each group.",
    )
    rm_concurrency: Positive = Field(
        64,
        description="Calls of the reward function at once; of a plain function, which runs in worker processes, no "
        "more than there are cores (an async one waits for any number of answers).",
    )
    rm_on_timeout: Literal["drop", "stop"] = Field(
        "drop",
        description="A sample without a reward in time: its tokens are masked out and a warning names it, or the run "
        "stops.",
    )
    rm_on_error: Literal["stop", "drop"] = Field(
        "stop", description="A sample on which the reward function raised: the run stops, or as --rm-on-timeout drop."
    )
    dynamic_sampling_filter_path: HookPath | None = Field(
        None,
        description="Keeps or replaces the group of a prompt: function(samples) -> bool, MODULE:FUNCTION or "
        "FILE.py:FUNCTION; miles.rollout.filters:nonzero_reward_std drops groups whose rewards are all equal.",
    )
    over_sampling_batch_size: Positive | None = Field(
        None,
        description="Prompts sampled at first, of which --rollout-batch-size are trained on; what is left over is "
        "kept for the next rollout (unset: --rollout-batch-size).",
    )
    dynamic_sampling_max_replacements: NonNegative | None = Field(
        None,
        description="Groups sampled in place of filtered ones in a rollout, at most; then filtered ones fill up "
        "(unset: four times --rollout-batch-size).",
    )
    load_rollouts: Text | None = Field(
        None,
        description="Train on the rollouts kept in this folder (rollout_NNNNNN.jsonl) instead of sampling: no engine, "
        "no reward function.",
    )
    rollout_only: bool = Field(False, description="Sample, score and keep the rollouts; no training group is started.")


class EvalGroup(Group):
    title: ClassVar[str] = "evaluation of the policy"

    eval_prompt_data: CliVariadicArg[TextList] = Field(
        [], description="JSONL files of held-out prompts, PATH or NAME:PATH; figures are named eval/NAME/..."
    )
    eval_sampling: CliVariadicArg[TextList] = Field(
        [],
        description="Sampling of a set where it differs from that of all sets: NAME:key=value,key=value with keys "
        "temperature, top_p, top_k, n_samples, max_response_len, max_prompts.",
    )
    eval_interval: Positive | None = Field(
        None, description="Evaluate every this many rollouts, and before the first and after the last."
    )
    eval_temperature: Temperature = Field(0.0, description="Sampling temperature in evaluation; 0 is greedy.")
    n_samples_per_eval_prompt: Positive = Field(1, description="Responses sampled for each held-out prompt.")
    eval_top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling mass in evaluation.")
    eval_top_k: TopK = Field(-1, description="Sample among the k likeliest in evaluation; -1: all.")
    eval_max_response_len: Positive | None = Field(
        None, description="Tokens of a response in evaluation at most (unset: --rollout-max-response-len)."
    )
    eval_max_prompts: Positive | None = Field(None, description="Use only the first this many held-out prompts.")


class EngineGroup(Group):
    title: ClassVar[str] = "rollout engine"

    sglang_server_timeout_s: PositiveFloat = Field(300.0, description="Seconds an engine may take to come up.")
    sglang_request_timeout_s: PositiveFloat = Field(600.0, description="Seconds one request to an engine may take.")
    sglang_health_timeout_s: PositiveFloat = Field(
        60.0,
        description="Seconds after which an engine that works on requests, or on its weights, and answers nothing, "
        "not even a health check, counts as hung; it is restarted as a dead one is.",
    )
    sglang_max_restarts: NonNegative = Field(
        8, description="Restarts of engines in a run, at most; 0 ends the run with the first engine that is lost."
    )
    sglang_max_total_tokens: Positive | None = Field(
        None, description="Tokens of an engine's key-value cache (unset: 32768 on a CPU, SGLang's choice on a GPU)."
    )
    sglang_port_base: Annotated[int, Field(ge=1024, le=65000)] | None = Field(
        None,
        description="Port of the first engine; the n-th after it takes exactly this + n, and one that is taken ends "
        "the start (unset: the operating system chooses).",
    )
    sglang_extra_args: list[Text] = Field(
        [],
        description="Further arguments of the engine's own command line; repeat as --sglang-extra-args=--FLAG=VALUE.",
    )
    check_weight_sync: Literal["never", "start", "always"] = Field(
        "start",
        description="When the engines' weight checksums are compared with the actor's: after every publication, or "
        "after the first and where an engine was started again.",
    )


class AlgorithmGroup(Group):
    title: ClassVar[str] = "algorithm"

    advantage_estimator: Annotated[str, AfterValidator(_estimator)] = Field(
        "gae",
        description="gae, gae_adaptive (lambda by length), monte_carlo, grpo, dr_grpo, rloo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, or a function of yours, FILE.py:FUNCTION.",
    )
    use_critic: bool | None = Field(
        None,
        description="Run a critic (unset: where the estimator takes values); for monte_carlo and functions of yours.",
    )
    gamma: Fraction = Field(1.0, description="Discount factor.")
    lambd: Fraction = Field(1.0, description="Lambda of the actor's advantages.")
    critic_lambd: Fraction | None = Field(
        None, description="Lambda of the critic's targets (unset: the value of --lambd)."
    )
    gae_adaptive_mode: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="Lambda of gae_adaptive: from the number of trainable tokens, or --lambd."
    )
    gae_adaptive_alpha: PositiveFloat = Field(1.5, description="Alpha of the adaptive lambda.")
    gae_adaptive_min_length: NonNegative = Field(
        1, description="Responses of fewer trainable tokens have an adaptive lambda of 1."
    )
    normalize_advantages: bool = Field(False, description="Whiten advantages over the whole batch.")
    policy_objective: Literal["ppo", "decoupled_ppo", "gspo", "cispo", "sao_dis"] = Field(
        "ppo", description="The actor's loss."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        Field(
            "token-mean",
            description="How the actor's token losses become one: mean over all tokens of the batch, mean over "
            "sequences of their sums or means, or sums over the constant --loss-agg-length. Denominators are global. "
            "The critic's is always the mean over tokens.",
        )
    )
    loss_agg_length: Positive | None = Field(
        None, description="The constant of seq-mean-token-sum-norm (unset: --rollout-max-response-len)."
    )
    eps_clip: Annotated[float, Field(ge=0, lt=1)] = Field(0.2, description="Lower clip, or band, of the ratio.")
    eps_clip_high: PositiveFloat | None = Field(
        None, description="Upper clip, or band, of the ratio (unset: the value of --eps-clip)."
    )
    eps_clip_c: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Dual clip: bounds the loss of negative advantages by this times the advantage."
    )
    ratio_grad: Literal["detached", "in_graph"] = Field(
        "detached",
        description="Whether sao_dis lets the gradient through its ratio; in_graph reverses the update of tokens less "
        "likely than 1/e.",
    )
    value_clip: PositiveFloat = Field(0.2, description="PPO's clip of the value around its old value (mse only).")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    kl_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the KL to the reference model as a penalty in the reward of each token."
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Whether --kl-coef stays, or follows the measured KL to --kl-target."
    )
    kl_target: PositiveFloat = Field(0.1, description="KL per token that the adaptive controller aims at.")
    kl_horizon: PositiveFloat = Field(
        10000.0,
        description="Samples over which the adaptive controller acts, more than a fifth of a rollout's.",
    )
    use_kl_loss: bool = Field(False, description="Add the KL to the reference model to the loss.")
    kl_loss_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "k1", description="Estimator of the KL: in the reward k1 alone has the KL's gradient, in the loss k2 alone."
    )
    use_unbiased_kl: bool = Field(
        False, description="Weigh the KL in the loss, a k3, by the ratio to the policy that sampled."
    )
    use_rollout_logprobs: bool = Field(False, description="Take the engine's log-probabilities for the old policy's.")
    ratio_correction: Literal["none", "tis", "icepop", "mis"] = Field(
        "none", description="Correction for the distance of the old policy from the engine that sampled."
    )
    tis_clip: PositiveFloat = Field(2.0, description="Largest weight of tis.")
    tis_clip_low: NonNegativeFloat = Field(0.0, description="Smallest weight of tis.")
    icepop_low: NonNegativeFloat = Field(0.5, description="Lower end of icepop's band; tokens outside weigh 0.")
    icepop_high: PositiveFloat = Field(5.0, description="Upper end of icepop's band.")
    mis_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="What the weights of mis are made of: tokens, sequence sums or sequence means."
    )
    mis_mode: Literal["truncate", "clip", "mask"] = Field("truncate", description="How mis bounds its weights.")
    mis_low: NonNegativeFloat | None = Field(
        None, description="Lower bound of the weights of mis (unset: 1 / --mis-high)."
    )
    mis_high: PositiveFloat = Field(2.0, description="Upper bound of the weights of mis.")
    mis_reject_low: NonNegativeFloat | None = Field(
        None, description="What has a ratio of --mis-reject-level below this is left out (unset: nothing)."
    )
    mis_reject_high: PositiveFloat | None = Field(
        None, description="What has a ratio of --mis-reject-level above this is left out (unset: nothing)."
    )
    mis_reject_level: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="Whose ratio --mis-reject-low and --mis-reject-high bound: each token's, which leaves out that "
        "token alone, the product over a sequence, or its geometric mean (unset: --mis-level, sequence where that is "
        "token).",
    )
    mis_veto: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        1e-4, description="A token with a ratio below this leaves its whole sequence out; null: no veto."
    )
    mis_batch_normalize: bool = Field(False, description="Scale the weights of mis to a mean of 1 over the batch.")
    use_opsm: bool = Field(
        False, description="Leave tokens with negative advantage out where their sequence left the old policy."
    )
    opsm_delta: PositiveFloat = Field(1e-4, description="Mean log-ratio of a sequence beyond which opsm acts.")
    num_critic_epochs: Positive = Field(
        1, description="Passes of the critic over each rollout, each of --num-steps-per-rollout optimizer steps."
    )
    refresh_values: bool = Field(
        False, description="Compute values again after the critic's updates, before the actor's advantages."
    )
    num_critic_only_steps: NonNegative = Field(0, description="First rollouts that update the critic alone.")
    critic_freeze_attention: bool = Field(False, description="Do not train the critic's attention.")
    num_steps_per_rollout: Positive = Field(
        1, description="Optimizer steps of the actor in each rollout, and of each pass of the critic over it."
    )
    sao_online_recipe: Annotated[Literal["coding", "reasoning"] | None, BeforeValidator(_recipe)] = Field(
        None,
        description="Single-Rollout Asynchronous Optimization: sets estimator, objective, bands, rates, the critic's "
        "warm-up, epochs, refreshed values and frozen attention, takes the engine's log-probabilities for the old "
        "policy's, and leaves out KL and entropy.",
    )
    sao_compaction: bool = Field(
        False, description="With --sao-online-recipe: trajectories come in compacted segments (CompactionRL)."
    )


class ValueHeadGroup(Group):
    title: ClassVar[str] = "value head"

    value_loss_type: Literal["mse", "classification"] = Field(
        "mse", description="Regress one number, or classify over bins."
    )
    value_num_bins: Positive = Field(51, description="Bins of the classification head.")
    value_reward_range: CliVariadicArg[tuple[float, float]] = Field(
        (0.0, 1.0),
        description="Lowest and highest value the bins stand for; a return outside ends the run, unless a KL penalty "
        "in the reward took it there: then it is learned as the nearer end.",
    )
    value_target_type: Literal["hl_gauss", "two_hot"] = Field(
        "hl_gauss", description="How a return becomes a distribution over bins."
    )
    hl_gauss_sigma_ratio: PositiveFloat = Field(
        0.75, description="Standard deviation of the HL-Gauss target, in bin widths."
    )


class ValuePretrainGroup(Group):
    title: ClassVar[str] = "value pretraining (train_value.py)"

    value_pretrain_manifest: Text | None = Field(None, description="Manifest of the value data set.")
    value_pretrain_manifest_sha256: Sha256 | None = Field(
        None, description="SHA-256 that the manifest file must have."
    )
    value_pretrain_epochs: Positive = Field(1, description="Passes over the training rows.")
    value_pretrain_eval_only: bool = Field(
        False, description="Evaluate the critic of --critic-load and gate it; train nothing."
    )
    value_pretrain_eval_split: Literal["train", "heldout"] | None = Field(
        None, description="Rows that --value-pretrain-eval-only reads (unset: heldout)."
    )
    value_pretrain_eval_num_batches: Positive | None = Field(
        None, description="Disjoint, label-mixed batches to evaluate on."
    )
    value_pretrain_eval_report: Text | None = Field(
        None, description="File to write the evaluation report to; an earlier report is never replaced."
    )
    value_pretrain_canary_one_step: bool = Field(
        False, description="Train exactly one step, save it, and publish no contract."
    )
    value_gate_max_bias: NonNegativeFloat | None = Field(
        None, description="The gate also refuses a critic whose mean residual is larger than this in size."
    )


class RunGroup(Group):
    title: ClassVar[str] = "run"

    run_dir: Text | None = Field(
        None, description="Run folder: config, metrics, report (unset: runs/PROGRAM-DATE-TIME-PROCESS)."
    )
    resume: bool = Field(
        False,
        description="Continue the run in --run-dir from its last complete save, or with --rollout-only from its last "
        "whole rollout.",
    )
    allow_config_change: CliVariadicArg[TextList] = Field(
        [], description="Settings that may differ from those of the last save, by name, on --resume."
    )
    placement_timeout_s: PositiveFloat | None = Field(
        1800.0,
        description="Seconds to wait for devices that other jobs of the Ray cluster hold, before the start is given "
        "up; null: for ever.",
    )
    max_restarts: NonNegative = Field(
        3,
        description="Times that lost training ranks are started again from the last save within one process, at most.",
    )
    fault_injection: CliVariadicArg[TextList] = Field(
        [],
        description="For tests of what a run survives: STAGE@STEP=ACTION (see docs/interruption.md).",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard event files into the run folder.")
    use_wandb: bool = Field(False, description="Log to Weights & Biases too (needs the wandb extra).")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severity to log.")
    canary_one_step: bool = Field(
        False, description="One rollout and one update of critic and actor, one save, then stop."
    )
    config: Text | None = Field(None, description="YAML file of settings; the command line goes on top of it.")
    print_config: bool = Field(False, description="Print every setting and where it came from, and exit.")


GROUPS: tuple[type[Group], ...] = (
    ModelGroup,
    DeviceGroup,
    ParallelGroup,
    OptimizerGroup,
    BatchGroup,
    RolloutGroup,
    EvalGroup,
    EngineGroup,
    AlgorithmGroup,
    ValueHeadGroup,
    ValuePretrainGroup,
    RunGroup,
)


def flag_of(field: str, role: Literal["actor", "critic"] = "actor") -> str:
    """The command-line flag of a field; for a critic the one of its own, where it has one."""
    own = f"critic_{field}"
    if role == "critic" and any(own in group.model_fields for group in GROUPS):
        field = own
    return "--" + field.replace("_", "-")


def fields_of(group: type[Group]) -> dict[str, FieldInfo]:
    """The fields a group declares, by name, in order."""
    return {name: group.model_fields[name] for name in group.__annotations__ if name in group.model_fields}
