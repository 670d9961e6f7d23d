"""What the rollout side needs from the user, looked at in the driver before a device is reserved."""

import json
from collections.abc import Iterable
from pathlib import Path

from miles.config import Args
from miles.config.choices import is_hook
from miles.config.groups import flag_of
from miles.data.prompts import check_prompt_file
from miles.data.sample import read_samples
from miles.rollout.rewards import load_function


def check_rollout_inputs(args: Args) -> None:
    """Import the user's functions and read the prompt files, all but their lengths in tokens; or, where rollouts are
    loaded, look for their files.

    Raises:
        ValueError: a function cannot be imported, a line of a prompt file is no prompt (`path:line`), no row of a file
            has a key, a kept rollout is missing, or the first holds a line that is no sample.
    """
    functions = ["advantage_estimator"] if is_hook(args.advantage_estimator) else []
    if args.load_rollouts is None:
        functions += ["custom_rm_path", "dynamic_sampling_filter_path"]
    for name in functions:
        if (path := getattr(args, name)) is not None:
            load_function(path, flag=flag_of(name))
    if args.load_rollouts is not None:
        _check_kept_rollouts(args, Path(args.load_rollouts))
        return
    keys = {"input_key": args.input_key}
    keys |= {name: getattr(args, name) for name in ("label_key", "metadata_key") if args.source_of(name) != "default"}
    paths = [args.prompt_data, *(one.path for one in args.eval_sets())]
    for path in map(Path, filter(None, paths)):
        found = _keys_until(path, wanted=keys.values())
        for name, key in keys.items():
            if found and key not in found:
                raise ValueError(
                    f"{flag_of(name)} {key}: no row of {path} has that key; its rows have {', '.join(sorted(found))}"
                )
        check_prompt_file(
            path,
            input_key=args.input_key,
            metadata_key=args.metadata_key,
            apply_chat_template=args.apply_chat_template,
        )


def rollout_file(folder: Path, rollout_id: int) -> Path:
    """Where a rollout is kept in a folder of rollouts."""
    return folder / f"rollout_{rollout_id:06d}.jsonl"


def _check_kept_rollouts(args: Args, folder: Path) -> None:
    assert args.num_rollout is not None
    for rollout_id in range(args.num_rollout):
        file = rollout_file(folder, rollout_id)
        if not file.is_file():
            raise ValueError(f"--load-rollouts {folder}: no {file.name}, which --num-rollout {args.num_rollout} needs")
    # The others are checked when their turn comes; of files made for another purpose the first tells.
    read_samples(rollout_file(folder, 0))


def _keys_until(path: Path, *, wanted: Iterable[str]) -> set[str]:
    """Keys of the objects of a file, up to where all wanted ones are seen; lines that are none are passed over."""
    missing, keys = set(wanted), set[str]()
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                keys |= row.keys()
            if missing <= keys:
                break
    return keys
