"""Actor weights to the rollout engines: one process group, one version number, checksums compared on request.

Rank 0 of the actor group is rank 0 of the shared group; the tensor-parallel ranks of all engines follow. Engines
receive while the actor broadcasts, so both sides of each bucket run at the same time. An engine that is replaced gets
the current weights through a group of its own; the next publication forms one of all engines again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, Literal
from urllib.parse import urlsplit

from miles.backends.sglang.client import EngineError, EngineRefused, SGLangClient
from miles.backends.weight_checksums import differing_names
from miles.config import Args
from miles.ray.actor_group import RayTrainGroup, TrainingRankLost
from miles.ray.cluster import Cluster
from miles.rollout.engine_pool import LostEngine

logger = logging.getLogger(__name__)

_GROUP_NAME = "miles_weights"


class WeightSync:
    """Publishes the actor's weights under ascending version numbers.

    Between two calls every engine serves the version `self.version`; an engine that reports another one is refused.
    After a call that failed, engines may be paused or half updated: `lost_engines` says which have to be replaced,
    `replaced` and `settle` follow, and the publication starts again.
    """

    def __init__(self, args: Args, *, actor: RayTrainGroup, engine_urls: list[str], cluster: Cluster) -> None:
        self.version = 0
        self._args = args
        self._actor = actor
        self._clients = [self._client(url) for url in engine_urls]
        self._ranks_per_engine = args.rollout_num_gpus_per_engine
        self._backend: Literal["nccl", "gloo"] = "nccl" if cluster.device_kind == "cuda" else "gloo"
        self._buckets: list[Any] = []
        self._num_groups = 0
        self._members: list[int] = []
        self._group_of: dict[int, str] = {}
        self._unfinished: set[asyncio.Task[Any]] = set()

    def _client(self, url: str) -> SGLangClient:
        # All that is asked for here is quick: half of the time for an answer, half for a sign of life.
        return SGLangClient(url, timeout_s=self._args.sglang_health_timeout_s / 2)

    @property
    def _everybody(self) -> list[int]:
        return list(range(len(self._clients)))

    async def connect(self, actor: RayTrainGroup | None = None) -> None:
        """Form the group of all engines; the actor must be initialised and the engines up.

        Args:
            actor: takes the place of an actor group that was lost.
        """
        if actor is not None:
            self._actor = actor
        await self._form_group(self._everybody)
        self._buckets = (await self._actor.call("weight_buckets"))[0]

    async def _form_group(self, members: list[int]) -> None:
        self._members = []
        self._num_groups += 1
        name = f"{_GROUP_NAME}_{self._num_groups}"
        for number in members:
            if (earlier := self._group_of.pop(number, None)) is not None:
                with contextlib.suppress(EngineRefused):
                    await self._clients[number].destroy_weights_update_group(group_name=earlier)
        host, port = await self._actor.reserve_address()
        if all(urlsplit(client.url).hostname == "127.0.0.1" for client in self._clients):
            host = "127.0.0.1"
        world_size = 1 + len(members) * self._ranks_per_engine
        joins = [
            self._while_alive(
                client,
                client.init_weights_update_group(
                    master_address=host,
                    master_port=port,
                    rank_offset=1 + place * self._ranks_per_engine,
                    world_size=world_size,
                    group_name=name,
                    backend=self._backend,
                    timeout_s=self._args.sglang_request_timeout_s,
                ),
            )
            for place, client in enumerate(self._clients[number] for number in members)
        ]
        # An engine that hangs is noticed before: its reason is the better one.
        wait_s = 2 * self._args.sglang_health_timeout_s
        ours = self._actor.call("join_weight_group", f"tcp://{host}:{port}", world_size, 0, name, wait_s)
        await self._together(ours, *joins)
        self._group_of |= dict.fromkeys(members, name)
        self._members = members

    async def publish(self, version: int, *, check: bool = False) -> None:
        """Send all weights to all engines and name them `version`.

        Args:
            check: compare the checksums of every parameter on every engine rank with the actor's.

        Raises:
            EngineError, RayTaskError: an engine, or the transfer, failed; see the class.
            RuntimeError: an engine serves another version afterwards, or holds other weights.
        """
        await self._send(self._everybody, version)
        self.version = version
        if check:
            await self._compare(self._everybody, version)

    async def _send(self, members: list[int], version: int) -> None:
        if self._members != members:
            await self._form_group(members)
        clients = [self._clients[number] for number in members]
        await asyncio.gather(*(client.pause("retract") for client in clients))
        await asyncio.gather(*(client.begin_weight_update() for client in clients))
        for number, bucket in enumerate(self._buckets):
            receives = [
                client.update_weights_from_distributed(
                    names=bucket.names,
                    dtypes=bucket.dtypes,
                    shapes=bucket.shapes,
                    group_name=self._group_of[members[0]],
                    weight_version=str(version),
                )
                for client in clients
            ]
            await self._together(self._actor.call("broadcast_bucket", number), *receives)
        await asyncio.gather(*(client.end_weight_update() for client in clients))
        await asyncio.gather(*(client.flush_cache() for client in clients))
        await asyncio.gather(*(client.resume() for client in clients))
        for client in clients:
            served = await client.weight_version()
            if served != str(version):
                raise RuntimeError(f"engine {client.url} serves weight version {served}, version {version} was sent")

    async def _together(self, *parts: Any) -> None:
        """Run both sides of a transfer; the first error is raised at once, for the other side may wait for ever."""
        tasks = {asyncio.ensure_future(part) for part in parts}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        self._unfinished |= pending
        errors = [task.exception() for task in done]
        # One side ends because the other did: a death is the reason, then what an engine says.
        for reason in (TrainingRankLost, EngineError, BaseException):
            for error in errors:
                if isinstance(error, reason):
                    raise error

    async def _while_alive(self, client: SGLangClient, request: Awaitable[Any]) -> Any:
        """Answer of a request that may take long, as long as its engine shows signs of life.

        Raises:
            EngineError: the request failed, or there was no sign of life for `sglang_health_timeout_s`.
        """
        half = self._args.sglang_health_timeout_s / 2
        running = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({running}, timeout=half))[0]:
                try:
                    await client.check_health(timeout_s=half)
                except EngineError:
                    if not running.done():
                        raise
            return running.result()
        finally:
            running.cancel()

    # ---------------------------------------------------------------- replacing engines

    async def lost_engines(self) -> list[LostEngine]:
        """The engines that give no sign of life, after a failed call; the others go on where they were."""
        found = await asyncio.gather(*(self._sign_of_life(number) for number in self._everybody))
        return [loss for loss in found if loss is not None]

    async def _sign_of_life(self, number: int) -> LostEngine | None:
        client = self._clients[number]
        try:
            with contextlib.suppress(EngineRefused):
                await client.end_weight_update()
            with contextlib.suppress(EngineRefused):
                await client.resume()
            await client.check_health(timeout_s=self._args.sglang_health_timeout_s / 2)
        except EngineError as error:
            return LostEngine(number, client.url, str(error))
        return None

    async def replaced(self, number: int, url: str) -> None:
        """Engine `number` is a new server at `url`; it has other weights until `resend` or `publish`."""
        await self._clients[number].close()
        self._clients[number] = self._client(url)
        self._group_of.pop(number, None)
        self._members = []

    async def resend(self, number: int) -> None:
        """Give one engine the current weights; the actor must be idle, the other engines need not be.

        Checksums are compared unless `check_weight_sync` is "never": for the engine it is the start.
        """
        await self._send([number], self.version)
        if self._args.check_weight_sync != "never":
            await self._compare([number], self.version)

    async def settle(self) -> None:
        """Wait for what a failed call left behind, which ends once the lost engines are gone."""
        unfinished, self._unfinished = self._unfinished, set()
        self._members = []
        await asyncio.gather(*unfinished, return_exceptions=True)

    # ---------------------------------------------------------------- checking

    async def _compare(self, members: list[int], version: int) -> None:
        for client in (self._clients[number] for number in members):
            asked = client.checksums(timeout_s=self._args.sglang_request_timeout_s)
            for rank in await self._while_alive(client, asked):
                ours = await self._actor.call("engine_checksums", tp_rank=rank.tp_rank, tp_size=rank.tp_size)
                different = differing_names(ours[0], rank.checksums)
                if different:
                    raise RuntimeError(
                        f"engine {client.url} rank {rank.tp_rank} holds other weights than the actor at version "
                        f"{version}: {len(different)} of {len(ours[0])} parameters, first {different[0]}"
                    )
        logger.info("weight version %d: checksums of actor and engines agree", version)

    async def close(self) -> None:
        """Close the connections."""
        for task in self._unfinished:
            task.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))
