"""Which prompts a rollout trains on: every one once, filtered ones replaced, nothing lost over a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.prompts import PromptSource
from miles.data.sample import Sample, SampleStatus
from miles.rollout.filters import load_filter
from miles.rollout.groups import GroupSource, collect_groups

DIFFER = load_filter("miles.rollout.filters:nonzero_reward_std", timeout_s=60.0)


async def no_group(group: list[Sample]) -> bool:
    return False


async def every_group(group: list[Sample]) -> bool:
    return True


class Characters:
    """A tokenizer of character codes."""

    chat_template = None
    name_or_path = "characters"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "eight.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(8)))
    return path


def source(prompts: Path, *, members: int = 2) -> GroupSource:
    return GroupSource(PromptSource(prompts, tokenizer=Characters(), shuffle=True, seed=3), samples_per_prompt=members)


async def score(samples: list[Sample]) -> None:
    """Finish every sample; the rewards of a group differ unless its prompt is a multiple of 3."""
    for sample in samples:
        sample.append_response_tokens([7], log_probs=[-1.0])
        sample.status = SampleStatus.COMPLETED
        sample.reward = float(sample.index % 2 if int(sample.prompt) % 3 else 1)


def trained(groups: list[list[Sample]]) -> list[str]:
    return [group[0].prompt for group in groups]


async def test_without_a_filter_prompts_come_in_order_and_numbers_run_on(prompts: Path) -> None:
    one = source(prompts)
    first = await collect_groups(one, score, rollout_id=0, wanted=3, at_first=3)
    second = await collect_groups(one, score, rollout_id=1, wanted=3, at_first=3)
    samples = [s for groups in (first.groups, second.groups) for group in groups for s in group]
    assert [s.index for s in samples] == list(range(12))
    assert [s.group_index for s in samples] == [i // 2 for i in range(12)]
    assert [s.rollout_id for s in samples] == [0] * 6 + [1] * 6
    assert len(set(trained(first.groups + second.groups))) == 6


async def test_equal_rewards_are_replaced_and_surplus_groups_come_first_next_time(prompts: Path) -> None:
    one = source(prompts)
    result = await collect_groups(one, score, rollout_id=0, wanted=2, at_first=6, keep=DIFFER, max_replacements=8)
    assert all(int(prompt) % 3 for prompt in trained(result.groups))
    assert result.num_sampled == 6
    assert result.num_filtered + result.num_left_over + 2 == 6
    leftover = one.take_leftover(9)
    one.put_back(leftover)
    assert len(leftover) == result.num_left_over > 0
    after = await collect_groups(one, score, rollout_id=1, wanted=2, at_first=2, keep=DIFFER, max_replacements=8)
    assert trained(after.groups)[: len(leftover)] == trained(leftover)[:2]


async def test_filter_that_keeps_nothing_ends_after_the_bound_and_fills_up(prompts: Path) -> None:
    result = await collect_groups(
        source(prompts), score, rollout_id=0, wanted=2, at_first=2, keep=no_group, max_replacements=3
    )
    assert result.num_sampled == 2 + 3
    assert [group[0].group_index for group in result.groups] == [0, 1]
    assert (result.num_filled_up, result.num_filtered) == (2, 3)


async def test_group_with_an_unscored_sample_is_replaced_where_there_is_a_filter(prompts: Path) -> None:
    async def lose_the_first(samples: list[Sample]) -> None:
        await score(samples)
        for sample in samples:
            if sample.index == 0:
                sample.reward, sample.status = None, SampleStatus.FAILED

    result = await collect_groups(
        source(prompts),
        lose_the_first,
        rollout_id=0,
        wanted=2,
        at_first=2,
        keep=every_group,
        max_replacements=4,
    )
    assert [group[0].group_index for group in result.groups] == [1, 2]


@settings(max_examples=25, deadline=None)
@given(wanted=st.integers(1, 3), surplus=st.integers(0, 3), stop=st.integers(0, 5), steps=st.integers(1, 3))
async def test_restart_at_any_rollout_trains_the_same_groups(
    prompts: Path, wanted: int, surplus: int, stop: int, steps: int
) -> None:
    """faults.md rows 37, 44 and 45: buffered groups survive, offsets do not grow, epochs are whole."""

    async def rollouts(one: GroupSource, first: int, count: int) -> list[list[int]]:
        found = []
        for rollout_id in range(first, first + count):
            result = await collect_groups(
                one,
                score,
                rollout_id=rollout_id,
                wanted=wanted,
                at_first=wanted + surplus,
                keep=DIFFER,
                max_replacements=6,
            )
            found.append([sample.index for group in result.groups for sample in group])
        return found

    whole, before, after = source(prompts), source(prompts), source(prompts)
    expected = await rollouts(whole, 0, stop + steps)
    done = await rollouts(before, 0, stop)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert done + await rollouts(after, stop, steps) == expected
    flat = [index for rollout in expected for index in rollout]
    assert len(flat) == len(set(flat)), "a sample was trained twice"


async def test_restart_at_the_end_of_an_epoch_goes_on_with_the_next(prompts: Path) -> None:
    """faults.md row 35: four rollouts an epoch, saved after four, eight wanted: four more, all prompts again."""
    before, after = source(prompts, members=1), source(prompts, members=1)
    for rollout_id in range(4):
        await collect_groups(before, score, rollout_id=rollout_id, wanted=2, at_first=2)
    after.load_state_dict(before.state_dict())
    second: list[str] = []
    for rollout_id in range(4, 8):
        result = await collect_groups(after, score, rollout_id=rollout_id, wanted=2, at_first=2)
        second += trained(result.groups)
    assert sorted(second) == [str(i) for i in range(8)]


async def test_every_prompt_of_an_epoch_is_sampled_once(prompts: Path) -> None:
    one = source(prompts, members=1)
    sampled: list[str] = []

    async def note(samples: list[Sample]) -> None:
        await score(samples)
        sampled.extend(sample.prompt for sample in samples)

    for rollout_id in range(4):
        await collect_groups(one, note, rollout_id=rollout_id, wanted=2, at_first=4)
    assert sorted(sampled[:8]) == [str(i) for i in range(8)]
