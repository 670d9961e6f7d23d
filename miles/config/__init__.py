"""The typed configuration of a run."""

from miles.config.args import Args
from miles.config.groups import GROUPS

__all__ = ["GROUPS", "Args"]
