"""`generate_samples` against a real engine, with the reward of reasoning-gym at the end of the line."""

from types import SimpleNamespace

import pytest
import reasoning_gym
from transformers import AutoTokenizer

from miles.backends.sglang.client import EngineUnreachable
from miles.backends.sglang.ports import reserve_port
from miles.backends.sglang.server import SGLangClient
from miles.data.sample import Sample, SampleStatus
from miles.rollout.generation import generate_samples
from miles.rollout.reward_calls import RewardFunction
from miles.rollout.rewards import score_samples

ARGS = SimpleNamespace(
    rollout_seed=42,
    rollout_temperature=1.0,
    rollout_top_p=1.0,
    rollout_top_k=-1,
    rollout_max_response_len=12,
    rollout_stop_token_ids=[],
)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def make_samples(tokenizer):
    problems = list(reasoning_gym.create_dataset("chain_sum", size=8, seed=1, min_digits=1, max_digits=1))

    def make(count=32):
        samples = []
        for index in range(count):
            entry = problems[index // 4 % 8]
            tokens = tokenizer.encode(entry["question"])[-40:]
            metadata = {"dataset": "chain_sum", "entry": entry}
            samples.append(Sample(index, index // 4, 3, entry["question"], tokens, metadata=metadata))
        return samples

    return make


async def test_two_runs_give_the_same_samples_and_other_rollouts_other_ones(sglang_server, make_samples):
    runs = []
    async with sglang_server.client() as client:
        for rollout_id, concurrency in ((3, 256), (3, 5), (4, 256)):
            samples = make_samples()
            await generate_samples(
                samples, clients=[client], args=ARGS, rollout_id=rollout_id, concurrency=concurrency
            )
            runs.append(samples)
    first, again, other = runs
    assert [s.tokens for s in first] == [s.tokens for s in again]
    for one, two in zip(first, again, strict=True):
        assert one.rollout_log_probs == pytest.approx(two.rollout_log_probs, abs=1e-5)
    assert sum(a.tokens != b.tokens for a, b in zip(first, other, strict=True)) > 24


async def test_samples_are_whole_and_scored(sglang_server, make_samples, tokenizer):
    samples = make_samples()
    prompts = [list(sample.tokens) for sample in samples]
    async with sglang_server.client() as client:
        await generate_samples(samples, clients=[client], args=ARGS, rollout_id=3)
    for sample, prompt in zip(samples, prompts, strict=True):
        sample.check_aligned()
        assert sample.tokens[: sample.prompt_length] == prompt
        assert sample.weight_versions == ["default"]
        # 2 is the model's own end-of-sequence token.
        ended = sample.response_tokens[-1] == 2
        assert sample.status is (SampleStatus.COMPLETED if ended else SampleStatus.TRUNCATED)
        assert ended or sample.response_length == 12
        sample.response = tokenizer.decode(sample.response_tokens, skip_special_tokens=True)
    reward = RewardFunction("miles.rollout.reward_functions.reasoning_gym:score", concurrency=2)
    assert await score_samples(samples, reward, timeout_s=30) == []
    samples[0].response = samples[0].metadata["entry"]["answer"]
    await score_samples(samples[:1], reward, timeout_s=30)
    reward.close()
    assert samples[0].reward == 1.0
    assert all(0.0 <= sample.reward <= 1.0 for sample in samples)


async def test_prompt_beyond_the_context_names_its_sample(sglang_server, make_samples):
    samples = make_samples(4)
    samples[2].tokens = [5] * 510
    async with sglang_server.client() as client:
        with pytest.raises(ValueError, match=r"sample 2: SGLang engine .*512"):
            await generate_samples(samples, clients=[client], args=ARGS, rollout_id=3)


async def test_engine_that_is_not_there_is_told_in_one_line(make_samples):
    with reserve_port() as port:
        async with SGLangClient(f"http://127.0.0.1:{port.port}") as client:
            with pytest.raises(EngineUnreachable, match=f"127.0.0.1:{port.port}.*gone or was never there"):
                await generate_samples(make_samples(4), clients=[client], args=ARGS, rollout_id=3)
