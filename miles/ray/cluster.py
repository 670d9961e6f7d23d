"""Connect to a Ray cluster, or start one on this machine; know which resource stands for a training device."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.weight_rules import check_tensors
from miles.backends.sglang.ports import reserve_port
from miles.config import Args
from miles.config.args import Entry
from miles.config.groups import flag_of

logger = logging.getLogger(__name__)

CPU_DEVICE = "miles_device"
"""Custom Ray resource that stands for one device on machines without GPUs (`ray start --resources`)."""

_LOCAL_OBJECT_STORE_BYTES = 200 * 1024**2
_ANSWER_S = 5.0
_CLUSTER_ANSWER_S = 30.0

_reaper: subprocess.Popen[bytes] | None = None
"""Outlives this process by seconds and ends what it leaves of a local cluster (see `miles.ray.reaper`)."""


@dataclass(frozen=True)
class Cluster:
    """What the driver knows of the cluster.

    Attributes:
        device_kind: "cuda" or "cpu".
        resource: the Ray resource that one device takes ("GPU" or `CPU_DEVICE`).
        single_machine: all nodes are this machine, so loopback suffices between processes.
    """

    device_kind: str
    resource: str
    single_machine: bool

    def device_request(self, amount: float) -> dict[str, Any]:
        """Options of a Ray actor that takes `amount` of a device and no CPU slot."""
        if self.resource == "GPU":
            return {"num_gpus": amount, "num_cpus": 0}
        return {"resources": {self.resource: amount}, "num_cpus": 0} if amount else {"num_cpus": 0}

    def worker_env(self) -> dict[str, str]:
        """Environment of a training process."""
        env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if self.device_kind == "cpu":
            # Spinning OpenMP threads halve the speed as soon as ranks outnumber cores.
            env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
            if self.single_machine:
                env["GLOO_SOCKET_IFNAME"] = "lo"
        return env


def connect(args: Args, *, devices: dict[str, int]) -> Cluster:
    """Join the cluster that RAY_ADDRESS names, or start one here, and check that it holds the devices asked for.

    Args:
        devices: number of devices by what they are for, such as {"actor": 2, "rollout": 1}.

    Raises:
        ValueError: the cluster is too small, or has no GPU where --device cuda asks for them.
    """
    needed = sum(devices.values())
    if not ray.is_initialized():
        _init(args, address=os.environ.get("RAY_ADDRESS"), needed=needed)
    resources = ray.cluster_resources()
    kind = device_kind(args)
    if kind == "cuda" and not resources.get("GPU"):
        raise ValueError("--device cuda: no node of the Ray cluster has a GPU")
    resource = "GPU" if kind == "cuda" else CPU_DEVICE
    available = int(resources.get(resource, 0))
    if available < needed:
        hint = "" if kind == "cuda" else f"; start nodes with ray start --resources='{{\"{CPU_DEVICE}\": N}}'"
        raise ValueError(f"{needed} devices are needed ({in_words(devices)}), the Ray cluster has {available}{hint}")
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    logger.info("Ray cluster: %d node(s), %d of %d devices (%s) taken", len(nodes), needed, available, kind)
    return Cluster(device_kind=kind, resource=resource, single_machine=len(nodes) == 1)


def in_words(devices: dict[str, int]) -> str:
    """What devices are for, such as "2 actor + 1 rollout"."""
    return " + ".join(f"{count} {purpose}" for purpose, count in devices.items())


def device_kind(args: Args) -> str:
    """The kind, "cuda" or "cpu", that `args.device` stands for in the cluster this process is connected to."""
    if args.device != "auto":
        return args.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"


def check_before_ray_starts(args: Args, *, entry: Entry) -> None:
    """Refuse what cannot work, before Ray spends a minute on it.

    Raises:
        ValueError: the model's config.json and weight files do not fit each other or the backend; RAY_ADDRESS is no
            address of a cluster, or nothing listens there; or no cluster is named, and this machine has no GPU for
            `--device cuda`, or a port of `--sglang-port-base` is taken.
    """
    _check_models(args, entry=entry)
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        if args.device == "cuda" and NvidiaGPUAcceleratorManager.get_current_node_num_accelerators() == 0:
            raise ValueError("--device cuda: this machine has no GPU, and RAY_ADDRESS names no cluster that has some")
        if entry == "train" and args.load_rollouts is None:
            _check_engine_ports(args)
        return
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ValueError(
            f"RAY_ADDRESS {address!r}: expected HOST:PORT of a cluster's head, or auto for the one on this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"RAY_ADDRESS {address}: no Ray cluster answers there: {error}") from None


def _check_models(args: Args, *, entry: Entry) -> None:
    assert args.hf_checkpoint is not None
    field, folder = "hf_checkpoint", args.hf_checkpoint
    try:
        architecture = Architecture.from_hf(folder)
        # A critic leaves the language-model head out.
        check_tensors(folder, architecture, output_layer=entry == "train")
        if entry == "train" and args.ref_load is not None and (Path(args.ref_load) / "config.json").is_file():
            field, folder = "ref_load", args.ref_load
            check_tensors(folder, architecture, output_layer=True)
    except ValueError as error:
        raise ValueError(f"{flag_of(field)}: {error}") from None


def _check_engine_ports(args: Args) -> None:
    if args.sglang_port_base is None:
        return
    for engine in range(args.rollout_num_gpus // args.rollout_num_gpus_per_engine):
        try:
            reserve_port(args.sglang_port_base + engine).release()
        except ValueError as error:
            raise ValueError(f"--sglang-port-base {args.sglang_port_base}: {error}") from None


def _init(args: Args, *, address: str | None, needed: int) -> None:
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(args, address=address, needed=needed)
    except SystemExit:
        # Ray's own handler of SIGTERM, which it puts there while it starts: ours decides how the program ends.
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)


def _start_ray(args: Args, *, address: str | None, needed: int) -> None:
    if address:
        _meet(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConnectionError(
                f"RAY_ADDRESS {address}: {error}; RAY_AUTH_MODE and the token must be the cluster's "
                f"(mode here: {os.environ.get('RAY_AUTH_MODE', 'disabled')})"
            ) from None
        return
    local: dict[str, Any] = {}
    if args.device != "cuda":
        local = {"resources": {CPU_DEVICE: needed}, "object_store_memory": _LOCAL_OBJECT_STORE_BYTES}
    if args.device == "cpu":
        local["num_gpus"] = 0
    global _reaper
    # First, for a driver may be killed while Ray starts.
    _reaper = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("reaper.py")), str(os.getpid())], stdin=subprocess.PIPE
    )
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **local)
    except OSError as error:
        if "AF_UNIX path length" not in str(error):
            raise
        raise OSError(f"{error}; Ray's sockets lie below TMPDIR: name a shorter folder in RAY_TMPDIR") from None


def _meet(address: str) -> None:
    """Turn token authentication on for a cluster that wants it, and off nowhere: a cluster without it breaks with it.

    `ray start` asks for the machine's token where there is one; ray.init shows it to no address given by name unless
    RAY_AUTH_MODE says so.

    Raises:
        ConnectionError: what listens at `address` says nothing.
    """
    if address == "auto":
        return
    failed: list[Exception] = []

    def ask() -> None:
        try:
            GcsClient(address=address)
        except Exception as error:
            failed.append(error)

    # What listens there without being a cluster is asked for ever, and no signal gets through.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_CLUSTER_ANSWER_S)
    if asking.is_alive():
        raise ConnectionError(f"RAY_ADDRESS {address}: what listens there did not answer as a Ray cluster does")
    if failed and isinstance(failed[0], AuthenticationError) and "RAY_AUTH_MODE" not in os.environ:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    elif failed:
        # ray.init will fail as well, and say more.
        logger.debug("no answer from %s: %s", address, failed[0])


def disconnect() -> None:
    """Leave the cluster; a cluster that `connect` started ends with all its processes."""
    global _reaper
    if ray.is_initialized():
        ray.shutdown()
    if _reaper is not None:
        assert _reaper.stdin is not None
        _reaper.stdin.close()
        _reaper = None
