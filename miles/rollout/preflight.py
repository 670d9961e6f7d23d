"""What the rollout side needs from the user, looked at in the driver before a device is reserved."""

import json
from itertools import islice
from pathlib import Path

from miles.config import Args
from miles.rollout.rewards import load_function

_LINES = 100


def check_rollout_inputs(args: Args) -> None:
    """Import the user's functions and look at the first lines of the prompt files for the keys that were named.

    The rollout side reads the files whole, line by line; this only tells the usual mistakes early.

    Raises:
        ValueError: a function cannot be imported, or no line looked at has a key.
    """
    for path in (args.custom_rm_path, args.dynamic_sampling_filter_path):
        if path is not None:
            load_function(path)
    keys = {"input_key": args.input_key}
    keys |= {name: getattr(args, name) for name in ("label_key", "metadata_key") if args.source_of(name) != "default"}
    paths = [args.prompt_data, *(one.path for one in args.eval_sets())]
    for path in filter(None, paths):
        found = _keys_of_first_lines(Path(path))
        for name, key in keys.items():
            if found and key not in found:
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} {key}: no row of {path} has that key; its rows have {', '.join(sorted(found))}"
                )


def _keys_of_first_lines(path: Path) -> set[str]:
    """Keys of the objects on the first lines; a line that is no object is left to the reader, which names it."""
    keys: set[str] = set()
    with path.open("rb") as file:
        for line in islice(file, _LINES):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                keys |= row.keys()
    return keys
