"""A lost engine: noticed in time, its requests sent again, and no answer lost or given twice.

The engines here are HTTP servers of this process that answer as SGLang does, stop answering, or close their door.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from miles.backends.sglang.client import EngineError, EngineUnreachable, SamplingParams, SGLangClient
from miles.rollout.engine_pool import EnginePool

GREEDY = SamplingParams(max_new_tokens=1)


class FakeEngine:
    """Answers /generate with the prompt's last token plus one, after `delay_s`; where it is `hung` it keeps every door
    open and says nothing, and to a health check it says so only if it is `healthy`."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.hung, self.healthy = delay_s, False, False
        self.answered: list[list[int]] = []
        self.status = 200

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health_generate", self._health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        ids = (await request.json())["input_ids"]
        await asyncio.sleep(self.delay_s)
        if self.hung:
            await asyncio.sleep(60)
        if self.status != 200:
            return web.json_response({"error": {"message": "scheduler gone"}}, status=self.status)
        self.answered.append(ids)
        token = ids[-1] + 1
        meta = {
            "id": "x",
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, token, None]],
            "weight_versions": [{"version": "1", "start": 0, "end": 1}],
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
        }
        return web.json_response({"text": "", "output_ids": [token], "meta_info": meta})

    async def _health(self, request: web.Request) -> web.Response:
        if self.hung and not self.healthy:
            await asyncio.sleep(60)
        return web.Response(status=200 if self.status == 200 or self.healthy else 503)


Make = Callable[..., Awaitable[tuple[EnginePool, list[FakeEngine]]]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """make(count, health_timeout_s=..., delay_s=...) -> (pool, engines)."""
    pools: list[EnginePool] = []
    engines: list[FakeEngine] = []

    async def build(count: int, *, health_timeout_s: float = 2.0, delay_s: float = 0.0):
        mine = [FakeEngine(delay_s) for _ in range(count)]
        urls = [await engine.start() for engine in mine]
        engines.extend(mine)
        pools.append(EnginePool([SGLangClient(url, timeout_s=5.0) for url in urls], health_timeout_s=health_timeout_s))
        return pools[-1], mine

    yield build
    for pool in pools:
        await pool.close()
    for engine in engines:
        await engine.stop()


async def answers(pool: EnginePool, count: int) -> list[int]:
    engines = pool.engines
    results = await asyncio.gather(*(engines[i % len(engines)].generate([i], GREEDY) for i in range(count)))
    return [result.output_ids[0] for result in results]


async def replace_one(pool: EnginePool) -> tuple[FakeEngine, float]:
    """Replace the next lost engine; the new one and the seconds until the loss was known."""
    started = time.monotonic()
    loss = await pool.next_lost()
    seconds = time.monotonic() - started
    engine = FakeEngine()
    await pool.restored(loss.number, SGLangClient(await engine.start(), timeout_s=5.0))
    return engine, seconds


async def test_dead_engine_replaced_requests_sent_again_once_each(make: Make) -> None:
    pool, engines = await make(2, delay_s=0.2)
    replacing = asyncio.ensure_future(replace_one(pool))
    working = asyncio.ensure_future(answers(pool, 8))
    await asyncio.sleep(0.05)
    await engines[0].stop()
    assert await working == list(range(1, 9))
    new, _ = await replacing
    assert sorted(engines[1].answered + new.answered) == [[i] for i in range(8)]
    assert [engine.num_resent for engine in pool.engines] == [4, 0]
    await new.stop()


async def test_engine_alive_but_silent_noticed_within_the_time(make: Make) -> None:
    # faults.md row 57: the process lives, the scheduler does not.
    pool, engines = await make(1, health_timeout_s=1.0)
    engines[0].hung = True
    replacing = asyncio.ensure_future(replace_one(pool))
    assert await answers(pool, 3) == [1, 2, 3]
    new, seconds = await replacing
    assert 0.5 < seconds < 4.0
    await new.stop()


async def test_slow_engine_with_a_sign_of_life_is_left_alone(make: Make) -> None:
    pool, engines = await make(1, health_timeout_s=0.6, delay_s=1.0)
    engines[0].healthy = True
    losses = asyncio.ensure_future(pool.next_lost())
    await asyncio.sleep(0)
    assert await answers(pool, 2) == [1, 2]
    assert not losses.done()
    losses.cancel()


async def test_server_error_of_an_unhealthy_engine_is_a_loss_of_a_healthy_one_an_error(make: Make) -> None:
    pool, engines = await make(1)
    engines[0].status = 500
    replacing = asyncio.ensure_future(replace_one(pool))
    assert await answers(pool, 1) == [1]
    new, _ = await replacing
    new.healthy = True
    for new.status in (400, 500):
        with pytest.raises(EngineError, match=str(new.status)):
            await answers(pool, 1)
    await new.stop()


async def test_loss_that_nobody_replaces_is_an_error_of_the_request(make: Make) -> None:
    pool, engines = await make(1)
    await engines[0].stop()
    with pytest.raises(EngineUnreachable):
        await answers(pool, 1)


async def test_hung_engine_that_nobody_replaces_is_waited_for_until_the_requests_own_limit(make: Make) -> None:
    pool, engines = await make(1, health_timeout_s=0.2)
    engines[0].hung = True
    request = asyncio.ensure_future(answers(pool, 1))
    await asyncio.sleep(0.4)
    assert not request.done()
    request.cancel()


async def test_engine_given_up_fails_waiting_requests_with_the_reason(make: Make) -> None:
    pool, engines = await make(1)
    losses = asyncio.ensure_future(pool.next_lost())
    await asyncio.sleep(0)
    await engines[0].stop()
    working = asyncio.ensure_future(answers(pool, 2))
    loss = await losses
    pool.engines[loss.number].give_up("engine 0 was lost nine times")
    with pytest.raises(EngineError, match="lost nine times"):
        await working


async def test_busy_seconds_count_the_time_with_requests(make: Make) -> None:
    pool, _ = await make(1, delay_s=0.2, health_timeout_s=5.0)
    began = time.monotonic()
    await answers(pool, 4)
    seconds = time.monotonic() - began
    await asyncio.sleep(0.2)
    (busy,) = pool.busy_seconds()
    assert 0.15 < busy <= seconds
