"""A reward is a finite number within its time, or one line that names the sample and the function."""

import asyncio
import inspect
import logging
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from miles.data.sample import Sample, SampleStatus
from miles.rollout.functions import function_name
from miles.rollout.rewards import call_on, score_samples, takes_all


class Here:
    """Calls a function in this process and loop; a time limit is kept where the function awaits."""

    def __init__(self, function):
        self.function, self.name, self.takes_all = function, function_name(function), takes_all(function)

    async def __call__(self, samples, timeout_s):
        argument, scored = call_on(self.function, samples)
        value = self.function(argument)
        if inspect.isawaitable(value):
            value = await asyncio.wait_for(value, timeout_s)
        return scored(value)[0]


def score(samples, function, **settings):
    return score_samples(samples, Here(function), **{"timeout_s": 5, **settings})


def make_samples(count: int) -> list[Sample]:
    return [
        Sample(index=10 + n, group_index=n, rollout_id=0, prompt="p", tokens=[1], status=SampleStatus.COMPLETED)
        for n in range(count)
    ]


def index_reward(sample):
    return sample.index


def batch_reward(samples):
    return [sample.index for sample in samples]


@pytest.mark.parametrize("reward", [index_reward, batch_reward])
async def test_every_sample_is_scored(reward):
    samples = make_samples(5)
    assert await score(samples, reward) == []
    assert [sample.reward for sample in samples] == [10.0, 11.0, 12.0, 13.0, 14.0]


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
async def test_every_kind_of_number_is_accepted(value):
    samples = make_samples(1)
    await score(samples, lambda sample: value)
    assert samples[0].reward == 1.0 and type(samples[0].reward) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (10**400, "inf"),
        (-2e18, "-2e\\+18"),
        ("1.0", "'1.0'"),
        ([1.0], r"\[1.0\]"),
        (1j, "1j"),
        (np.array([1.0, 2.0]), "array"),
    ],
)
async def test_no_finite_number_is_refused_with_sample_and_function(value, words):
    def bad_reward(sample):
        return value if sample.index == 12 else 0.0

    with pytest.raises(ValueError, match=rf"bad_reward returned .*{words}.* sample 12") as caught:
        await score(make_samples(4), bad_reward)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_wrong_count_is_refused(count):
    def short(samples):
        return [0.0] * count

    with pytest.raises(ValueError, match=rf"short returned {count} rewards for 3 samples \(10 to 12\)"):
        await score(make_samples(3), short)


@pytest.mark.parametrize(
    "value", [np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3], dtype=np.int8), torch.tensor([1.0, 2.0, 3.0]), (1, 2, 3)]
)
async def test_batch_function_may_return_an_array(value):
    samples = make_samples(3)
    assert await score(samples, lambda samples: value) == []
    assert [sample.reward for sample in samples] == [1.0, 2.0, 3.0]
    assert {type(sample.reward) for sample in samples} == {float}


@pytest.mark.parametrize("value", [1.0, None, "abc", np.ones((3, 1))])
async def test_batch_function_that_returns_no_list_is_refused(value):
    with pytest.raises(ValueError, match="must return a list of 3 rewards"):
        await score(make_samples(3), lambda samples: value)


@pytest.mark.parametrize("written", [np.float32(1), float("nan"), {1, 2}, object(), "\ud83d"])
async def test_metadata_that_json_cannot_hold_is_refused_with_sample_and_function(written):
    def notes(sample):
        sample.metadata["why"] = written
        return 1.0

    with pytest.raises(ValueError, match=r"notes wrote to the metadata of sample 10 what JSON cannot hold: "):
        await score(make_samples(1), notes, on_error="drop")


async def test_metadata_is_what_a_resumed_run_reads_of_it():
    def counts(sample):
        sample.metadata["votes"] = {10: 3, "a": (1, 2), 2: 1}
        return 1.0

    (sample,) = samples = make_samples(1)
    assert await score(samples, counts) == []
    assert sample.metadata["votes"] == {"10": 3, "a": [1, 2], "2": 1}


async def test_metadata_that_was_there_before_is_no_fault_of_the_function():
    samples = make_samples(1)
    samples[0].metadata["given"] = float("nan")
    assert await score(samples, index_reward) == []


async def test_error_inside_the_function_names_sample_and_error():
    def fails(sample):
        raise KeyError("gold")

    with pytest.raises(ValueError, match=r"fails failed on sample 10: KeyError: 'gold'"):
        await score(make_samples(1), fails)


async def test_slow_reward_ends_the_round_and_is_named(caplog):
    async def slow(sample):
        await asyncio.sleep(60 if sample.index == 11 else 0)
        return 1.0

    samples = make_samples(3)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        late = await score(samples, slow, timeout_s=0.1)
    assert time.monotonic() - began < 5
    assert late == [samples[1]]
    assert [sample.reward for sample in samples] == [1.0, None, 1.0]
    assert samples[1].status is SampleStatus.FAILED
    assert "sample 11" in caplog.text and "more than 0.1 s" in caplog.text


@pytest.mark.parametrize("together", [False, True])
async def test_failing_reward_may_drop_its_samples_and_is_named(together, caplog):
    def fails(sample):
        if sample.index == 11:
            raise ConnectionError("judge unreachable")
        return 1.0

    def fails_for_all(samples):
        raise ConnectionError("judge unreachable")

    samples = make_samples(2)
    with caplog.at_level(logging.WARNING):
        unscored = await score(samples, fails_for_all if together else fails, on_error="drop")
    assert unscored == (samples if together else samples[1:])
    assert samples[1].status is SampleStatus.FAILED and samples[1].reward is None
    assert "failed on sample 11: ConnectionError: judge unreachable" in samples[1].metadata["failure"]
    assert samples[1].metadata["failure"] in caplog.text


@pytest.mark.parametrize("together", [False, True])
async def test_late_reward_may_stop_the_run(together):
    async def slow(sample):
        await asyncio.sleep(60)

    async def slow_together(samples):
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match=r"took more than 0.1 s on sample 10"):
        await score(make_samples(1), slow_together if together else slow, timeout_s=0.1, on_timeout="stop")


@pytest.mark.parametrize(("concurrency", "limit"), [(64, 2.0), (5, 2.0), (4, 4.0), (2, 6.0), (1, 10.0)])
async def test_function_of_all_samples_has_the_limit_of_as_many_rounds_as_single_calls_take(concurrency, limit):
    limits = []

    class Recorded(Here):
        async def __call__(self, samples, timeout_s):
            limits.append(timeout_s)
            return await super().__call__(samples, timeout_s)

    await score_samples(make_samples(5), Recorded(batch_reward), timeout_s=2.0, concurrency=concurrency)
    assert limits == [limit]


@pytest.mark.parametrize("policy", ["drop", "stop"])
async def test_wrong_value_stops_whatever_the_policy(policy):
    with pytest.raises(ValueError, match="returned None"):
        await score(make_samples(1), lambda sample: None, on_timeout=policy, on_error=policy)


async def test_time_of_waiting_for_a_turn_is_not_counted():
    async def takes_a_while(sample):
        await asyncio.sleep(0.2)
        return 1.0

    assert await score(make_samples(4), takes_a_while, timeout_s=0.6, concurrency=1) == []


async def test_no_more_than_the_allowed_number_run_at_once():
    running, most = 0, 0

    async def count(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0.0

    await score(make_samples(12), count, concurrency=3)
    assert most == 3


async def test_no_samples_need_no_scores():
    assert await score([], index_reward) == []
    assert await score([], batch_reward) == []
