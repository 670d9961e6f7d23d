"""A rollout engine as a Ray actor: holds the device, starts the server, ends it."""

import os
from typing import Any

import ray

from miles.backends.sglang.server import EngineStartError, SGLangServer
from miles.config import Args
from miles.ray.placement_group import Placement
from miles.utils.logging_utils import configure_logger


class RolloutEngine:
    """One SGLang server. Requests go to its URL directly; this process only keeps it."""

    def __init__(self, args: Args, engine: int, device: str, gpu_ids: list[int], loopback: bool) -> None:
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

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()


def create_engines(args: Args, placement: Placement) -> list[Any]:
    """One engine on every `rollout_num_gpus_per_engine` devices of the rollout bundles; not started yet."""
    bundles, size = placement.bundles["rollout"], args.rollout_num_gpus_per_engine
    cluster = placement.cluster
    engines = []
    for number in range(len(bundles) // size):
        mine = bundles[number * size : (number + 1) * size]
        engines.append(
            ray.remote(RolloutEngine)
            .options(
                scheduling_strategy=placement.strategy(mine[0]),
                # The bundles hold the devices; Ray would hide all GPUs but the first bundle's from this process.
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
                num_cpus=0,
            )
            .remote(
                args,
                number,
                cluster.device_kind,
                [bundle.gpu_id for bundle in mine if bundle.gpu_id is not None],
                cluster.single_machine,
            )
        )
    return engines
