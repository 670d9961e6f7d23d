"""The run folder: `config.yaml`, `run.json`, and the places the rest of a run writes to."""

import hashlib
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import miles
from miles.config.args import Args, Entry, refuse_unknown_fields
from miles.config.files import config_yaml, read_config_file
from miles.config.groups import flag_of
from miles.contracts.canonical import read_json
from miles.contracts.chain import RUN_CONFIG_NAME, RUN_RECORD_NAME, write_run_record
from miles.contracts.publish import publish_bytes
from miles.utils.audit_utils.process_identity import MainProcessIdentity
from miles.utils.folder_lock import hold_folders

_PACKAGES = (
    "torch",
    "megatron-core",
    "ray",
    "sglang",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
)


def create_run_folder(args: Args, *, entry: Entry) -> Path:
    """Make `args.run_dir` and hold what the program writes; a new folder gets the resolved config.

    A folder that holds a run already is continued, and keeps the config of the last start that came to work until
    `record_start` says that this one did.

    Raises:
        ValueError: the folder cannot be written, or as `claim_run_folder`.
    """
    assert args.run_dir is not None
    folder = Path(args.run_dir)
    _refuse_other_run(args, entry=entry)
    try:
        hold_folders(args, entry=entry, make=True)
        if not (folder / RUN_CONFIG_NAME).exists():
            publish_bytes(folder / RUN_CONFIG_NAME, config_yaml(args).encode())
    except OSError as error:
        raise ValueError(f"--run-dir {folder}: cannot be written: {error.strerror}") from None
    return folder


def record_start(args: Args, *, entry: Entry, inputs: dict[str, dict[str, str]] | None = None) -> Path:
    """Write resolved config and facts of this start into the run folder; earlier starts stay listed in run.json.

    Called when devices, engines and checkpoints are there, so that a start which is refused changes neither.

    Args:
        inputs: digests of the files that settings name, by setting.

    Returns:
        The run folder.
    """
    assert args.run_dir is not None
    folder = Path(args.run_dir)
    text = config_yaml(args)
    start = {
        "entry": entry,
        "process": MainProcessIdentity().to_dict(),
        "command": sys.argv,
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "versions": installed_versions(),
        "code": code_version(),
        "inputs": inputs or {},
        "time": time.time(),
    }
    publish_bytes(folder / RUN_CONFIG_NAME, text.encode())
    update_run_json(folder, starts=[*read_run_json(folder).get("starts", []), start])
    return folder


def claim_run_folder(args: Args, *, entry: Entry) -> None:
    """Take the folders that a program writes, as far as they are there; nothing is made.

    Raises:
        ValueError: the run folder holds no run, the run of another program or, in value pretraining, of another critic
            or report; or another process writes one of the folders.
    """
    _refuse_other_run(args, entry=entry)
    hold_folders(args, entry=entry, make=False)


def _refuse_other_run(args: Args, *, entry: Entry) -> None:
    assert args.run_dir is not None
    folder = Path(args.run_dir)
    others = [path for path in folder.glob("[!.]*") if path.name != "logs"]
    if others and not (folder / RUN_CONFIG_NAME).exists():
        raise ValueError(f"--run-dir {folder}: holds other things than a run; name a new or an empty folder")
    starts = read_run_json(folder).get("starts", [])
    if not starts:
        return
    if starts[-1]["entry"] != entry:
        raise ValueError(f"--run-dir {folder}: holds a run of {starts[-1]['entry']}.py; name another folder")
    if entry == "train":
        return
    began, now = (_placed(settings) for settings in (_began_with(folder), args.model_dump(mode="json")))
    if began.get("value_pretrain_eval_only") != args.value_pretrain_eval_only:
        done = "trained" if args.value_pretrain_eval_only else "evaluated"
        raise ValueError(f"--run-dir {folder}: holds a run that {done} a critic; name another folder")
    made = "value_pretrain_eval_report" if args.value_pretrain_eval_only else "critic_save"
    theirs, ours = (Path(settings.get(made) or "").resolve() for settings in (began, now))
    if theirs != ours:
        raise ValueError(
            f"--run-dir {folder}: holds the run of {flag_of(made)} {began.get(made)}, not of {now[made]}; name "
            "another folder"
        )


def _began_with(folder: Path) -> dict[str, Any]:
    path = folder / RUN_CONFIG_NAME
    settings = read_config_file(str(path))[0]
    if not isinstance(settings.get("run_dir"), str):
        raise ValueError(f"{path}: names no run_dir: cut off, or not what a run wrote there")
    return settings


