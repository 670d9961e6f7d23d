"""Actor weights to the rollout engines: one process group, one version number, checksums compared on request.

Rank 0 of the actor group is rank 0 of the shared group; the tensor-parallel ranks of all engines follow. Engines
receive while the actor broadcasts, so both sides of each bucket run at the same time.
"""

import asyncio
import logging
from typing import Any, Literal
from urllib.parse import urlsplit

from miles.backends.sglang.client import SGLangClient
from miles.backends.weight_checksums import differing_names
from miles.config import Args
from miles.ray.actor_group import RayTrainGroup
from miles.ray.cluster import Cluster

logger = logging.getLogger(__name__)

_GROUP_NAME = "miles_weights"


class WeightSync:
    """Publishes the actor's weights under ascending version numbers.

    Between two calls every engine serves the version `self.version`; an engine that reports another one is refused.
    """

    def __init__(self, args: Args, *, actor: RayTrainGroup, engine_urls: list[str], cluster: Cluster) -> None:
        self.version = 0
        self._args = args
        self._actor = actor
        self._clients = [SGLangClient(url, timeout_s=args.sglang_request_timeout_s) for url in engine_urls]
        self._ranks_per_engine = args.rollout_num_gpus_per_engine
        self._backend: Literal["nccl", "gloo"] = "nccl" if cluster.device_kind == "cuda" else "gloo"
        self._buckets: list[Any] = []

    async def connect(self) -> None:
        """Form the shared group; the actor must be initialised and the engines up."""
        host, port = await self._actor.free_address()
        if all(urlsplit(client.url).hostname == "127.0.0.1" for client in self._clients):
            host = "127.0.0.1"
        world_size = 1 + len(self._clients) * self._ranks_per_engine
        joins = [
            client.init_weights_update_group(
                master_address=host,
                master_port=port,
                rank_offset=1 + number * self._ranks_per_engine,
                world_size=world_size,
                group_name=_GROUP_NAME,
                backend=self._backend,
            )
            for number, client in enumerate(self._clients)
        ]
        ours = self._actor.call("join_weight_group", f"tcp://{host}:{port}", world_size, 0, _GROUP_NAME)
        await asyncio.gather(ours, *joins)
        self._buckets = (await self._actor.call("weight_buckets"))[0]

    async def publish(self, version: int, *, check: bool = False) -> None:
        """Send all weights and name them `version`.

        Args:
            check: compare the checksums of every parameter on every engine rank with the actor's.

        Raises:
            RuntimeError: an engine serves another version afterwards, or holds other weights.
        """
        await asyncio.gather(*(client.pause("retract") for client in self._clients))
        await asyncio.gather(*(client.begin_weight_update() for client in self._clients))
        for number, bucket in enumerate(self._buckets):
            receives = [
                client.update_weights_from_distributed(
                    names=bucket.names,
                    dtypes=bucket.dtypes,
                    shapes=bucket.shapes,
                    group_name=_GROUP_NAME,
                    weight_version=str(version),
                )
                for client in self._clients
            ]
            await asyncio.gather(self._actor.call("broadcast_bucket", number), *receives)
        await asyncio.gather(*(client.end_weight_update() for client in self._clients))
        await asyncio.gather(*(client.flush_cache() for client in self._clients))
        await asyncio.gather(*(client.resume() for client in self._clients))
        for client in self._clients:
            served = await client.weight_version()
            if served != str(version):
                raise RuntimeError(f"engine {client.url} serves weight version {served}, version {version} was sent")
        self.version = version
        if check:
            await self._compare(version)

    async def _compare(self, version: int) -> None:
        for client in self._clients:
            for rank in await client.checksums():
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
        await asyncio.gather(*(client.close() for client in self._clients))
