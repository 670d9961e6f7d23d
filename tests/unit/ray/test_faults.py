"""Faults that tests ask for happen once, at their point."""

import signal

from miles.config.fault_plan import parse_faults
from miles.ray.faults import FaultInjector


class Trainer:
    """Notes what would be done to its processes."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def kill_rank(self, role: str) -> None:
        self.done.append(f"kill {role}")

    async def signal_engine(self, signum: int) -> None:
        self.done.append(signal.Signals(signum).name)


async def test_faults_happen_once_at_their_stage_and_step() -> None:
    faults = FaultInjector(
        parse_faults(["actor@2=kill_critic", "actor@2=hang_engine", "sync@2=kill_engine", "actor@3=sleep:0"])
    )
    trainer = Trainer()
    assert faults.expects("actor", 2) and not faults.expects("actor", 1)
    await faults.at("actor", 1, trainer)
    assert trainer.done == []
    await faults.at("actor", 2, trainer)
    assert trainer.done == ["kill critic", "SIGSTOP"]
    await faults.at("actor", 2, trainer)
    await faults.at("actor", 3, trainer)
    assert trainer.done == ["kill critic", "SIGSTOP"]
    await faults.at("sync", 2, trainer)
    assert trainer.done[-1] == "SIGKILL"
