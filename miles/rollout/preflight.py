"""What the rollout side needs from the user, looked at in the driver before a device is reserved."""

import logging
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from miles.config import Args
from miles.config.choices import is_hook
from miles.config.files import read_settings
from miles.config.groups import flag_of
from miles.config.hf_folder import has_chat_template, read_model_config
from miles.contracts.canonical import parse_json, read_sealed, sealed, sha256_file
from miles.contracts.chain import RUN_CONFIG_NAME
from miles.contracts.publish import publish_json
from miles.data.batch import samples_to_batch
from miles.data.prompts import check_prompt_file
from miles.data.sample import read_samples
from miles.data.sao import refuse_segments, validate_sao_train_data
from miles.rollout.functions import load_function
from miles.rollout.inputs import Inputs
from miles.rollout.rewards import LARGEST_REWARD
from miles.utils.tracking_utils.run_folder import refuse_changed_config
from miles.utils.tracking_utils.tracking import METRICS_FILE

logger = logging.getLogger(__name__)

ROLLOUT_STATE_FILE = "state.json"
"""Beside the rollouts of `--rollout-only`: the digests of those that are whole, and where the prompts stand after."""
_ROLLOUT_STATE_SCHEMA = "miles.rollout-state.v3"
_TOLD_EVERY_S = 10.0
_ROUNDING = 1e-3
"""A log-probability may be so far above 0."""


def check_rollout_inputs(args: Args) -> None:
    """Import the user's functions and read the prompt files, all but their lengths in tokens; or, where rollouts are
    loaded, read them all.

    Raises:
        ValueError: the run folder holds work of an earlier run, a function cannot be imported or called, a line of a
            prompt file is no prompt (`path:line`), no row of a file has a key, the tokenizer has no chat template to
            apply, or a kept rollout is missing or cannot be trained on.
    """
    _refuse_earlier_work(args)
    functions = {"advantage_estimator": 2} if is_hook(args.advantage_estimator) else {}
    if args.load_rollouts is None:
        functions |= {"custom_rm_path": 1, "dynamic_sampling_filter_path": 1}
    for name, arguments in functions.items():
        if (path := getattr(args, name)) is not None:
            load_function(path, flag=flag_of(name), arguments=arguments, awaited=name == "custom_rm_path")
    if args.load_rollouts is not None:
        _check_kept_rollouts(args, Path(args.load_rollouts))
        return
    model = args.hf_checkpoint
    if args.apply_chat_template and model is not None and not has_chat_template(Path(model)):
        raise ValueError(
            f"--apply-chat-template: {model} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json)"
        )
    keys = {"input_key": args.input_key}
    keys |= {name: getattr(args, name) for name in ("label_key", "metadata_key") if args.is_user_set(name)}
    files = [("--prompt-data", args.prompt_data), *(("--eval-prompt-data", one.path) for one in args.eval_sets())]
    for flag, path in files:
        if path is None:
            continue
        found = _keys_until(Path(path), wanted=keys.values())
        for name, key in keys.items():
            if found and key not in found:
                raise ValueError(
                    f"{flag_of(name)} {key}: no row of {path} has that key; its rows have {', '.join(sorted(found))}"
                )
        try:
            check_prompt_file(
                Path(path),
                input_key=args.input_key,
                metadata_key=args.metadata_key,
                apply_chat_template=args.apply_chat_template,
                segments_allowed=args.sao_compaction or flag == "--eval-prompt-data",
            )
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None


def rollout_file(folder: Path, rollout_id: int) -> Path:
    """Where a rollout is kept in a folder of rollouts."""
    return folder / f"rollout_{rollout_id:06d}.jsonl"


def publish_rollout_state(
    folder: Path, args: Args, *, rollouts: list[str], prompts: dict[str, Any], inputs: Inputs
) -> None:
    """Note the rollouts that are whole.

    Args:
        args: the settings they were sampled with.
        rollouts: SHA-256 of each file, from the first on.
        prompts: the state of the prompts after the last of them.
        inputs: `run_inputs`.
    """
    held = {"rollout_id": len(rollouts) - 1, "rollouts": rollouts, "prompts": prompts, "inputs": inputs}
    held |= {"settings": args.model_dump(mode="json")}
    publish_json(folder / ROLLOUT_STATE_FILE, sealed({"schema": _ROLLOUT_STATE_SCHEMA, **held}))


