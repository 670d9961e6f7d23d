"""Carries out the faults of `--fault-injection`, with which tests interrupt a run at any point of a step.

A fault happens once in the life of a process: a step that is done again after it goes through.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

from miles.config.fault_plan import Fault

logger = logging.getLogger(__name__)


class FaultInjector:
    """Faults by (stage, step)."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._left = list(faults)

    def expects(self, stage: str, step: int) -> bool:
        """Whether a fault waits at this point."""
        return any((fault.stage, fault.step) == (stage, step) for fault in self._left)

    async def at(self, stage: str, step: int, trainer: Any) -> None:
        """Carry out what was asked for at this point; `trainer` knows the processes."""
        due = [fault for fault in self._left if (fault.stage, fault.step) == (stage, step)]
        for fault in due:
            self._left.remove(fault)
            logger.warning("fault injection: %s at stage %s of step %d", fault.action, stage, step)
            if fault.action == "sleep":
                await asyncio.sleep(fault.seconds)
            elif fault.action == "kill_driver":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.action in ("kill_actor", "kill_critic"):
                trainer.kill_rank(fault.action.removeprefix("kill_"))
            else:
                await trainer.signal_engine(signal.SIGKILL if fault.action == "kill_engine" else signal.SIGSTOP)
