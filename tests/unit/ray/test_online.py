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
        return {"value_loss": 0.0, "tokens": 2.0}

    async def train_policy(self, step: int, shard: dict[str, Any]) -> dict[str, float]:
        self.taught.append(shard)
        return {"policy_loss": 0.0, "tokens": 2.0}


class Stage:
    """A trainer of one sample of two tokens a rollout, whose KL to the reference is 1 at each, and what it logs."""

    def __init__(self, args: Args, monkeypatch: pytest.MonkeyPatch, *, reward: float = 1.0) -> None:
        self.lines: list[dict[str, Any]] = []
        tracker: Any = SimpleNamespace(log=lambda step, stage, figures: self.lines.append(figures))
        self.trainer = OnlineTrainer(args, tracker, None, {})
        self.actor, self.critic = Group("actor"), Group("critic")

        async def rollout(rollout_id: int) -> tuple[dict[str, Any], dict[str, float]]:
            batch = {
                "tokens": [[1, 2, 3, 4]],
                "response_lengths": [2],
                "loss_masks": [[1, 1]],
                "sample_indices": [rollout_id],
                "group_indices": [rollout_id],
                "rewards": [reward],
                "rollout_log_probs": [[-1.0, -1.0]],
            }
            return batch, {"rollout/reward_mean": reward}

        monkeypatch.setattr(online, "split_train_data_by_dp", lambda args, columns, *, dp_size: columns)
        parts = {"_actor": self.actor, "_critic": self.critic, "_sync": None, "_rollout": rollout}
        for name, value in parts.items():
            monkeypatch.setattr(self.trainer, name, value, raising=False)

    def steps(self, count: int) -> None:
        for rollout_id in range(count):
            asyncio.run(self.trainer.step(rollout_id))

    def logged(self, name: str) -> list[Any]:
        return [line[name] for line in self.lines if name in line]


@pytest.mark.parametrize(("state", "weights_only"), [(None, True), ({"rollout_id": 0}, False)])
def test_fresh_run_takes_weights_alone_of_actor_and_critic_and_a_resumed_one_all(
    state: dict[str, Any] | None, weights_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md row 43."""
    made: dict[str, bool] = {}

    class Starting:
        def __init__(self, args: Args, *, role: str, placement: Any, load_weights_only: bool) -> None:
            made[role] = load_weights_only

        async def init(self) -> None:
            pass

    monkeypatch.setattr(online, "RayTrainGroup", Starting)
    monkeypatch.setattr(online, "contracted_critic", lambda args: args)
    monkeypatch.setattr(online, "newest_checkpoints", lambda args, state: args)
    stage = Stage(Args.build(), monkeypatch)
    monkeypatch.setattr(stage.trainer, "_state", state)
    monkeypatch.setattr(stage.trainer, "_placement", None, raising=False)
    asyncio.run(stage.trainer._start_groups())
    assert made == {"actor": weights_only, "critic": weights_only}


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
    stage = Stage(args, monkeypatch)
    stage.steps(2)
    for step, expected in enumerate(([0.8, 0.9], [0.76, 0.88])):
        assert stage.critic.taught[step]["returns"][0] == pytest.approx(expected)
        assert stage.actor.taught[step]["advantages"][0] == pytest.approx(expected)
    assert stage.logged("train/kl_coef") == pytest.approx([0.1, 0.12])


def test_adaptive_kl_coefficient_stays_while_the_critic_alone_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    # A KL above its target raises the coefficient by a fifth a step, but only the third step trains the actor.
    adaptive = {"kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 1}
    args = Args.build(kl_coef=0.1, **adaptive, num_critic_only_steps=2, global_batch_size=1)
    stage = Stage(args, monkeypatch)
    stage.steps(4)
    assert stage.logged("train/kl_coef") == pytest.approx([0.1, 0.1, 0.1, 0.12])
    assert len(stage.critic.taught) == 4
    assert len(stage.actor.taught) == 2


_BINS = {"value_loss_type": "classification", "value_reward_range": [0.0, 1.0], "global_batch_size": 1}


def test_return_that_the_critics_bins_do_not_hold_is_refused_before_its_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(Args.build(**_BINS), monkeypatch, reward=2.0)
    told = r"^rollout 0: the return 2 of sample 0 lies outside --value-reward-range 0.0 1.0, the critic's bins"
    with pytest.raises(ValueError, match=told):
        stage.steps(1)
    assert stage.critic.taught == stage.actor.taught == []
    held = Stage(Args.build(**_BINS), monkeypatch)
    held.steps(1)
    assert held.logged("value/clamped_fraction") == []


def test_return_that_a_penalty_takes_out_of_the_bins_is_counted_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # R .15 less .1 at each of two tokens: returns -.05 and .05.
    stage = Stage(Args.build(**_BINS, kl_coef=0.1), monkeypatch, reward=0.15)
    stage.steps(2)
    assert stage.logged("value/clamped_fraction") == [0.5, 0.5]
    (line,) = [record.getMessage() for record in caplog.records if "--value-reward-range" in record.getMessage()]
    assert line.startswith("rollout 0: the return -0.05 of sample 0 lies outside --value-reward-range 0.0 1.0")


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
        run_program("train.py", train.main(args, {"rollout_id": 3}, {}))
    assert ended.value.code == 1
    assert capsys.readouterr().err == "train.py: --num-rollout 4: the run folder already holds 4 rollouts\n"
    assert list(tmp_path.iterdir()) == []
