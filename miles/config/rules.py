"""Every rule that ties several settings together, or a setting to the disk, checked before Ray starts."""

from miles.config.args import Args, Entry


def check(args: Args, *, entry: Entry) -> list[str]:
    """Raise a ValueError with a line for each broken rule; return warnings.

    Imports nothing heavy: no torch, no ray, no transformers.
    """
    return []