def kept_rollout_state(args: Args) -> dict[str, Any] | None:
    """Where `--rollout-only --resume` goes on, as `publish_rollout_state` has it; None from the start.

    Raises:
        ValueError: nothing is kept to go on from, one of the rollouts is gone or another, or a setting differs from
            what the run began with.
    """
    if not args.resume:
        return None
    assert args.run_dir is not None
    folder = Path(args.run_dir) / "rollouts"
    path = folder / ROLLOUT_STATE_FILE
    if not path.is_file():
        raise ValueError(f"--resume: {args.run_dir} holds no rollout of --rollout-only (no rollouts/{path.name})")
    state = _read_rollout_state(path, hint="name another --run-dir")
    refuse_changed_config(args, state["settings"])
    for rollout_id, digest in enumerate(state["rollouts"]):
        file = rollout_file(folder, rollout_id)
        if not file.is_file():
            raise ValueError(f"--resume: {file} is missing, though {path.name} counts it")
        _refuse_other_rollout(file, digest)
    refuse_other_prompts(args, state["prompts"])
    return state


def _read_rollout_state(path: Path, *, hint: str) -> dict[str, Any]:
    return read_sealed(path, schema=_ROLLOUT_STATE_SCHEMA, hint=f"; {hint}")


def _refuse_other_rollout(file: Path, digest: str) -> None:
    if sha256_file(file) != digest:
        raise ValueError(f"{file}: is not what was kept there: its SHA-256 is not {digest} of {ROLLOUT_STATE_FILE}")


def refuse_other_prompts(args: Args, prompts: dict[str, Any]) -> None:
    """Raise ValueError unless a saved state of the prompts is of `--prompt-data`."""
    assert args.prompt_data is not None
    if sha256_file(args.prompt_data) != prompts["sha256"]:
        raise ValueError(
            f"--resume: --prompt-data {args.prompt_data} is not the file that the run samples from: its SHA-256 is "
            f"not {prompts['sha256']}"
        )


def set_aside_earlier_work(args: Args) -> None:
    """Move metrics and rollouts of an attempt that came to no save to `earlier_N` in the run folder."""
    assert args.run_dir is not None
    folder = Path(args.run_dir)
    if _earlier_work(folder) is None:
        return
    aside = next(path for number in count(1) if not (path := folder / f"earlier_{number}").exists())
    aside.mkdir()
    for path in (folder / METRICS_FILE, folder / "rollouts"):
        if path.exists():
            path.rename(aside / path.name)


def _earlier_work(folder: Path) -> str | None:
    kept, metrics = len(list((folder / "rollouts").glob("rollout_*.jsonl"))), folder / METRICS_FILE
    if kept:
        return f"{kept} kept rollouts"
    return "metrics" if metrics.is_file() and metrics.stat().st_size else None


def _refuse_earlier_work(args: Args) -> None:
    """Refuse a fresh start into the folder of another run; one of the same settings that came to no save may begin
    again.
    """
    if args.run_dir is None or args.resume or (work := _earlier_work(Path(args.run_dir))) is None:
        return
    folder = Path(args.run_dir)
    holds = f"--run-dir {folder}: holds the {work} of an earlier run"
    try:
        refuse_changed_config(args)
    except ValueError as different:
        reason = str(different).splitlines()[0].removeprefix("--resume: ").partition(";")[0]
        raise ValueError(f"{holds}, whose settings differ ({reason}); name another folder") from None
    if args.rollout_only and (folder / "rollouts" / ROLLOUT_STATE_FILE).exists():
        raise ValueError(f"{holds}; pass --resume to go on after them, or name another folder")
    logger.warning("%s that came to no save: it begins again, they are set aside", holds)


