"""Weights to engines: who hangs is noticed in time, and an engine that is started again is looked at."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from miles.backends.sglang.client import EngineError, EngineRefused, EngineTimeout, RankChecksums
from miles.config import Args
from miles.ray import weight_sync
from miles.ray.actor_group import TrainingRankLost
from miles.ray.weight_sync import WeightSync

HEALTH_TIMEOUT_S = 0.1


class Engine:
    """An engine's client: `hangs` is the call that it does not answer, `slow` one that takes longer than the limit."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url, self.hangs, self.slow, self.checksum = url, "", "", "same"
        self.serves, self.refuses, self.resumed = "", False, 0

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
        return self.serves or self.version

    async def update_weights_from_distributed(self, *, weight_version: str, **_: Any) -> None:
        self.version = weight_version

    async def _quick(self, *_: Any) -> None: ...

    pause = begin_weight_update = flush_cache = close = _quick

    async def end_weight_update(self) -> None:
        if self.refuses:
            raise EngineRefused(f"{self.url}: no update under way", status=400, reason="")

    async def resume(self) -> None:
        self.resumed += 1

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


async def test_engine_that_serves_another_version_than_was_sent_is_refused(made: Any) -> None:
    sync, engines = made()
    await sync.connect()
    engines[1].serves = "1"
    with pytest.raises(RuntimeError, match=r"^engine http://127.0.0.1:2 serves weight version 1, version 2 was sent"):
        await sync.publish(2)
    assert sync.version == 0


async def test_after_a_failed_call_dead_engines_are_named_and_the_others_go_on(made: Any) -> None:
    sync, engines = made()
    engines[0].refuses = True
    engines[1].hangs = "checksums"
    (lost,) = await sync.lost_engines()
    assert (lost.number, lost.url) == (1, "http://127.0.0.1:2")
    assert "no answer" in lost.reason
    assert engines[0].resumed == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_of_the_errors_of_a_transfer_a_death_is_told_first_then_what_an_engine_says(
    order: tuple[int, ...], made: Any
) -> None:
    sync, _ = made()
    errors = [TrainingRankLost("a rank died"), EngineError("an engine failed"), RuntimeError("connection closed")]

    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(TrainingRankLost):
        await sync._together(*(fail(errors[place]) for place in order))
    with pytest.raises(EngineError):
        await sync._together(*(fail(errors[place]) for place in order if place))


async def test_settling_waits_for_the_side_of_a_transfer_that_an_error_left_behind(made: Any) -> None:
    sync, _ = made()
    done: list[str] = []

    async def broadcast() -> None:
        await asyncio.sleep(0.05)
        done.append("broadcast")
        raise RuntimeError("connection closed by peer")

    async def receive() -> None:
        raise EngineError("the engine is gone")

    with pytest.raises(EngineError, match="gone"):
        await sync._together(broadcast(), receive())
    assert done == []
    await sync.settle()
    assert done == ["broadcast"]
