"""Evaluation sets as the command line writes them: `PATH` or `NAME:PATH`, with their own sampling beside them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from miles.config.choices import LEAST_TEMPERATURE, is_top_k

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*):(.+)")


@dataclass(frozen=True)
class Sampling:
    """How the answers of one evaluation set are sampled."""

    temperature: float
    top_p: float
    top_k: int
    n_samples: int
    max_response_len: int | None
    max_prompts: int | None


_READ: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "n_samples": int,
    "max_response_len": int,
    "max_prompts": int,
}
_BOUNDS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda x: x == 0 or LEAST_TEMPERATURE <= x < math.inf,
    "top_p": lambda x: 0 < x <= 1,
    "top_k": is_top_k,
    "n_samples": lambda x: x >= 1,
    "max_response_len": lambda x: x >= 1,
    "max_prompts": lambda x: x >= 1,
}
assert {entry.name for entry in fields(Sampling)} == _READ.keys() == _BOUNDS.keys()


@dataclass(frozen=True)
class EvalSet:
    """One file of held-out prompts. `name` is empty for a set given without one."""

    name: str
    path: str
    sampling: Sampling

    def metric(self, figure: str) -> str:
        """Stable name of a figure of this set: eval/FIGURE, or eval/NAME/FIGURE."""
        return f"eval/{self.name}/{figure}" if self.name else f"eval/{figure}"


def parse_eval_sets(entries: Sequence[str], sampling: Sequence[str], default: Sampling) -> list[EvalSet]:
    """The sets in the order given.

    Args:
        entries: `PATH` or `NAME:PATH` each.
        sampling: `NAME:key=value,key=value` each; keys are the fields of `Sampling`. Entries of one set add up.

    Raises:
        ValueError: two sets with one name, more than one without, or sampling of a set that is not there.
    """
    sets: dict[str, EvalSet] = {}
    for entry in entries:
        named = None if Path(entry).exists() else _NAMED.fullmatch(entry)
        name, path = (named[1], named[2]) if named else ("", entry)
        if name in sets:
            what = f"the name {name!r} twice" if name else "two sets without a name; write NAME:PATH"
            raise ValueError(f"--eval-prompt-data has {what}")
        sets[name] = EvalSet(name, path, default)
    for text in sampling:
        name, separator, pairs = text.partition(":")
        if not separator or name not in sets:
            known = ", ".join(sorted(filter(None, sets))) or "none"
            raise ValueError(f"--eval-sampling {text}: expected NAME:key=value,... with the name of a set ({known})")
        sets[name] = replace(sets[name], sampling=replace(sets[name].sampling, **_pairs(text, pairs)))
    return list(sets.values())


def _pairs(text: str, pairs: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs.split(","):
        key, _, value = pair.partition("=")
        if key not in _READ:
            raise ValueError(f"--eval-sampling {text}: unknown key {key!r}, expected one of {', '.join(_READ)}")
        if key in found:
            raise ValueError(f"--eval-sampling {text}: {key} is given twice")
        try:
            found[key] = _READ[key](value)
        except ValueError:
            raise ValueError(f"--eval-sampling {text}: {key} must be a number, got {value!r}") from None
        if not _BOUNDS[key](found[key]):
            raise ValueError(f"--eval-sampling {text}: {key} {value} is out of range")
    return found