def _check_kept_rollouts(args: Args, folder: Path) -> None:
    assert args.rollouts_to_run is not None
    files = [rollout_file(folder, rollout_id) for rollout_id in range(args.rollouts_to_run)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"--load-rollouts {folder}: no {file.name}, which --num-rollout {args.num_rollout} needs")
    model = {} if args.hf_checkpoint is None else read_model_config(args.hf_checkpoint)
    # Of rollouts that a run of both kept while it trained nothing is known.
    path = folder / ROLLOUT_STATE_FILE
    unproven = f"without {ROLLOUT_STATE_FILE} in --load-rollouts the files are taken as they are"
    state = _read_rollout_state(path, hint=unproven) if path.is_file() else None
    _refuse_other_temperature(args, folder, state)
    digests = {} if state is None else dict(enumerate(state["rollouts"]))
    told = time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - told > _TOLD_EVERY_S:
            told = time.monotonic()
            logger.info("looking at the kept rollouts: %d of %d", number, len(files))
        if number in digests:
            _refuse_other_rollout(file, digests[number])
        _check_kept_rollout(args, file, model, rollout_id=number)


def _refuse_other_temperature(args: Args, folder: Path, state: dict[str, Any] | None) -> None:
    """Kept log-probabilities are of the temperature they were sampled at, which the run that kept them recorded.

    Args:
        state: what seals the rollouts; without it the config.yaml beside the folder is asked, if that is a run's.
    """
    source = folder / ROLLOUT_STATE_FILE
    if state is not None:
        then = state["settings"]["rollout_temperature"]
    else:
        source = folder.resolve().parent / RUN_CONFIG_NAME
        try:
            then = read_settings(source).rollout_temperature
        except ValueError:
            return
    if then != args.rollout_temperature:
        raise ValueError(
            f"--rollout-temperature {args.rollout_temperature:g}: the rollouts in --load-rollouts {folder} were "
            f"sampled at {then:g} ({source})"
        )


def _check_kept_rollout(args: Args, file: Path, model: dict[str, Any], *, rollout_id: int) -> None:
    """Raise ValueError, naming the file, unless training can take its samples."""
    samples = read_samples(file)
    # Groups that were left over are of an earlier one.
    if (newest := max((sample.rollout_id for sample in samples), default=0)) > rollout_id:
        raise ValueError(f"{file}: holds samples of rollout {newest}, which is not {rollout_id} or an earlier one")
    if args.rollout_batch_size is not None and not args.use_dynamic_global_batch_size:
        expected = args.rollout_batch_size * args.n_samples_per_prompt
        if len(samples) != expected:
            raise ValueError(
                f"{file}: {len(samples)} samples, --rollout-batch-size {args.rollout_batch_size} x "
                f"--n-samples-per-prompt {args.n_samples_per_prompt} is {expected}"
            )
    try:
        batch = samples_to_batch(samples)
        if args.policy_objective == "sao_dis":
            token_mean = args.loss_agg_mode == "token-mean"
            validate_sao_train_data(batch, compaction=args.sao_compaction, calculate_per_token_loss=token_mean)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    refuse_segments(batch, compaction=args.sao_compaction, where=str(file))
    rooms = {"the model's max_position_embeddings": model.get("max_position_embeddings")}
    if args.max_tokens_per_gpu is not None:
        rooms["--max-tokens-per-gpu x --context-parallel-size"] = args.max_tokens_per_gpu * args.context_parallel_size
    for sample, tokens in zip(samples, batch["tokens"], strict=True):
        if sample.reward is not None and abs(sample.reward) > LARGEST_REWARD:
            raise ValueError(f"{file}: sample {sample.index}: reward {sample.reward:g} is above {LARGEST_REWARD:g}")
        if max(sample.rollout_log_probs, default=0.0) > _ROUNDING:
            raise ValueError(f"{file}: sample {sample.index}: a log-probability of {max(sample.rollout_log_probs):g}")
        for what, room in rooms.items():
            if room is not None and len(tokens) > room:
                raise ValueError(f"{file}: sample {sample.index} has {len(tokens)} tokens, {what} is {room}")
        if (vocab_size := model.get("vocab_size")) is not None and tokens.max() >= vocab_size:
            raise ValueError(
                f"{file}: sample {sample.index}: token id {tokens.max()} is outside the model's vocabulary of "
                f"{vocab_size}"
            )


def _keys_until(path: Path, *, wanted: Iterable[str]) -> set[str]:
    """Keys of the objects of a file, up to where all wanted ones are seen; lines that are none are passed over."""
    missing, keys = set(wanted), set[str]()
    with path.open("rb") as file:
        for line in file:
            try:
                row = parse_json(line, where=path)
            except ValueError:
                continue
            if isinstance(row, dict):
                keys |= row.keys()
            if missing <= keys:
                break
    return keys
