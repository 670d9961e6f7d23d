"""What a save of an online run leaves for a resume. Needs neither Ray nor torch, so a mistake is told at once."""

import logging
import os
from pathlib import Path
from typing import Any

from miles.backends.megatron.checkpoint_identity import IDENTITY_FILE
from miles.config import Args
from miles.config.groups import flag_of
from miles.config.rules import saved_to
from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME
from miles.contracts.canonical import read_sealed, sha256_file
from miles.contracts.chain import RUN_RECORD_NAME, describe_checkpoint, iteration_folder
from miles.rollout.preflight import refuse_other_prompts
from miles.utils.tracking_utils.run_folder import read_run_json, refuse_changed_config
from miles.utils.tracking_utils.tracking import METRICS_FILE

logger = logging.getLogger(__name__)

STATE_FILE = "train_state.json"
"""Written last of a save: what it names is complete, and a resume starts from it."""
STATE_SCHEMA = "miles.train-state.v4"


def read_train_state(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest complete save of a run folder, or None.

    Raises:
        ValueError: the file is not what a save wrote.
    """
    path = Path(run_dir) / STATE_FILE
    if not os.path.lexists(path):
        return None
    hint = "; a run of another version of miles goes on with that version: name another --run-dir"
    return read_sealed(path, schema=STATE_SCHEMA, hint=hint)


def resume_state(args: Args) -> dict[str, Any] | None:
    """The save to continue from with `--resume`, None for a fresh run; `check_resume` compares it with the settings.

    Raises:
        ValueError: there is nothing to continue, or a fresh run would write over another one's work.
    """
    assert args.run_dir is not None
    state = read_train_state(args.run_dir)
    if args.resume and state is None:
        raise ValueError(f"--resume: {args.run_dir} holds no complete save (no {STATE_FILE})")
    if not args.resume and state is not None:
        raise ValueError(
            f"--run-dir {args.run_dir} holds a run saved after rollout {state['rollout_id']}; "
            "pass --resume to continue it, or name another folder"
        )
    if state is None:
        _refuse_folders_in_use(args)
    else:
        _tell_lost_records(Path(args.run_dir), state)
    return state


def _tell_lost_records(folder: Path, state: dict[str, Any]) -> None:
    """Warn of a record that the run wrote before its save and that is not there: nothing can make it again."""
    if not read_run_json(folder).get("checkpoints"):
        record = folder / RUN_RECORD_NAME
        logger.warning("%s: lists no checkpoint, though the run saved some: its record begins anew", record)
    if not (metrics := folder / METRICS_FILE).is_file():
        logger.warning("%s: missing: the figures of the first %d rollouts are lost", metrics, state["rollout_id"] + 1)


def _refuse_folders_in_use(args: Args) -> None:
    """A fresh run replaces checkpoints of its save folders: those of its own first attempt, and nobody else's."""
    assert args.run_dir is not None
    run_dir = Path(args.run_dir).resolve()
    ours = read_run_json(run_dir).get("checkpoints", [])
    for field in saved_to(args, "train"):
        root = Path(getattr(args, field)).resolve()
        name = f"{flag_of(field)} {getattr(args, field)}"
        for origin in ("load", "critic_load"):
            if (start := getattr(args, origin)) is not None and root == _folder_of_checkpoints(Path(start).resolve()):
                raise ValueError(f"{name}: is what {flag_of(origin)} starts from; name another folder to save to")
        if root.is_relative_to(run_dir):
            continue
        for folder in sorted(root.glob("iter_*")):
            complete = (folder / CHECKPOINT_MANIFEST_NAME).is_file()
            if not (complete and describe_checkpoint(run_dir, folder) in ours):
                raise ValueError(
                    f"{name}: holds {folder.name}, which this run did not record as its own and would replace; name "
                    "another folder, or remove it"
                )


def _folder_of_checkpoints(path: Path) -> Path:
    return path.parent if (path / IDENTITY_FILE).is_file() else path


def check_resume(args: Args, state: dict[str, Any]) -> Args:
    """Look at what a resume rests on: settings, prompts and the checkpoints of the save.

    Returns:
        The settings that load those checkpoints.

    Raises:
        ValueError: a setting differs from the save's, the prompts are others, or a checkpoint is not the save's.
    """
    saved = state["settings"]
    refuse_changed_config(args, saved)
    if args.load_rollouts is None:
        refuse_other_prompts(args, state["prompts"])
        if state["prompts"]["leftover"] and args.n_samples_per_prompt != saved["n_samples_per_prompt"]:
            raise ValueError(
                f"--resume: the save holds sampled groups of {saved['n_samples_per_prompt']}, --n-samples-per-prompt "
                f"is {args.n_samples_per_prompt}: it cannot change now"
            )
    return newest_checkpoints(args, state)


def newest_checkpoints(args: Args, state: dict[str, Any]) -> Args:
    """Settings that load exactly what a save wrote, in place of the seeds; a later, unfinished save does not count.

    Raises:
        ValueError: a checkpoint that the state names is missing, or another one lies in its place.
    """
    saves = {"actor": ("load", args.save)}
    if args.has_critic:
        saves["critic"] = ("critic_load", args.critic_save)
    loads: dict[str, str] = {}
    for role, (field, root) in saves.items():
        assert root is not None
        folder, entry = iteration_folder(root, state["iteration"]), state[f"{role}_checkpoint"]
        manifest = folder / CHECKPOINT_MANIFEST_NAME
        if entry is None:
            raise ValueError(f"{STATE_FILE}: the run was saved without {role}, so it cannot go on with one")
        if not manifest.is_file():
            raise ValueError(f"{folder}: missing, though {STATE_FILE} names iteration {state['iteration']}")
        if sha256_file(manifest) != entry["manifest_sha256"]:
            raise ValueError(
                f"{folder}: is not the {role} that this run saved: {manifest.name} is not the one {STATE_FILE} names"
            )
        loads[field] = str(folder)
    return args.replace(source="resume", **loads)


def kl_coef_at(args: Args, state: dict[str, Any] | None) -> float:
    """The KL coefficient to go on with: what the adaptive controller had come to, unless --kl-coef was changed."""
    if state is None or args.kl_controller == "fixed" or state["settings"]["kl_coef"] != args.kl_coef:
        return args.kl_coef
    return state["kl_coef"]
