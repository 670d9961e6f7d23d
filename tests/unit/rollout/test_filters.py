"""Filters of groups: what they answer, and what becomes of one that does not answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.data.sample import Sample
from miles.rollout.filters import load_filter


def group(*rewards: float) -> list[Sample]:
    members = []
    for index, reward in enumerate(rewards):
        sample = Sample(index=index, group_index=7, rollout_id=0, prompt="1", tokens=[1])
        sample.append_response_tokens([5, 6], log_probs=[-1.0, -2.0])
        sample.reward = reward
        members.append(sample)
    return members


@pytest.fixture
def filter_of(tmp_path: Path) -> Any:
    def load(body: str, head: str = "def keep(samples):", timeout_s: float = 60.0) -> Any:
        (tmp_path / "mine.py").write_text(f"import sys\nimport numpy\n{head}\n    {body}\n")
        return load_filter(f"{tmp_path / 'mine.py'}:keep", timeout_s=timeout_s)

    return load


async def test_filter_that_ships_keeps_groups_whose_rewards_differ() -> None:
    keep = load_filter("miles.rollout.filters:nonzero_reward_std", timeout_s=60.0)
    for rewards, kept in (((0, 1), True), ((1, 1), False), ((0, 0, 0), False), ((0, 0, 1), True)):
        assert await keep(group(*rewards)) is kept


@pytest.mark.parametrize(("body", "answer"), [("return len(samples) == 2", True), ("return numpy.bool_(0)", False)])
async def test_filter_that_answers_with_a_bool_decides(filter_of: Any, body: str, answer: bool) -> None:
    assert await filter_of(body)(group(0, 1)) is answer


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("pass", r"returned None \(NoneType\), expected True or False"),
        ("return 1", r"returned 1 \(int\), expected"),
        ("return (x for x in samples)", r"returned <generator .*> \(generator\)"),
        ("raise KeyError('oops')", r"KeyError: 'oops' \(line 4 of .*mine\.py\)"),
        ("return next(one for one in samples if one.reward > 99)", r"StopIteration \(line 4"),
        ("raise KeyboardInterrupt", r"KeyboardInterrupt \(line 4"),
        ("sys.exit(0)", r"SystemExit: 0 \(line 4 of"),
        ("raise TimeoutError('mine')", r"TimeoutError: mine \(line 4"),
        ("return samples[5].reward", r"IndexError: list index out of range \(line 4"),
    ],
)
async def test_filter_that_does_not_answer_is_refused_with_its_group(filter_of: Any, body: str, what: str) -> None:
    keep = filter_of(body)
    with pytest.raises(ValueError, match=what) as refused:
        await keep(group(0, 1))
    start = str(refused.value).partition(": ")[0]
    assert start.startswith("--dynamic-sampling-filter-path ") and start.endswith(":keep, asked about group 7")


async def test_filter_that_does_not_return_is_given_up(filter_of: Any) -> None:
    keep = filter_of("import time; time.sleep(3)", timeout_s=0.5)
    with pytest.raises(ValueError, match=r"asked about group 7: no answer within --rm-timeout-s 0\.5$"):
        await keep(group(0, 1))


def test_filter_that_is_async_is_refused_when_it_is_loaded(filter_of: Any) -> None:
    with pytest.raises(ValueError, match=r"--dynamic-sampling-filter-path .*: keep is async, a plain function"):
        filter_of("return False", head="async def keep(samples):")


async def test_filter_that_writes_to_its_samples_changes_nothing(filter_of: Any) -> None:
    ours = group(0, 1)
    assert await filter_of(
        "for one in samples: one.reward = 7; one.loss_mask[:] = [0, 0]; one.metadata['a'] = 1\n    return True"
    )(ours)
    assert ours == group(0, 1)
    assert np.isfinite([one.reward for one in ours]).all()
