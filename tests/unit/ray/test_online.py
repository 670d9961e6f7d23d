"""One step of the online loop on groups that only take note of what they are given, and how a finished run ends."""

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.config import Args
from miles.ray import online
from miles.ray.online import OnlineTrainer
from miles.ray.program import run_program

TRAIN = Path(__file__).parents[3] / "train.py"


class Group:
    """A training group whose critic answers 0 and whose actor is one nat from its reference."""

    dp_size = 1

    def __init__(self, role: str) -> None:
        self.role = role
        self.taught: list[dict[str, Any]] = []

    def _answer(self, shard: dict[str, Any], number: float) -> dict[int, np.ndarray]:
        pairs = zip(shard["sample_indices"], shard["response_lengths"], strict=True)
        return {index: np.full(length, number, dtype=np.float32) for index, length in pairs}

    async def compute_values(self, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        return self._answer(shard, 0.0)

    async def compute_log_probs(self, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        return self._answer(shard, -1.0)

    async def compute_ref_log_probs(self, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        return self._answer(shard, -2.0)

    async def train(self, step: int, data: dict[str, Any]) -> dict[str, float]:
        self.taught.append(data["data_ref"])
        return {"value_loss": 0.0}

    async def train_policy(self, step: int, shard: dict[str, Any]) -> dict[str, float]:
        self.taught.append(shard)
        return {"policy_loss": 0.0}


@pytest.mark.parametrize("refresh", [False, True], ids=["values_as_read", "values_refreshed"])
def test_penalty_in_the_reward_is_in_the_critics_targets_as_in_the_advantages(
    refresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults.md row 7: kl [1, 1], kl_coef .1, V 0, R 1. The second step's coefficient is .12: a KL above the target
    # raises it by a fifth where as many samples have passed as the horizon has.
    args = Args.build(
        advantage_estimator="gae",
        kl_coef=0.1,
        kl_loss_type="k1",
        kl_controller="adaptive",
        kl_target=0.5,
        kl_horizon=1,
        refresh_values=refresh,
        global_batch_size=1,
    )
    lines: list[dict[str, Any]] = []
    tracker: Any = SimpleNamespace(log=lambda step, stage, figures: lines.append(figures))
    trainer = OnlineTrainer(args, tracker, None)
    actor, critic = Group("actor"), Group("critic")

    async def rollout(rollout_id: int) -> tuple[dict[str, Any], dict[str, float]]:
        batch = {
            "tokens": [[1, 2, 3, 4]],
            "response_lengths": [2],
            "loss_masks": [[1, 1]],
            "sample_indices": [rollout_id],
            "group_indices": [rollout_id],
            "rewards": [1.0],
            "rollout_log_probs": [[-1.0, -1.0]],
        }
        return batch, {"rollout/reward_mean": 1.0}

    monkeypatch.setattr(online, "split_train_data_by_dp", lambda args, columns, *, dp_size: columns)
    for name, value in (("_actor", actor), ("_critic", critic), ("_sync", None), ("_rollout", rollout)):
        monkeypatch.setattr(trainer, name, value, raising=False)
    for rollout_id in range(2):
        asyncio.run(trainer.step(rollout_id))
    for step, expected in enumerate(([0.8, 0.9], [0.76, 0.88])):
        assert critic.taught[step]["returns"][0] == pytest.approx(expected)
        assert actor.taught[step]["advantages"][0] == pytest.approx(expected)
    assert [line["train/kl_coef"] for line in lines if "train/kl_coef" in line] == pytest.approx([0.1, 0.12])


def test_finished_run_that_is_resumed_exits_1_and_says_that_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # faults.md row 35: nothing trained and exit 0 would look like success
    spec = importlib.util.spec_from_file_location("train_program", TRAIN)
    assert spec is not None and spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    args = Args.build(num_rollout=4, run_dir=str(tmp_path), resume=True)
    with pytest.raises(SystemExit) as ended:
        run_program("train.py", train.main(args, {"rollout_id": 3}))
    assert ended.value.code == 1
    assert capsys.readouterr().err == "train.py: --num-rollout 4: the run folder already holds 4 rollouts\n"
    assert list(tmp_path.iterdir()) == []
