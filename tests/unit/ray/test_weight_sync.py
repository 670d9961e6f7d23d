"""Weights to engines: who hangs is noticed in time, and an engine that is started again is looked at."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from miles.backends.sglang.client import EngineTimeout, RankChecksums
from miles.config import Args
from miles.ray import weight_sync
from miles.ray.weight_sync import WeightSync

HEALTH_TIMEOUT_S = 0.1


class Engine:
    """An engine's client: `hangs` is the call that it does not answer, `slow` one that takes longer than the limit."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url, self.hangs, self.slow, self.checksum = url, "", "", "same"

    async def _work(self, call: str) -> None:
        if call == self.hangs:
            await asyncio.sleep(60)
        if call == self.slow:
            await asyncio.sleep(1.5 * HEALTH_TIMEOUT_S)

    async def check_health(self, *, timeout_s: float) -> None:
        if self.hangs:
            await asyncio.sleep(timeout_s)
            raise EngineTimeout(f"{self.url}: no answer")

    async def init_weights_update_group(self, **_: Any) -> None:
        await self._work("join")

    async def checksums(self, *, timeout_s: float) -> list[RankChecksums]:
        await self._work("checksums")
        return [RankChecksums(0, 1, {"weight": self.checksum})]

    async def weight_version(self) -> str:
        return self.version

    async def update_weights_from_distributed(self, *, weight_version: str, **_: Any) -> None:
        self.version = weight_version

    async def _quick(self, *_: Any) -> None: ...

    pause = begin_weight_update = end_weight_update = flush_cache = resume = close = _quick

    async def destroy_weights_update_group(self, *, group_name: str) -> None: ...


class Actor:
    """Has one bucket of one weight."""

    async def reserve_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def call(self, method: str, *_: Any, **__: Any) -> list[Any]:
        if method == "weight_buckets":
            return [[SimpleNamespace(names=("weight",), dtypes=("float32",), shapes=((1,),))]]
        return [{"weight": "same"}]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(weight_sync, "SGLangClient", Engine)

    def build(check: str = "start") -> tuple[WeightSync, list[Any]]:
        args = Args.build(sglang_health_timeout_s=HEALTH_TIMEOUT_S, check_weight_sync=check)
        cluster: Any = SimpleNamespace(device_kind="cpu")
        actor: Any = Actor()
        sync = WeightSync(args, actor=actor, engine_urls=["http://127.0.0.1:1", "http://127.0.0.1:2"], cluster=cluster)
        return sync, sync._clients

    return build


@pytest.mark.parametrize("call", ["join", "checksums"])
async def test_engine_that_hangs_is_told_within_the_health_timeout(call: str, made: Any) -> None:
    sync, engines = made()
    engines[1].hangs = call
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match=r"127\.0\.0\.1:2"):
        await sync.connect()
        await sync.publish(1, check=True)
    assert time.monotonic() - started < 10 * HEALTH_TIMEOUT_S
    await sync.close()


@pytest.mark.parametrize("call", ["join", "checksums"])
async def test_engine_that_is_slow_and_alive_is_waited_for(call: str, made: Any) -> None:
    sync, engines = made()
    engines[1].slow = call
    await sync.connect()
    await sync.publish(1, check=True)
    assert sync.version == 1


@pytest.mark.parametrize("check", ["never", "start", "always"])
async def test_engine_started_again_is_compared_unless_never(check: str, made: Any) -> None:
    sync, engines = made(check)
    await sync.connect()
    await sync.publish(1)
    # Only the engine that is new is looked at.
    engines[0].checksum = "other"
    await sync.replaced(1, "http://127.0.0.1:3")
    await sync.resend(1)
    engines[1].checksum = "other"
    if check == "never":
        await sync.resend(1)
    else:
        with pytest.raises(
            RuntimeError, match=r"engine http://127.0.0.1:3 rank 0 holds other weights .* first weight"
        ):
            await sync.resend(1)
