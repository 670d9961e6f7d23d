"""Engines that may be lost: requests wait for the replacement and are sent again.

An engine is lost when nobody answers at its address, or when it works on requests and gives no sign of life, not even
to a health check, for `health_timeout_s`. Whoever starts engines takes losses from `EnginePool.next_lost` and answers
each with `restored` or `give_up`. As long as nobody has asked for losses, one is an error of the request, as it is
without a pool.

A seeded request gives the same tokens wherever and however often it is sent, so a run with a lost engine sees the
samples that one without would have seen.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from miles.backends.sglang.client import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    GenerateResult,
    SamplingParams,
    SGLangClient,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LostEngine:
    """Number of an engine, the address it had, and one line on how it was lost."""

    number: int
    url: str
    reason: str


class PooledEngine:
    """One engine of a pool; `generate` is that of the client, but outlives it."""

    def __init__(self, pool: "EnginePool", number: int, client: SGLangClient) -> None:
        self._pool, self.number, self.client = pool, number, client
        self._up = asyncio.Event()
        self._up.set()
        self._given_up: str | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_in_flight = 0
        self._last_sign = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._busy_since = 0.0
        self.busy_s = 0.0
        """Seconds with at least one request, since the pool was made."""
        self.num_resent = 0

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerateResult:
        """Sample one response, on this engine or on what replaces it.

        Raises:
            ValueError, EngineError: as `SGLangClient.generate`; for a lost engine only where nobody replaces it.
        """
        while True:
            await self._up.wait()
            if self._given_up is not None:
                raise EngineError(self._given_up)
            client, lost = self.client, self._lost
            request = asyncio.ensure_future(client.generate(input_ids, sampling))
            self._begin()
            try:
                await asyncio.wait({request, lost}, return_when=asyncio.FIRST_COMPLETED)
                if request.done():
                    result = request.result()
                    self._last_sign = time.monotonic()
                    return result
            except (EngineUnreachable, EngineTimeout, EngineRefused) as error:
                # A refusal may come from the front of a server whose scheduler is gone.
                if isinstance(error, EngineRefused) and error.status < 500:
                    raise
                if not isinstance(error, EngineUnreachable) and await self._answers(client):
                    raise
                if not self._pool.supervised:
                    raise
                self.mark_lost(str(error), client)
            finally:
                self._end()
                request.cancel()
            self.num_resent += 1

    def mark_lost(self, reason: str, client: SGLangClient) -> None:
        """Note that the server behind `client` is gone; does nothing where that is known or it is replaced already."""
        if client is not self.client or not self._up.is_set() or self._given_up is not None:
            return
        logger.warning("engine %d is lost: %s", self.number, reason)
        self._up.clear()
        self._lost.set_result(None)
        self._pool.report(LostEngine(self.number, client.url, reason))

    def restore(self, client: SGLangClient) -> None:
        """Go on with another server of the same weights."""
        self.client, self._lost = client, asyncio.get_running_loop().create_future()
        self._last_sign = time.monotonic()
        self._up.set()

    def give_up(self, reason: str) -> None:
        """Fail every request, waiting or to come."""
        self._given_up = reason
        self._up.set()

    # ---------------------------------------------------------------- signs of life

    def _begin(self) -> None:
        self.num_in_flight += 1
        if self.num_in_flight == 1:
            self._last_sign = self._busy_since = time.monotonic()
            self._watch = asyncio.ensure_future(self._watch_over())

    def _end(self) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.busy_s += time.monotonic() - self._busy_since
            if self._watch is not None:
                self._watch.cancel()

    async def _watch_over(self) -> None:
        """While there are requests: ask for a sign of life after half of the time without one.

        The engine is busy then, so it answers the check beside its requests instead of sampling for it, which could
        change how a batch is sampled.
        """
        half = self._pool.health_timeout_s / 2
        while True:
            client = self.client
            await asyncio.sleep(max(self._last_sign + half - time.monotonic(), half / 10))
            if time.monotonic() - self._last_sign < half or not self._up.is_set():
                continue
            if await self._answers(client):
                self._last_sign = time.monotonic()
            elif self._pool.supervised:
                self.mark_lost(f"{client.url} gave no sign of life for {self._pool.health_timeout_s:g} s", client)

    async def _answers(self, client: SGLangClient) -> bool:
        try:
            await client.check_health(timeout_s=self._pool.health_timeout_s / 2)
        except EngineError:
            return False
        return True


class EnginePool:
    """All engines of a run, by number."""

    def __init__(self, clients: Sequence[SGLangClient], *, health_timeout_s: float) -> None:
        """Must be made inside the event loop that will use it."""
        self.health_timeout_s = health_timeout_s
        self.engines = [PooledEngine(self, number, client) for number, client in enumerate(clients)]
        self.supervised = False
        self._losses: asyncio.Queue[LostEngine] = asyncio.Queue()

    def report(self, loss: LostEngine) -> None:
        self._losses.put_nowait(loss)

    async def next_lost(self) -> LostEngine:
        """The next engine that is lost; whoever calls this owes a `restored` or `give_up` for it."""
        self.supervised = True
        return await self._losses.get()

    async def restored(self, number: int, client: SGLangClient) -> None:
        """Engine `number` is a new server behind `client`; waiting requests are sent to it."""
        with contextlib.suppress(Exception):
            await self.engines[number].client.close()
        self.engines[number].restore(client)

    def busy_seconds(self) -> list[float]:
        """Seconds that each engine has had requests so far."""
        return [engine.busy_s for engine in self.engines]

    async def close(self) -> None:
        """Close all connections."""
        for engine in self.engines:
            await engine.client.close()
