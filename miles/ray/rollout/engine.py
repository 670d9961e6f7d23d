"""A rollout engine as a Ray actor: holds the device, starts the server, ends it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from miles.backends.sglang.server import EngineStartError, SGLangServer
from miles.config import Args
from miles.ray.driver_folder import driver_folder_env, enter_driver_folder
from miles.utils.logging_utils import configure_logger

if TYPE_CHECKING:
    # Reserving devices needs torch, which costs a process that only keeps a server seconds.
    from miles.ray.placement_group import Placement


class RolloutEngine:
    """One SGLang server. Requests go to its URL directly; this process only keeps it."""

    def __init__(self, args: Args, engine: int, device: str, gpu_ids: list[int], loopback: bool) -> None:
        enter_driver_folder()
        configure_logger(args, source=f"engine{engine}")
        if device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._args, self._engine, self._device = args, engine, device
        self._server: SGLangServer | None = None

    def start(self) -> str:
        """Start the server and wait until it answers; its URL.

        Raises:
            ValueError: the server did not come up; the message says why and names its log.
        """
        assert self._device in ("cpu", "cuda")
        self._server = SGLangServer.from_args(self._args, engine=self._engine, device=self._device, host=self._host)
        try:
            self._server.start()
        except EngineStartError as error:
            raise ValueError(
                f"rollout engine on port {self._server.port} did not start: {error.cause} (log: {error.log_path})"
            ) from None
        return self._server.url

    def restart(self) -> str:
        """End the server, whatever state it is in, and start another; its URL. The weights are those of the model
        folder again."""
        self.stop()
        return self.start()

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the server: a fault that tests ask for."""
        assert self._server is not None
        self._server.signal(signum)

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()


class EngineGroup:
    """All engines of a run: one on every `rollout_num_gpus_per_engine` devices of the rollout bundles."""

    def __init__(self, args: Args, placement: Placement) -> None:
        """Make the actors; the servers are not started yet.

        Raises:
            ValueError: the placement holds fewer devices than the engines of the run need.
        """
        size = args.rollout_num_gpus_per_engine
        count = args.rollout_num_gpus // size
        if len(placement.bundles["rollout"]) < count * size:
            raise ValueError(
                f"{count} engines of {size} devices were asked for, {len(placement.bundles['rollout'])} devices are "
                "reserved for them"
            )
        self._args, self._placement = args, placement
        self.actors = [self._create(number) for number in range(count)]
        self.num_restarts = 0

    def _create(self, number: int) -> Any:
        size = self._args.rollout_num_gpus_per_engine
        mine = self._placement.bundles["rollout"][number * size : (number + 1) * size]
        cluster = self._placement.cluster
        return (
            ray.remote(RolloutEngine)
            .options(
                scheduling_strategy=self._placement.strategy(mine[0]),
                # The bundles hold the devices; Ray would hide all GPUs but the first bundle's from this process.
                runtime_env={
                    "env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} | driver_folder_env(),
                },
                num_cpus=0,
            )
            .remote(
                self._args,
                number,
                cluster.device_kind,
                [bundle.gpu_id for bundle in mine if bundle.gpu_id is not None],
                cluster.single_machine,
            )
        )

    async def restart(self, number: int, reason: str) -> str:
        """A new server in place of a lost one; its URL.

        Raises:
            RuntimeError: the run has had as many restarts as it may have.
            ValueError: the new server did not start.
        """
        if self.num_restarts >= self._args.sglang_max_restarts:
            raise RuntimeError(
                f"engine {number} is lost ({reason}) after {self.num_restarts} restarts of engines, and "
                f"--sglang-max-restarts is {self._args.sglang_max_restarts}"
            )
        self.num_restarts += 1
        try:
            return await self.actors[number].restart.remote()
        except RayActorError:
            self.actors[number] = self._create(number)
            return await self.actors[number].start.remote()
