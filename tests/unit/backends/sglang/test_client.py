"""The client against a small HTTP server of the test: errors become one line, and no request waits for ever."""

import asyncio
import json

import pytest
from aiohttp import web

from miles.backends.sglang.client import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    SamplingParams,
    SGLangClient,
    WeightVersionSpan,
)

SETTINGS = SamplingParams(max_new_tokens=4, stop_token_ids=(2,), sampling_seed=9)


def answer(output_ids, pairs, **meta):
    base = {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_versions": [{"version": "4", "start": 0, "end": len(output_ids)}],
        "output_token_logprobs": pairs,
    }
    return {"text": "", "output_ids": output_ids, "meta_info": {**base, **meta}}


@pytest.fixture
async def engine():
    """An HTTP server whose answer to any path is `engine.reply(request)`."""

    class Engine:
        async def reply(self, request):
            return web.json_response({})

    state = Engine()
    state.requests = []

    async def handle(request):
        state.requests.append((request.method, request.path, await request.text()))
        return await state.reply(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield state
    await runner.cleanup()


def replying(body, status=200):
    async def reply(request):
        return web.json_response(body, status=status)

    return reply


async def test_generate_sends_ids_and_parses_tokens_log_probs_and_versions(engine):
    engine.reply = replying(answer([7, 2], [[-0.5, 7, None], [-0.25, 2, None]]))
    async with SGLangClient(engine.url) as client:
        result = await client.generate(
            [1, 2, 3], SamplingParams(max_new_tokens=4, stop_token_ids=(2,), sampling_seed=9)
        )
    assert (result.output_ids, result.log_probs, result.finish_reason) == ([7, 2], [-0.5, -0.25], "stop")
    assert result.weight_versions == [WeightVersionSpan("4", 0, 2)]
    sent = json.loads(engine.requests[0][2])
    assert sent["input_ids"] == [1, 2, 3] and sent["return_logprob"] is True
    assert sent["sampling_params"]["sampling_seed"] == 9 and sent["sampling_params"]["stop_token_ids"] == [2]


@pytest.mark.parametrize("pairs", [[[-0.5, 7, None]], [[-0.5, 7, None], [-0.25, 3, None]], []])
async def test_log_probs_of_other_tokens_are_an_error(engine, pairs):
    engine.reply = replying(answer([7, 2], pairs))
    async with SGLangClient(engine.url) as client:
        with pytest.raises(EngineError, match="2 output tokens came with log-probs of"):
            await client.generate([1], SETTINGS)


async def test_engine_that_is_alive_but_never_answers_is_noticed(engine):
    async def never(request):
        await asyncio.sleep(30)
        return web.Response()

    engine.reply = never
    async with SGLangClient(engine.url, timeout_s=0.3) as client:
        with pytest.raises(EngineTimeout, match=r"/generate: no answer within 0.3 s; the engine is alive but stuck"):
            await client.generate([1], SETTINGS)
        with pytest.raises(EngineTimeout, match="health_generate"):
            await client.check_health(timeout_s=0.2)


async def test_engine_that_is_gone_is_noticed(engine):
    async def hang_up(request):
        request.transport.abort()
        return web.Response()

    engine.reply = hang_up
    async with SGLangClient(engine.url) as client:
        with pytest.raises(EngineUnreachable, match="the engine is gone"):
            await client.generate([1], SETTINGS)
    async with SGLangClient("http://127.0.0.1:1") as client:
        with pytest.raises(EngineUnreachable, match=r"http://127.0.0.1:1, GET /model_info"):
            await client.weight_version()


@pytest.mark.parametrize(
    "body", [{"success": False, "message": "no session\n is open"}, {"error": {"message": "no session is open"}}]
)
async def test_refusal_carries_the_servers_message_on_one_line(engine, body):
    engine.reply = replying(body, status=400)
    async with SGLangClient(engine.url) as client:
        with pytest.raises(EngineRefused, match=r"POST /end_weight_update: HTTP 400: no session is open$") as caught:
            await client.end_weight_update()
    assert caught.value.status == 400


async def test_server_without_begin_weight_update_is_called_too_old(engine):
    engine.reply = replying({"detail": "Not Found"}, status=404)
    async with SGLangClient(engine.url) as client:
        with pytest.raises(EngineError, match="too old"):
            await client.begin_weight_update()


@pytest.mark.parametrize(("ids", "message"), [([], "no tokens"), ([3, 128], "token id 128 .* 128"), ([-1], "id -1")])
async def test_prompt_outside_the_vocabulary_never_reaches_the_engine(engine, ids, message):
    async with SGLangClient(engine.url, vocab_size=128) as client:
        with pytest.raises(ValueError, match=message):
            await client.generate(ids, SETTINGS)
    assert engine.requests == []


def test_client_serves_one_event_loop_after_another():
    client = SGLangClient("http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(EngineUnreachable):
            asyncio.run(client.weight_version())


async def test_checksums_are_sorted_by_rank(engine):
    ranks = [{"checksums": {"w": str(r)}, "parallelism_info": [{"tp_rank": r, "tp_size": 2}]} for r in (1, 0)]
    engine.reply = replying({"success": True, "ranks": ranks})
    async with SGLangClient(engine.url) as client:
        assert [(rank.tp_rank, rank.checksums["w"]) for rank in await client.checksums()] == [(0, "0"), (1, "1")]


async def test_flush_cache_is_asked_for_until_the_engine_is_idle(engine):
    async def busy_twice(request):
        return web.Response(status=400 if len(engine.requests) < 3 else 200, text="Flush cache failed.")

    engine.reply = busy_twice
    async with SGLangClient(engine.url) as client:
        await client.flush_cache()
        assert len(engine.requests) == 3
        engine.reply = replying({}, status=400)
        with pytest.raises(EngineRefused, match="POST /flush_cache: HTTP 400"):
            await client.flush_cache(timeout_s=0.2)
