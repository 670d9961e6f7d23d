"""A group of training ranks as Ray actors. Every call runs on all ranks; results come back in rank order."""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from miles.backends.sglang.ports import ReservedPort, reserve_port
from miles.config import Args
from miles.ray.driver_folder import driver_folder_env, enter_driver_folder
from miles.ray.rollout.train_data_conversion import Shard
from miles.utils.logging_utils import configure_logger

if TYPE_CHECKING:
    from miles.ray.placement_group import Placement

logger = logging.getLogger(__name__)

Role = Literal["actor", "critic", "sft"]

_OTHERS_FAIL_S = 5.0
"""How long after a rank's error another rank's death may still turn out to be its reason."""


class TrainingRankLost(RuntimeError):
    """A process of a training group died; the group is of no use any more."""


class TrainRank:
    """One rank: a process with one device that holds a `MegatronWorker`."""

    def __init__(self, args: Args, role: Role, rank: int, world_size: int) -> None:
        enter_driver_folder()
        configure_logger(args, source=f"{role}{rank}")
        self._args, self._rank, self._world_size = args, rank, world_size
        self._role: Role = role
        self._reserved: ReservedPort | None = None

    def ping(self) -> None:
        """Answer."""

    def reserve_address(self) -> tuple[str, int]:
        """An address of this host and a port for the rendezvous of a group: nobody else's until it is listened on.

        One port at a time; an earlier one is in use by now, or its group was given up.
        """
        if self._reserved is not None:
            self._reserved.release()
        self._reserved = reserve_port(host="0.0.0.0")
        return ray.util.get_node_ip_address(), self._reserved.port

    def build(self, master_addr: str, master_port: int) -> dict[str, Any]:
        """Join the process group and build the (still empty) worker; return where the rank lies in the layout."""
        from miles.backends.megatron.worker import MegatronWorker

        self._worker = MegatronWorker(
            self._args,
            role=self._role,
            rank=self._rank,
            world_size=self._world_size,
            master_addr=master_addr,
            master_port=master_port,
        )
        return {**self._worker.parallel_info(), "pid": os.getpid()}

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments, **named)

    def call_on_shard(self, method: str, shard: Shard, *arguments: Any) -> Any:
        """Call a method of the worker with the shard's columns as its last argument."""
        return getattr(self._worker, method)(*arguments, shard.load())


