"""What goes where in a step of the online loop: who is asked for what, in which order, and what each update is given.

Every answer of a group differs from its earlier ones, so that a number says when it was read.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from miles.config import Args
from miles.ray import online
from miles.ray.online import OnlineTrainer

Rows = list[list[float]]

MASKS = [1, 1], [1, 0, 1]


class Group:
    """A training group that notes its calls in a journal; its n-th reading (from 0) of any kind is `answers[n]`."""

    dp_size = 1

    def __init__(self, role: str, journal: list[str], answers: list[float]) -> None:
        self.role, self._journal, self._answers = role, journal, iter(answers)
        self.taught: dict[int, dict[str, Rows]] = {}
        """By step number, the columns of numbers that the update was given."""

    def _read(self, what: str, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        self._journal.append(f"{self.role} reads {what}")
        answer = next(self._answers)
        pairs = zip(shard["sample_indices"], shard["response_lengths"], strict=True)
        return {index: np.full(length, answer, dtype=np.float32) for index, length in pairs}

    def _learn(self, step: int, shard: dict[str, Any]) -> None:
        assert step not in self.taught
        self._journal.append(f"{self.role} step {step}")
        per_token = {"returns", "values", "advantages", "old_log_probs"} & shard.keys()
        self.taught[step] = {name: [np.asarray(row).tolist() for row in shard[name]] for name in per_token}
        self.taught[step]["samples"] = [shard["sample_indices"]]

    async def compute_values(self, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        return self._read("values", shard)

    async def compute_log_probs(self, shard: dict[str, Any]) -> dict[int, np.ndarray]:
        return self._read("log-probs", shard)

    async def train(self, step: int, data: dict[str, Any]) -> dict[str, float]:
        assert data["sample_indices"] == data["data_ref"]["sample_indices"]
        self._learn(step, data["data_ref"])
        return {"value_loss": 0.0, "tokens": 2.0}

    async def train_policy(self, step: int, shard: dict[str, Any]) -> dict[str, float]:
        self._learn(step, shard)
        return {"policy_loss": 0.0, "tokens": 2.0}


class Loop:
    """A trainer of two samples a rollout, of reward 1 and 0; the second's middle token is an observation."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, values: list[float], log_probs: list[float], **settings: Any
    ) -> None:
        defaults = {"lambd": 0.5, "critic_lambd": 0.5, "num_steps_per_rollout": 2, "global_batch_size": 1}
        args = Args.build(**(defaults | settings))
        tracker: Any = SimpleNamespace(log=lambda step, stage, figures: None)
        self.journal: list[str] = []
        self.actor, self.critic = Group("actor", self.journal, log_probs), Group("critic", self.journal, values)
        self.lost: set[int] = set()
        """Samples that get no reward, by index."""
        self.further: dict[str, list[Any]] = {}
        """Columns beside those that every rollout has."""
        self.figures: dict[str, float] = {}
        self._trainer = OnlineTrainer(args, tracker, None, {})

        async def rollout(rollout_id: int) -> tuple[dict[str, Any], dict[str, float]]:
            indices = [2 * rollout_id, 2 * rollout_id + 1]
            failed = [index in self.lost for index in indices]
            batch = {
                "tokens": [[1, 2, 3], [1, 2, 3, 4]],
                "response_lengths": [2, 3],
                "loss_masks": [[0] * len(mask) if lost else mask for mask, lost in zip(MASKS, failed, strict=True)],
                "failed": failed,
                "sample_indices": indices,
                "group_indices": indices,
                "rewards": [1.0, 0.0],
                "rollout_log_probs": [[-5.0, -5.0], [-5.0, 0.0, -5.0]],
            }
            return batch | self.further, {}

        monkeypatch.setattr(online, "split_train_data_by_dp", lambda args, columns, *, dp_size: columns)
        parts = {"_actor": self.actor, "_critic": self.critic, "_sync": None, "_rollout": rollout}
        for name, value in parts.items():
            monkeypatch.setattr(self._trainer, name, value, raising=False)

    def run(self, *rollouts: int) -> list[str]:
        """The calls of these rollouts, in order."""
        self.journal.clear()
        for rollout_id in rollouts:
            self.figures = asyncio.run(self._trainer.step(rollout_id))
        return list(self.journal)

    def actors(self, *steps: int, column: str) -> Rows:
        return [row for step in steps for row in self.actor.taught[step][column]]

    def critics(self, *steps: int, column: str) -> Rows:
        return [row for step in steps for row in self.critic.taught[step][column]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    return lambda **settings: Loop(monkeypatch, **settings)


def gae(value: float, reward: float, mask: list[int]) -> list[float]:
    """GAE with gamma 1 and lambda 1/2 of a critic that says `value` everywhere, by its definition as a sum: the k-th
    token from the last has the last one's error, reward - value, times 1/2 for each token between; all other errors
    are value - value.
    """
    later = [sum(mask[place + 1 :]) for place in range(len(mask))]
    return [(reward - value) * 0.5**after * active for after, active in zip(later, mask, strict=True)]


def targets(value: float, reward: float, mask: list[int]) -> list[float]:
    """Advantage plus value where the mask is set."""
    return [a + value * active for a, active in zip(gae(value, reward, mask), mask, strict=True)]


def test_refreshed_values_reach_the_actor_and_those_before_the_update_make_the_critics_targets(
    loop: Callable[..., Loop],
) -> None:
    run = loop(values=[0.2, 0.6, 0.4, 0.8], log_probs=[-1.0, -2.0], refresh_values=True, num_critic_epochs=2)
    reads = ["critic reads values", "actor reads log-probs"]
    assert run.run(0) == [
        *(*reads, "critic step 1", "critic step 2", "critic step 3", "critic step 4"),
        *("critic reads values", "actor step 1", "actor step 2"),
    ]
    assert run.run(1) == [
        *(*reads, "critic step 5", "critic step 6", "critic step 7", "critic step 8"),
        *("critic reads values", "actor step 3", "actor step 4"),
    ]
    # by hand, for the first rollout: V .2, R 1 and 0; then V .6
    by_hand = [[0.6, 1.0], [0.1, 0.0, 0.0]]
    assert [targets(0.2, 1.0, MASKS[0]), targets(0.2, 0.0, MASKS[1])] == [pytest.approx(row) for row in by_hand]
    for first, old, refreshed in ((0, 0.2, 0.6), (2, 0.4, 0.8)):
        epochs = [2 * first + number for number in (1, 2, 3, 4)]
        wanted = [targets(old, 1.0, MASKS[0]), targets(old, 0.0, MASKS[1])]
        # Each epoch goes over both optimizer steps' rows, with one and the same target and old value.
        assert run.critics(*epochs, column="samples") == [[first], [first + 1]] * 2
        assert run.critics(*epochs, column="returns") == [pytest.approx(row) for row in wanted * 2]
        kept = [pytest.approx([old, old]), pytest.approx([old, old, old])]
        assert run.critics(*epochs, column="values") == kept * 2
        advantages = [gae(refreshed, 1.0, MASKS[0]), gae(refreshed, 0.0, MASKS[1])]
        assert run.actors(first + 1, first + 2, column="advantages") == [pytest.approx(row) for row in advantages]


def test_values_are_read_once_where_nothing_asks_to_refresh_them(loop: Callable[..., Loop]) -> None:
    run = loop(values=[0.2], log_probs=[-1.0])
    calls = run.run(0)
    assert calls[:2] == ["critic reads values", "actor reads log-probs"]
    # Neither group waits for the other.
    assert sorted(calls[2:]) == ["actor step 1", "actor step 2", "critic step 1", "critic step 2"]
    advantages = [gae(0.2, 1.0, MASKS[0]), gae(0.2, 0.0, MASKS[1])]
    assert run.actors(1, 2, column="advantages") == [pytest.approx(row) for row in advantages]
    wanted = [targets(0.2, 1.0, MASKS[0]), targets(0.2, 0.0, MASKS[1])]
    assert run.critics(1, 2, column="returns") == [pytest.approx(row) for row in wanted]


def test_old_log_probs_of_all_steps_of_a_rollout_are_those_before_its_first(loop: Callable[..., Loop]) -> None:
    run = loop(values=[0.0, 0.0], log_probs=[-1.0, -2.0])
    run.run(0, 1)
    assert run.actors(1, 2, column="old_log_probs") == [[-1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert run.actors(3, 4, column="old_log_probs") == [[-2.0, -2.0], [-2.0, -2.0, -2.0]]
    assert run.actors(1, 2, 3, 4, column="samples") == [[0], [1], [2], [3]]


def test_old_log_probs_are_not_read_where_the_training_forward_or_the_engine_gives_them(
    loop: Callable[..., Loop],
) -> None:
    one = loop(values=[0.0], log_probs=[], num_steps_per_rollout=1, global_batch_size=2)
    assert "actor reads log-probs" not in one.run(0)
    assert "old_log_probs" not in one.actor.taught[1]
    engine = loop(values=[0.0], log_probs=[], use_rollout_logprobs=True)
    assert "actor reads log-probs" not in engine.run(0)
    assert engine.actors(1, 2, column="old_log_probs") == [[-5.0, -5.0], [-5.0, 0.0, -5.0]]


def test_rollout_of_the_critic_alone_asks_nothing_of_the_actor_and_leaves_its_step_numbers(
    loop: Callable[..., Loop],
) -> None:
    # Nothing reads refreshed values where the actor is not trained.
    run = loop(values=[0.2, 0.4, 0.6], log_probs=[-1.0], num_critic_only_steps=1, refresh_values=True)
    assert run.run(0) == ["critic reads values", "critic step 1", "critic step 2"]
    assert run.actor.taught == {}
    assert run.run(1)[-2:] == ["actor step 3", "actor step 4"]
    assert run.actors(3, 4, column="old_log_probs") == [[-1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert run.actors(3, 4, column="advantages") == [
        pytest.approx(row) for row in (gae(0.6, 1.0, MASKS[0]), gae(0.6, 0.0, MASKS[1]))
    ]


def test_step_without_a_reward_is_skipped_told_and_counted_and_later_steps_keep_their_numbers(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    run = loop(values=[0.2, 0.4], log_probs=[-1.0, -2.0], num_critic_epochs=2)
    run.lost = {1}
    assert sorted(run.run(0)[2:]) == ["actor step 1", "critic step 1", "critic step 3"]
    assert run.figures["rollout/skipped_steps"] == 1
    (told,) = [record.getMessage() for record in caplog.records if "optimizer steps" in record.getMessage()]
    assert told.startswith("rollout 0: of its 2 optimizer steps number 2 is skipped: ")
    # What is trained on is what it would have been.
    assert run.critics(1, 3, column="returns") == [pytest.approx(targets(0.2, 1.0, MASKS[0]))] * 2
    assert run.actors(1, column="advantages") == [pytest.approx(gae(0.2, 1.0, MASKS[0]))]
    assert [call for call in run.run(1) if "actor step" in call] == ["actor step 3", "actor step 4"]
    assert "rollout/skipped_steps" not in run.figures


def test_rollout_without_a_reward_ends_the_run_before_an_update(loop: Callable[..., Loop]) -> None:
    run = loop(values=[0.2], log_probs=[-1.0])
    run.lost = {0, 1}
    with pytest.raises(
        ValueError, match=r"^rollout 0: nothing to train on: each of its 2 samples is without a reward"
    ):
        run.run(0)
    assert run.journal == []


def test_segments_of_a_rollout_are_refused_by_its_number_before_an_update(loop: Callable[..., Loop]) -> None:
    # As a reward function may write them into the metadata of its samples.
    run = loop(values=[0.2], log_probs=[-1.0])
    run.further = {"compaction_trajectory_ids": ["a", "a"]}
    with pytest.raises(ValueError, match=r"^rollout 3: holds segments of compacted trajectories, which need --sao"):
        run.run(3)
    assert run.journal == []
