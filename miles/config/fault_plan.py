"""Faults on purpose, for tests of what a run survives: `--fault-injection STAGE@STEP=ACTION`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

STAGES = (
    "rollout",
    "generate",
    "values",
    "log_probs",
    "critic",
    "advantages",
    "actor",
    "sync",
    "save",
    "save_state",
    "saved",
    "eval",
)
"""Points of a step, in order. `generate` is reached when the first engine works on a request, `save_state`
between the checkpoints and the state file that makes them count; every other point is the beginning of its stage."""

ACTIONS = ("kill_driver", "kill_actor", "kill_critic", "kill_engine", "hang_engine", "sleep")

_FAULT = re.compile(r"(?P<stage>[a-z_]+)@(?P<step>\d+)=(?P<action>[a-z_]+)(?::(?P<argument>\d+(\.\d+)?))?")


@dataclass(frozen=True)
class Fault:
    """`action` at the point `stage` of step `step` (from 1, as in metrics.jsonl); `seconds` of a sleep."""

    stage: str
    step: int
    action: str
    seconds: float = 0.0


def parse_faults(entries: Sequence[str]) -> list[Fault]:
    """The faults in the order given.

    Raises:
        ValueError: an entry is malformed, or names a stage, action or step that is not there.
    """
    faults = []
    for entry in entries:
        found = _FAULT.fullmatch(entry)
        if found is None:
            raise ValueError(f"--fault-injection {entry}: expected STAGE@STEP=ACTION, for example actor@2=kill_driver")
        for kind, known in (("stage", STAGES), ("action", ACTIONS)):
            if found[kind] not in known:
                raise ValueError(
                    f"--fault-injection {entry}: unknown {kind} {found[kind]!r}, expected one of {', '.join(known)}"
                )
        if (found["argument"] is not None) != (found["action"] == "sleep"):
            raise ValueError(f"--fault-injection {entry}: sleep, and only sleep, takes seconds: sleep:0.5")
        if found["stage"] != "eval" and int(found["step"]) == 0:
            raise ValueError(f"--fault-injection {entry}: steps count from 1; only eval has a step 0")
        faults.append(Fault(found["stage"], int(found["step"]), found["action"], float(found["argument"] or 0)))
    return faults
