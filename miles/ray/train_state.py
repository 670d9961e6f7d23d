"""What a save of an online run leaves for a resume. Needs neither Ray nor torch, so a mistake is told at once."""

import json
from pathlib import Path
from typing import Any

from miles.config import Args
from miles.contracts.chain import iteration_folder
from miles.utils.tracking_utils.run_folder import refuse_changed_config

STATE_FILE = "train_state.json"
"""Written last of a save: what it names is complete, and a resume starts from it."""
STATE_SCHEMA = "miles.train-state.v2"


def read_train_state(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest complete save of a run folder, or None.

    Raises:
        ValueError: the file is not what a save wrote.
    """
    path = Path(run_dir) / STATE_FILE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(state, dict) or state.get("schema") != STATE_SCHEMA:
        found = state.get("schema") if isinstance(state, dict) else None
        raise ValueError(
            f"{path}: schema must be {STATE_SCHEMA!r}, got {found!r}; a run of another version of miles goes on "
            "with that version: name another --run-dir"
        )
    return state


def resume_state(args: Args) -> dict[str, Any] | None:
    """The save to continue from with `--resume`, None for a fresh run.

    Raises:
        ValueError: there is nothing to continue, a fresh run would write into the folder of another, or a setting
            differs from what the run began with.
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
    if state is not None:
        refuse_changed_config(args)
    return state


def newest_checkpoints(args: Args, state: dict[str, Any]) -> Args:
    """Settings that load exactly what a save wrote, in place of the seeds; a later, unfinished save does not count.

    Raises:
        ValueError: a checkpoint that the state names is missing.
    """
    assert args.save is not None
    saves = {"load": args.save}
    if args.has_critic:
        assert args.critic_save is not None
        saves["critic_load"] = args.critic_save
    folders = {field: iteration_folder(folder, state["iteration"]) for field, folder in saves.items()}
    for folder in folders.values():
        if not folder.is_dir():
            raise ValueError(f"{folder}: missing, though {STATE_FILE} names iteration {state['iteration']}")
    return args.replace(source="resume", **{field: str(folder) for field, folder in folders.items()})
