"""Sampling without an engine: seeds, bounds and errors. What a real engine answers is tested in tests/cpu."""

import asyncio
import hashlib
from types import SimpleNamespace

import pytest

from miles.backends.sglang.client import (
    EngineRefused,
    EngineUnreachable,
    GenerateResult,
    SGLangClient,
    WeightVersionSpan,
)
from miles.data.sample import Sample, SampleStatus
from miles.rollout.generation import generate_samples, sampling_seed

ARGS = SimpleNamespace(
    rollout_seed=42,
    rollout_temperature=0.8,
    rollout_top_p=0.9,
    rollout_top_k=5,
    rollout_max_response_len=4,
    rollout_stop_token_ids=[2],
)


class Recorder(SGLangClient):
    """A client whose engine is `answer(input_ids, sampling)`; it counts what runs at once."""

    def __init__(self, answer=None):
        super().__init__("http://127.0.0.1:1")
        self.answer = answer
        self.asked, self.running, self.most, self.cancelled = [], 0, 0, 0

    async def generate(self, input_ids, sampling):
        self.asked.append((list(input_ids), sampling))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001)
            if self.answer is not None:
                return await self.answer(input_ids, sampling)
            return result([7, 2])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def result(output_ids, reason="stop", versions=("3",)):
    return GenerateResult(
        output_ids=output_ids,
        log_probs=[-0.5] * len(output_ids),
        finish_reason=reason,
        weight_versions=[WeightVersionSpan(version, 0, 1) for version in versions],
    )


def make_samples(count, *, groups=1):
    return [Sample(index=n, group_index=n // groups, rollout_id=0, prompt="p", tokens=[5, n]) for n in range(count)]


def test_sampling_seed_is_the_documented_hash():
    digest = hashlib.sha256(b"miles/sampling/42/3/7").hexdigest()
    assert sampling_seed(rollout_seed=42, rollout_id=3, sample_index=7) == int(digest[:16], 16) // 2


def test_sampling_seed_differs_with_every_part_and_fits_int64():
    seeds = {
        sampling_seed(rollout_seed=s, rollout_id=r, sample_index=i)
        for s in range(10)
        for r in range(-1, 10)
        for i in range(50)
    }
    assert len(seeds) == 10 * 11 * 50
    assert min(seeds) >= 0 and max(seeds) < 2**63


async def test_settings_and_seeds_reach_the_engine_and_tokens_come_back():
    client, samples = Recorder(), make_samples(3)
    await generate_samples(samples, clients=[client], args=ARGS, rollout_id=6)
    assert [sample.tokens for sample in samples] == [[5, n, 7, 2] for n in range(3)]
    for sample in samples:
        assert (sample.status, sample.loss_mask, sample.rollout_log_probs) == (
            SampleStatus.COMPLETED,
            [1, 1],
            [-0.5, -0.5],
        )
        assert sample.weight_versions == ["3"]
    for ids, sampling in client.asked:
        assert sampling.sampling_seed == sampling_seed(rollout_seed=42, rollout_id=6, sample_index=ids[1])
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.9, 5)
        assert (sampling.max_new_tokens, sampling.stop_token_ids) == (4, (2,))


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", SampleStatus.COMPLETED), ("length", SampleStatus.TRUNCATED), ("abort", SampleStatus.ABORTED)],
)
async def test_finish_reason_becomes_the_status(reason, status):
    async def answer(ids, sampling):
        return result([7], reason=reason, versions=("3", "4", "3"))

    samples = make_samples(1)
    await generate_samples(samples, clients=[Recorder(answer)], args=ARGS, rollout_id=0)
    assert samples[0].status is status and samples[0].weight_versions == ["3", "4"]


@pytest.mark.parametrize("groups", [1, 8])
async def test_no_more_than_the_allowed_number_of_requests_run_at_once(groups):
    # faults.md row 59: the limit is one on samples, not on groups
    client = Recorder()
    samples = make_samples(40, groups=groups)
    await generate_samples(samples, clients=[client], args=ARGS, rollout_id=0, concurrency=7)
    assert client.most == 7 and len(client.asked) == 40


async def test_samples_of_a_group_share_an_engine_and_groups_spread():
    clients = [Recorder(), Recorder()]
    await generate_samples(make_samples(8, groups=2), clients=clients, args=ARGS, rollout_id=0)
    assert sorted(ids[1] for ids, _ in clients[0].asked) == [0, 1, 4, 5]
    assert sorted(ids[1] for ids, _ in clients[1].asked) == [2, 3, 6, 7]


async def test_partial_response_is_continued_within_its_limit():
    client, samples = Recorder(), make_samples(2)
    samples[0].append_response_tokens([8], log_probs=[-1.0])
    samples[1].append_response_tokens([8] * 4, log_probs=[-1.0] * 4)
    await generate_samples(samples, clients=[client], args=ARGS, rollout_id=0)
    assert client.asked[0][0] == [5, 0, 8] and client.asked[0][1].max_new_tokens == 3
    assert samples[0].rollout_log_probs == [-1.0, -0.5, -0.5]
    assert len(client.asked) == 1 and samples[1].status is SampleStatus.TRUNCATED


async def test_dead_engine_is_told_once_and_the_other_requests_are_cancelled():
    async def answer(ids, sampling):
        if ids[1] == 3:
            raise EngineUnreachable("SGLang engine X: gone")
        await asyncio.sleep(60)

    client = Recorder(answer)
    with pytest.raises(EngineUnreachable, match=r"^SGLang engine X: gone$"):
        await generate_samples(make_samples(8), clients=[client], args=ARGS, rollout_id=0)
    assert client.cancelled == 7


async def test_refused_prompt_names_the_sample():
    async def answer(ids, sampling):
        raise EngineRefused("SGLang engine X, POST /generate: HTTP 400: too long", status=400, reason="too long")

    with pytest.raises(ValueError, match=r"sample 0: SGLang engine X.*too long"):
        await generate_samples(make_samples(1), clients=[Recorder(answer)], args=ARGS, rollout_id=0)


async def test_no_engines_are_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        await generate_samples(make_samples(1), clients=[], args=ARGS, rollout_id=0)
