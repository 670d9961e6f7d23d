"""A real SGLang server on a CPU: transformers' numbers, reproducible sampling, and silence that is noticed."""

import asyncio
import signal
import time

import pytest

from miles.backends.sglang.client import EngineRefused, EngineTimeout, SamplingParams

PROMPTS = [[1, 22, 4, 15], [5, 6, 7], [30], [1, 2, 3, 98, 50, 4, 4, 4, 60]]


def sampled(seed: int, **changes) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "sampling_seed": seed, "ignore_eos": True, **changes})


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_of_sampled_tokens_equal_transformers(sglang_server, llama, reference_log_probs, temperature):
    async with sglang_server.client() as client:
        for seed, prompt in enumerate(PROMPTS):
            result = await client.generate(prompt, sampled(seed, temperature=temperature))
            expected = reference_log_probs(llama, prompt, result.output_ids, temperature)
            assert len(result.output_ids) == 24
            assert result.log_probs == pytest.approx(expected, abs=1e-5)


async def test_greedy_tokens_are_transformers_argmax(sglang_server, llama):
    import torch

    async with sglang_server.client() as client:
        result = await client.generate(PROMPTS[0], sampled(0, temperature=0.0))
    tokens = list(PROMPTS[0])
    with torch.no_grad():
        for _ in range(24):
            tokens.append(int(llama(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert result.output_ids == tokens[len(PROMPTS[0]) :]


async def test_concurrent_requests_give_the_tokens_of_sequential_ones(sglang_server):
    async with sglang_server.client() as client:
        sequential = [await client.generate(PROMPTS[n % 4], sampled(n)) for n in range(8)]
        concurrent = await asyncio.gather(*(client.generate(PROMPTS[n % 4], sampled(n)) for n in range(8)))
    for one, other in zip(sequential, concurrent, strict=True):
        assert one.output_ids == other.output_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    # Two seeds for each prompt: seeds that were ignored would give the same responses.
    assert len({tuple(result.output_ids) for result in concurrent}) == 8


async def test_stop_token_ends_the_response_and_belongs_to_it(sglang_server):
    async with sglang_server.client() as client:
        whole = await client.generate(PROMPTS[1], sampled(3))
        stop = whole.output_ids[10]
        assert 2 not in whole.output_ids[:11], "choose another seed: the model's own end comes first"
        stopped = await client.generate(PROMPTS[1], sampled(3, stop_token_ids=(stop,), ignore_eos=False))
    length = whole.output_ids.index(stop) + 1
    assert stopped.finish_reason == "stop" and whole.finish_reason == "length"
    assert stopped.output_ids == whole.output_ids[:length]
    assert len(stopped.log_probs) == length


async def test_too_long_prompt_is_refused_with_the_servers_words(sglang_server):
    async with sglang_server.client() as client:
        with pytest.raises(EngineRefused, match=r"HTTP 400: .*512 tokens"):
            await client.generate([5] * 600, sampled(0))


async def test_token_outside_the_vocabulary_is_refused_and_the_server_lives(sglang_server):
    async with sglang_server.client() as client:
        with pytest.raises(ValueError, match="token id 99 is outside the engine's vocabulary of 99"):
            await client.generate([5, 99], sampled(0))
        await client.check_health()


async def test_frozen_scheduler_is_noticed_though_the_http_front_answers(sglang_server, processes_of):
    scheduler = next(p for p in processes_of(sglang_server._process.pid) if "scheduler" in " ".join(p.cmdline()))
    async with sglang_server.client() as client:
        await client.check_health()
        scheduler.send_signal(signal.SIGSTOP)
        try:
            client.timeout_s = 2.0
            began = time.monotonic()
            with pytest.raises(EngineTimeout, match="alive but stuck"):
                await client.generate(PROMPTS[0], sampled(0))
            with pytest.raises(EngineTimeout, match="health_generate"):
                await client.check_health(timeout_s=1.0)
            assert time.monotonic() - began < 10
            assert sglang_server.is_alive()
        finally:
            scheduler.send_signal(signal.SIGCONT)
        client.timeout_s = 60.0
        assert len((await client.generate(PROMPTS[0], sampled(0))).output_ids) == 24


def test_garbage_of_the_start_is_frozen_once_the_server_answers(sglang_server):
    log = sglang_server.log_path.read_text()
    assert '"GET /freeze_gc HTTP/1.1" 200' in log.partition('"POST /generate HTTP/1.1" 200')[2]