class RayTrainGroup:
    """All ranks of one role ("actor", "critic" or "sft").

    The group fails as one: when a rank dies or raises, the pending calls of the others are abandoned, for they would
    wait in a collective for ever.
    """

    def __init__(self, args: Args, *, role: Role, placement: "Placement", **worker_options: Any) -> None:
        self.role = role
        self.args = args.for_role("critic" if role == "critic" else "actor")
        bundles = placement.bundles["critic" if role == "critic" else "actor"]
        self.world_size = len(bundles)
        self._worker_options = worker_options
        remote = ray.remote(TrainRank)
        self._ranks: list[Any] = [
            remote.options(
                scheduling_strategy=placement.strategy(bundle),
                runtime_env={"env_vars": placement.cluster.worker_env() | driver_folder_env()},
                **placement.cluster.device_request(1),
            ).remote(self.args, role, rank, self.world_size)
            for rank, bundle in enumerate(bundles)
        ]
        self.dp_size = 0
        self._dp_ranks: list[int] = []
        self._output_ranks: list[int] = []

    async def init(self) -> list[int | None]:
        """Build models, load checkpoints; the loaded iteration of each rank (0: fresh)."""
        host, port = await self.reserve_address()
        infos = await self._all([rank.build.remote(host, port) for rank in self._ranks])
        self.dp_size = infos[0]["dp_size"]
        self._dp_ranks = [info["dp_rank"] for info in infos]
        self._output_ranks = [rank for rank, info in enumerate(infos) if info["is_output_rank"]]
        self._pids = [info["pid"] for info in infos]
        return await self._call("init", **self._worker_options)

    async def train(self, iteration: int, batch: dict[str, Any]) -> dict[str, Any]:
        """One optimizer step on the value loss.

        Args:
            iteration: number of the step, from 1.
            batch: "data_ref", the shards of `split_train_data_by_dp`; "sample_indices", the rows they hold.
        """
        return self._first(await self._call_on_shard("train_value", batch["data_ref"], iteration))

    async def train_policy(self, iteration: int, shards: Sequence[Shard]) -> dict[str, Any]:
        """One optimizer step on the policy loss; its metrics."""
        return self._first(await self._call_on_shard("train_policy", shards, iteration))

    async def train_sft(self, iteration: int, shards: Sequence[Shard]) -> dict[str, Any]:
        """One optimizer step on the negative log-likelihood of the trainable tokens; its metrics."""
        return self._first(await self._call_on_shard("train_sft", shards, iteration))

    async def evaluate_critic(self, batch: int, data: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Forward only: a report per rank, None where a rank has none."""
        logger.debug("evaluating value batch %d", batch)
        return await self._call_on_shard("evaluate_value", data["data_ref"])

    async def compute_values(self, shards: Sequence[Shard]) -> dict[int, Any]:
        """Values of the response tokens by sample index (float32, response_length each)."""
        return self._merged(await self._call_on_shard("compute_values", shards))

    async def compute_ref_log_probs(self, shards: Sequence[Shard]) -> dict[int, Any]:
        """As `compute_log_probs`, of the reference model that the actor group holds beside its own."""
        return self._merged(await self._call_on_shard("compute_ref_log_probs", shards))

    async def compute_log_probs(self, shards: Sequence[Shard]) -> dict[int, Any]:
        """Log-probabilities of the response tokens by sample index (float32, response_length each)."""
        return self._merged(await self._call_on_shard("compute_log_probs", shards))

    async def save_model(self, iteration: int, force_sync: bool = True) -> str:
        """Save a checkpoint; returns its folder once it is published."""
        return self._first(await self._call("save_model", iteration, force_sync=force_sync))

    async def export_hf(self, path: str) -> None:
        """Write the weights as a Hugging Face folder."""
        await self._call("export_hf", path)

    async def reserve_address(self) -> tuple[str, int]:
        """Address of rank 0's host and a port that is kept for a rendezvous there."""
        return (await self._all([self._ranks[0].reserve_address.remote()]))[0]

    async def call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a worker's method on every rank; its results in rank order."""
        return await self._call(method, *arguments, **named)

    async def raise_if_lost(self) -> None:
        """Raise TrainingRankLost where a rank is dead; ranks that are busy are not waited for."""
        calls = {asyncio.ensure_future(self._all([rank.ping.remote()])) for rank in self._ranks}
        done, pending = await asyncio.wait(calls, timeout=_OTHERS_FAIL_S)
        for call in pending:
            call.cancel()
        for call in done:
            call.result()

    def kill_last_rank(self) -> None:
        """Kill a rank's process outright: a fault that tests on one machine ask for."""
        os.kill(self._pids[-1], signal.SIGKILL)

    def shutdown(self) -> None:
        """Kill the ranks."""
        for rank in self._ranks:
            ray.kill(rank)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        return await self._all([rank.call.remote(method, *arguments, **named) for rank in self._ranks])

    async def _call_on_shard(self, method: str, shards: Sequence[Shard], *arguments: Any) -> list[Any]:
        if len(shards) != self.dp_size:
            raise ValueError(f"{len(shards)} shards for {self.dp_size} data-parallel ranks of the {self.role} group")
        calls = zip(self._ranks, self._dp_ranks, strict=True)
        # A rank gets its own shard only: every reference that a call carries is counted by Ray, one by one.
        return await self._all([rank.call_on_shard.remote(method, shards[dp], *arguments) for rank, dp in calls])

    def _first(self, results: list[Any]) -> Any:
        """The result of the first rank that has one; ranks that have one agree."""
        found = [result for result in results if result is not None]
        assert found, f"no rank of the {self.role} group returned a result"
        return found[0]

    def _merged(self, results: list[dict[int, Any] | None]) -> dict[int, Any]:
        merged: dict[int, Any] = {}
        for rank in self._output_ranks:
            part = results[rank]
            assert part is not None, f"output rank {rank} of the {self.role} group returned nothing"
            assert not merged.keys() & part.keys(), "two ranks returned the same sample"
            merged |= part
        return merged

    async def _all(self, refs: list[Any]) -> list[Any]:
        """Results of a call on all ranks.

        Raises:
            TrainingRankLost: a rank died; the others are left alone, for they may wait for it for ever.
        """
        calls = [asyncio.ensure_future(ref) for ref in refs]
        try:
            return list(await asyncio.gather(*calls))
        except RayActorError as error:
            raise self._lost(error) from None
        except RayTaskError:
            # A rank that waited for one that died may be the first to fail.
            await asyncio.wait(calls, timeout=_OTHERS_FAIL_S)
            for call in calls:
                if call.done() and not call.cancelled() and isinstance(error := call.exception(), RayActorError):
                    raise self._lost(error) from None
            raise
        finally:
            for call in calls:
                call.add_done_callback(look_at)

    def _lost(self, error: RayActorError) -> TrainingRankLost:
        reason = " ".join(str(error).split())
        return TrainingRankLost(f"a rank of the {self.role} group died: {reason[:300]}")


def look_at(call: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not call.cancelled():
        call.exception()
