"""Which device does what: one placement group, one bundle per device, sorted by (host, device)."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.config import Args
from miles.contracts.chain import iteration_folder
from miles.contracts.value_schema import contract_path
from miles.ray.actor_group import RayTrainGroup
from miles.ray.cluster import Cluster, connect, in_words
from miles.value_pretraining import load_value_pretrain_contract

logger = logging.getLogger(__name__)

_POLL_S = 10.0


@dataclass(frozen=True)
class Bundle:
    """One device of the placement group: where it lies and, on a GPU machine, its index there."""

    index: int
    node_id: str
    host: str
    gpu_id: int | None


@dataclass(frozen=True)
class Placement:
    """Bundles by purpose ("actor", "critic", "rollout"), in rank order."""

    cluster: Cluster
    group: PlacementGroup
    bundles: dict[str, list[Bundle]]

    def strategy(self, bundle: Bundle) -> PlacementGroupSchedulingStrategy:
        """Scheduling strategy that puts an actor onto a bundle."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle.index)


def create_placement(args: Args, devices: dict[str, int]) -> Placement:
    """Reserve `devices` (count by purpose) and hand them out in the order given, hosts kept together.

    Raises:
        ValueError: the cluster does not have that many devices.
        RuntimeError: others hold them for longer than `placement_timeout_s`.
        ConnectionError: the cluster ended meanwhile.
    """
    cluster = connect(args, devices=devices)
    total = sum(devices.values())
    group = placement_group([{cluster.resource: 1} for _ in range(total)], strategy="PACK")
    limit_s = math.inf if args.placement_timeout_s is None else args.placement_timeout_s
    waited_since = time.monotonic()
    while not _made(group, within_s=min(_POLL_S, limit_s), waiting_for=f"{total} devices ({in_words(devices)})"):
        waited_s = time.monotonic() - waited_since
        free = int(ray.available_resources().get(cluster.resource, 0))
        if waited_s >= limit_s:
            # Left as it is it would take the devices as soon as they are free, for nobody.
            remove_placement_group(group)
            raise RuntimeError(
                f"{total} devices ({in_words(devices)}) were not to be had within --placement-timeout-s {limit_s:g}: "
                f"{free} of the Ray cluster's are free, other jobs hold the rest"
            )
        logger.warning("waiting for %d devices since %.0f s; free now: %d", total, waited_s, free)
    bundles = _sorted_bundles(cluster, group, total)
    handed_out: dict[str, list[Bundle]] = {}
    start = 0
    for purpose, count in devices.items():
        handed_out[purpose] = bundles[start : start + count]
        start += count
    return Placement(cluster=cluster, group=group, bundles=handed_out)


def _made(group: PlacementGroup, *, within_s: float, waiting_for: str) -> bool:
    try:
        return group.wait(within_s)
    except Exception as error:
        # Ray has no class of its own for a group that a cluster's end took along.
        text = " ".join(str(error).split())
        raise ConnectionError(f"the Ray cluster ended while {waiting_for} were waited for: {text}") from error


def create_value_pretraining_group(args: Args) -> RayTrainGroup:
    """Reserve the critic's devices and make its group: no actor model, no rollout engine, no optimizer to evaluate.

    Where `--critic-load` holds a contract, the checkpoint it speaks of is loaded: a later one without a contract is
    what a killed run left between saving and publishing.
    """
    placement = create_placement(args, {"critic": args.world_size("critic")})
    args = one_update_a_step(contracted_critic(args))
    return RayTrainGroup(args, role="critic", placement=placement, forward_only=args.value_pretrain_eval_only)


def one_update_a_step(args: Args) -> Args:
    """Settings whose schedule has one update for each step of the batch plan, whatever a file says that serves online
    training too.
    """
    return args.replace(source="value pretraining", num_critic_epochs=1, num_steps_per_rollout=1)


def contracted_critic(args: Args) -> Args:
    """Settings that load the very checkpoint which the contract in `critic_load`, if any, speaks of."""
    if args.critic_load is None or not contract_path(args.critic_load).exists():
        return args
    steps = load_value_pretrain_contract(args.critic_load)["completed_steps"]
    return args.replace(source="contract", critic_load=str(iteration_folder(args.critic_load, steps)))


def _sorted_bundles(cluster: Cluster, group: PlacementGroup, total: int) -> list[Bundle]:
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    gpu_ids: Sequence[int | None] = [None] * total
    if cluster.device_kind == "cuda":
        # Only a process inside a bundle can see which GPU the bundle stands for.
        probes = [
            _gpu_id.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(total)
        ]
        gpu_ids = ray.get(probes)
    bundles = [
        Bundle(index=index, node_id=nodes[index], host=hosts[nodes[index]], gpu_id=gpu_ids[index])
        for index in range(total)
    ]
    return sorted(bundles, key=lambda bundle: (_host_order(bundle.host), bundle.gpu_id or 0, bundle.index))


def _host_order(host: str) -> tuple[int, tuple[int, ...], str]:
    """Numeric order for IPv4 addresses, names after them."""
    parts = host.split(".")
    if len(parts) == 4 and all(part.isdigit() for part in parts):
        return 0, tuple(int(part) for part in parts), host
    return 1, (), host


@ray.remote(num_gpus=1, num_cpus=0)
def _gpu_id() -> int:
    return int(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])