_FREE_TO_CHANGE = frozenset(
    {
        *("resume", "run_dir", "canary_one_step", "config", "print_config", "allow_config_change", "fault_injection"),
        *("log_level", "tensorboard", "use_wandb", "save_interval", "max_restarts", "check_weight_sync"),
        *("sglang_server_timeout_s", "sglang_request_timeout_s", "sglang_health_timeout_s", "sglang_max_restarts"),
        *("sglang_port_base", "rm_concurrency", "placement_timeout_s"),
    }
)
"""Settings that no figure of a run follows from."""


def _placed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with what lies in the run folder named from there: the folder itself may be spelled otherwise."""
    run_dir = Path(settings["run_dir"])

    def placed(value: Any) -> Any:
        inside = isinstance(value, str) and Path(value).is_relative_to(run_dir)
        return f"RUN_DIR/{Path(value).relative_to(run_dir)}" if inside else value

    return settings | {name: placed(settings[name]) for name in ("save", "critic_save") if name in settings}


_OF_THE_PROMPT_STREAM = frozenset({"rollout_seed", "rollout_shuffle"})
"""Settings that make the order of the prompts, in which a run has a place."""

STARTED_FROM = frozenset({"load", "critic_load", "critic_value_eval_report", "critic_value_pretrain_contract_sha256"})
"""Settings that a run reads once, before its first save."""


def refuse_changed_config(args: Args, saved: dict[str, Any] | None = None) -> None:
    """Compare the settings with those of a save, or with those in config.yaml, those of the run folder's last start.

    How many rollouts there are is free as long as the learning rate does not decay over them. With a save, what the
    run started from may be left out.

    Args:
        saved: every setting as JSON has it; None reads config.yaml, where there is one.

    Raises:
        ValueError: a line for each setting that differs and is not in `allow_config_change`, or has no effect any more
            or cannot change at all; or a name there that is no setting.
    """
    assert args.run_dir is not None
    refuse_unknown_fields(args.allow_config_change, told_by="--allow-config-change: ")
    folder = Path(args.run_dir)
    if saved is None and not (folder / RUN_CONFIG_NAME).is_file():
        return
    settings, whose = (_began_with(folder), "run began") if saved is None else (saved, "last save was made")
    then, now = (_placed(values) for values in (settings, args.model_dump(mode="json")))
    free = _FREE_TO_CHANGE | set(args.allow_config_change) | _followed(args, settings)
    if args.lr_decay_style == "constant" or args.lr_decay_iters is not None:
        free |= {"num_rollout"}
    lines: list[str] = []
    for field in now:
        # A setting that the run's own version of miles did not have says nothing.
        if field not in then or now[field] == then[field]:
            continue
        differs = f"--resume: {field} is {now[field]!r}, the {whose} with {then[field]!r}"
        if field in STARTED_FROM and saved is not None:
            if now[field] is not None:
                lines.append(f"{differs}; it has no effect, the run goes on from its save: leave it out")
        elif field in _OF_THE_PROMPT_STREAM or (field == "load_rollouts" and None in (now[field], then[field])):
            lines.append(f"{differs}; the run's place in its prompts rests on it, so it can never change")
        elif field not in free:
            lines.append(f"{differs}; give it that again, or pass --allow-config-change {field}")
    if lines:
        raise ValueError("\n".join(lines))


def _followed(args: Args, then: dict[str, Any]) -> set[str]:
    """The settings that nobody gave, then or now: they differ where those do that they follow from."""
    known = {name: value for name, value in then.items() if name in Args.model_fields}
    before = Args.from_values(known, dict.fromkeys(known, "file:"))
    derived = {name for name in Args.model_fields if args.source_of(name).startswith("derived:")}
    return {name for name in derived if not before.is_user_set(name)}


def read_run_json(run_dir: str | Path) -> dict[str, Any]:
    """The facts recorded so far; empty where there are none."""
    path = Path(run_dir) / RUN_RECORD_NAME
    if not path.exists():
        return {}
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise ValueError(f"{path}: expected a JSON object")
    for key, needed in (("starts", "entry"), ("checkpoints", "path")):
        entries = facts.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) and needed in e for e in entries):
            raise ValueError(f"{path}: {key} must be a list of objects with {needed!r}")
    return facts


def update_run_json(run_dir: str | Path, **facts: Any) -> dict[str, Any]:
    """Set top-level keys of run.json (objects, lists and all are replaced whole), seal it, return what was written."""
    return write_run_record(run_dir, read_run_json(run_dir) | facts)


def installed_versions() -> dict[str, str | None]:
    """Versions of Python, miles and the packages a result depends on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "miles": miles.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def code_version() -> dict[str, Any]:
    """The commit of the checkout this code runs from, and whether tracked files differ from it."""
    root = Path(miles.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        # No git here, no commit yet, or a checkout of another user.
        return {"commit": None, "dirty": None}
