"""What the ranks of the tests do; every function is a LocalGroup task."""

from typing import Any, cast

import numpy as np

from miles.backends.megatron.worker import MegatronWorker
from miles.config import Args


class Killed(BaseException):
    """Takes the place of a SIGKILL: no handler of the code under test may catch it."""


def make_shard(
    batch: dict[str, Any], *, dp_rank: int, dp_size: int, micro_batch_size: int, drop: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Contiguous rows of this data-parallel rank, cut into micro-batches, with the counts of the whole batch."""
    count = len(batch["tokens"]) // dp_size
    rows = range(dp_rank * count, (dp_rank + 1) * count)
    shard: dict[str, Any] = {name: [column[i] for i in rows] for name, column in batch.items() if name not in drop}
    shard["micro_batches"] = [
        list(range(start, min(start + micro_batch_size, count))) for start in range(0, count, micro_batch_size)
    ]
    shard["global_counts"] = {
        "samples": len(batch["tokens"]),
        "sequences": sum(any(mask) for mask in batch["loss_masks"]),
        "tokens": int(sum(map(sum, batch["loss_masks"]))),
    }
    return shard


def make_worker(rank: int, world_size: int, port: int, *, role: str, **settings: Any) -> MegatronWorker:
    if role == "critic":
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            settings.setdefault(f"critic_{name}", settings.get(name, 1))
    settings.setdefault("device", "cpu")
    return MegatronWorker(Args.build(**settings), role, rank, world_size, "127.0.0.1", port)  # type: ignore[arg-type]


def weights(worker: MegatronWorker) -> dict[str, np.ndarray]:
    """All weights in Hugging Face names on rank 0, and the value head on the last stage's first rank."""
    named = {
        name: tensor.float().cpu().numpy().copy()
        for bucket in worker._buckets
        for name, tensor in worker._gather(bucket)
    }
    head = getattr(worker.model, "output_layer", None)
    if worker.role == "critic" and head is not None and worker.parallel.tp_rank == 0:
        named["head.weight"] = head.weight.detach().cpu().numpy().copy()
        named["head.bias"] = head.bias.detach().cpu().numpy().copy()
    return named


def logits(rank: int, world_size: int, port: int, *, rows: list[list[int]], settings: dict[str, Any]) -> Any:
    """{"padded": {row: logits}, "packed": ...} on output ranks."""
    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init(forward_only=True)
    shard = {
        "tokens": rows,
        "response_lengths": [len(row) - 1 for row in rows],
        "loss_masks": [[1] * (len(row) - 1) for row in rows],
        "sample_indices": list(range(len(rows))),
        "micro_batches": [list(range(0, len(rows), 2)), list(range(1, len(rows), 2)), []],
    }
    found = {}
    for name, packed in (("padded", False), ("packed", True)):
        worker._reader.packed = packed
        found[name] = worker.compute_logits(shard)
    worker.close()
    return found if found["padded"] is not None else None


def logits_made(
    rank: int, world_size: int, port: int, *, packed: bool, batch: dict[str, Any], settings: dict[str, Any]
) -> int:
    """Tensors of the size of all logits that a policy's training step on one micro-batch of the batch allocates."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from miles.backends.megatron import vocab_parallel

    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init()
    assert worker._train_stepper is not None
    worker._train_stepper.packed = packed
    rows = len(batch["tokens"])
    shard = make_shard(batch, dp_rank=0, dp_size=1, micro_batch_size=rows)
    lengths = [len(tokens) for tokens in batch["tokens"]]
    positions = sum(lengths) if packed else rows * max(lengths)
    columns = worker.architecture.padded_vocab_size(1)
    made = 0

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal made
            found = func(*args, **(kwargs or {}))
            known = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
            }
            for tensor in tree_leaves(found):
                if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().data_ptr() in known:
                    continue
                made += tensor.dim() > 1 and tensor.shape[-1] == columns and tensor.numel() == positions * columns
            return found

    own = vocab_parallel._CHUNK_ELEMENTS["cpu"]
    vocab_parallel._CHUNK_ELEMENTS["cpu"] = 8 * columns
    try:
        with Allocations():
            worker.train_policy(1, shard)
    finally:
        vocab_parallel._CHUNK_ELEMENTS["cpu"] = own
    worker.close()
    return made


def export(rank: int, world_size: int, port: int, *, target: str, settings: dict[str, Any]) -> Any:
    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init(forward_only=True)
    result = worker.export_hf(target)
    worker.close()
    return result


def train(
    rank: int,
    world_size: int,
    port: int,
    *,
    role: str,
    objective: str,
    batch: dict[str, Any],
    settings: dict[str, Any],
    steps: int = 1,
    micro_batch_size: int = 2,
    micro_batches: list[list[int]] | None = None,
    drop: tuple[str, ...] = (),
    save_at: tuple[int, ...] = (),
    weights_only: bool = False,
    packed: bool = True,
) -> dict[str, Any]:
    """Train, and report everything that can be compared: metrics per step, weights, and what the model reads then."""
    worker = make_worker(rank, world_size, port, role=role, **settings)
    start = worker.init(load_weights_only=weights_only)
    assert worker._train_stepper is not None
    worker._train_stepper.packed = worker._reader.packed = packed
    info = worker.parallel_info()
    shard = make_shard(
        batch, dp_rank=info["dp_rank"], dp_size=info["dp_size"], micro_batch_size=micro_batch_size, drop=drop
    )
    if micro_batches is not None:
        shard["micro_batches"] = micro_batches
    metrics = []
    for iteration in range(start + 1, start + 1 + steps):
        metrics.append(getattr(worker, f"train_{objective}")(iteration, shard))
        if iteration in save_at:
            worker.save_model(iteration)
    read = worker.compute_values(shard) if role == "critic" else worker.compute_log_probs(shard)
    result = {"start": start, "metrics": metrics, "weights": weights(worker), "read": read}
    if worker._reference is not None:
        result["reference"] = worker.compute_ref_log_probs(shard)
    worker.close()
    return result


def gather_gradients(worker: MegatronWorker) -> dict[str, np.ndarray]:
    """The gradient of the whole batch in Hugging Face names, as `weights` names the weights.

    It takes the parameters' place while they are gathered. A distributed optimizer leaves every copy of the model with
    its own part of the sum, so the parts are brought together first.
    """
    import torch.distributed as dist

    if worker.args.use_distributed_optimizer:
        for buffer in cast(Any, worker._wrapped).buffers:
            group, count = buffer.data_parallel_group, buffer.data_parallel_world_size
            for bucket in buffer.buckets:
                parts = [part.clone() for part in bucket.grad_data.chunk(count)]
                dist.all_gather(list(bucket.grad_data.chunk(count)), parts[group.rank()], group=group)
    params = dict(worker.model.named_parameters())
    values = {name: param.data for name, param in params.items()}
    try:
        for param in params.values():
            frozen = not param.requires_grad
            param.data = param.data.new_zeros(param.shape) if frozen else vars(param)["main_grad"]
        return weights(worker)
    finally:
        for name, param in params.items():
            param.data = values[name]


def gradients(
    rank: int, world_size: int, port: int, *, role: str, settings: dict[str, Any], runs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Gradient of each run's loss at the model's initial weights, on one layout, by name of the run.

    A run says its `objective` ("policy", "value", "likelihood"), its `shards`, one per data-parallel rank, whether
    they are `packed`, and `changes` of settings that only concern the objective. With `step` an optimizer step
    follows (give such runs last), and "gradient" holds the weights that it leads to.
    """
    worker = make_worker(rank, world_size, port, role=role, **settings)
    worker.init()
    assert worker._train_stepper is not None
    own = worker.args
    results = {}
    for name, run in runs.items():
        worker.args = own.replace(source="code", **run.get("changes", {}))
        worker._train_stepper.packed = run["packed"]
        shard = run["shards"][worker.parallel.dp_rank]
        if run.get("step"):
            metrics = getattr(worker, f"train_{run['objective']}")(1, shard)
            results[name] = {"metrics": metrics, "gradient": weights(worker)}
            continue
        if run["objective"] == "policy":
            objective = worker._policy_objective(shard)
        elif run["objective"] == "value":
            objective = worker._value_objective(clipped="values" in shard)
        else:
            objective = worker._likelihood_objective()
        try:
            metrics = worker._accumulate(1, shard, objective)
        except FloatingPointError as error:
            results[name] = {"error": str(error)}
        else:
            results[name] = {"metrics": metrics, "gradient": gather_gradients(worker)}
    worker.close()
    return results


def load(rank: int, world_size: int, port: int, *, role: str, settings: dict[str, Any], forward_only: bool) -> Any:
    """Loaded iteration and weights, or the message of the ValueError that refused."""
    worker = make_worker(rank, world_size, port, role=role, **settings)
    try:
        iteration = worker.init(forward_only=forward_only)
        return {"iteration": iteration, "weights": weights(worker), "error": None}
    except ValueError as error:
        return {"iteration": None, "weights": None, "error": str(error)}
    finally:
        worker.close()


def killed_save(
    rank: int, world_size: int, port: int, *, at: str, batch: dict[str, Any], settings: dict[str, Any]
) -> list[str]:
    """Save iteration 1, train on, and die at `at` while iteration 2 is being saved."""
    from pathlib import Path

    from miles.backends.megatron import checkpoint

    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init()
    shard = make_shard(batch, dp_rank=0, dp_size=1, micro_batch_size=4)
    worker.train_sft(1, shard)
    worker.save_model(1)
    worker.train_sft(2, shard)
    original = getattr(checkpoint, at)

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed(at)

    setattr(checkpoint, at, die)
    try:
        worker.save_model(2)
    except Killed:
        pass
    else:
        raise AssertionError(f"{at} was not reached")
    finally:
        setattr(checkpoint, at, original)
        worker.close()
    return sorted(path.name for path in Path(settings["save"]).iterdir())


def evaluate(
    rank: int, world_size: int, port: int, *, batch: dict[str, Any], settings: dict[str, Any], order: list[int]
) -> dict[str, Any] | None:
    """This rank's report of a fresh critic on its share of the rows, taken in `order`; None where it has none."""
    worker = make_worker(rank, world_size, port, role="critic", **settings)
    worker.init(forward_only=True)
    info = worker.parallel_info()
    rows = {name: [column[i] for i in order] for name, column in batch.items()}
    shard = make_shard(rows, dp_rank=info["dp_rank"], dp_size=info["dp_size"], micro_batch_size=2)
    report = worker.evaluate_value(shard)
    worker.close()
    return report


def refused_construction(rank: int, world_size: int, port: int, *, role: str, settings: dict[str, Any]) -> str:
    try:
        worker = make_worker(rank, world_size, port, role=role, **settings)
    except ValueError as error:
        return str(error)
    worker.close()
    return ""


def train_to_host(rank: int, world_size: int, port: int, **arguments: Any) -> dict[str, Any]:
    """`train` with exact fp32 products; weights come back as NumPy arrays wherever they were computed."""
    import torch

    torch.set_float32_matmul_precision("highest")
    return train(rank, world_size, port, **arguments)


def speed(
    rank: int,
    world_size: int,
    port: int,
    *,
    settings: dict[str, Any],
    rows: int,
    length: int,
    micro_batch_size: int,
    vocab_size: int,
    steps: int = 3,
) -> dict[str, float]:
    """Tokens per second of full training steps on random rows, after one step to warm up."""
    import time

    draw = np.random.default_rng(0)
    batch = {
        "tokens": draw.integers(0, vocab_size, (rows, length)).tolist(),
        "response_lengths": [length - 1] * rows,
        "loss_masks": [[1] * (length - 1)] * rows,
        "sample_indices": list(range(rows)),
    }
    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init()
    shard = make_shard(batch, dp_rank=0, dp_size=1, micro_batch_size=micro_batch_size)
    worker.train_sft(1, shard)
    worker.device.synchronize()
    started = time.monotonic()
    for step in range(steps):
        worker.train_sft(2 + step, shard)
    worker.device.synchronize()
    seconds = (time.monotonic() - started) / steps
    parameters = sum(param.numel() for param in worker.model.parameters())
    worker.close()
    return {"parameters": parameters, "seconds_per_step": seconds, "tokens_per_s": rows * length / seconds}


def failing_save(
    rank: int, world_size: int, port: int, *, batch: dict[str, Any], settings: dict[str, Any], largest_file: int
) -> str:
    """Save iteration 1, then fail to save iteration 2 because no file of the last rank may grow past
    `largest_file`.
    """
    import resource

    worker = make_worker(rank, world_size, port, role="actor", **settings)
    worker.init()
    info = worker.parallel_info()
    shard = make_shard(batch, dp_rank=info["dp_rank"], dp_size=info["dp_size"], micro_batch_size=4)
    worker.train_sft(1, shard)
    worker.save_model(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        worker.save_model(2)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        worker.close()
    return ""


def send_weights(
    rank: int, world_size: int, port: int, *, settings: dict[str, Any], group_port: int, max_bytes: int
) -> Any:
    """Rank 0 is a whole training group and sends its weights; rank 1 receives the bytes as an engine would.

    Rank 0 returns the buckets it announced, rank 1 the bytes of each.
    """
    import torch

    from miles.backends.megatron import worker as worker_module
    from miles.backends.megatron.architecture import Architecture
    from miles.backends.megatron.weight_rules import build_rules
    from miles.backends.megatron.weights import build_buckets
    from miles.backends.weight_group import join_weight_group, leave_weight_group

    address = f"tcp://127.0.0.1:{group_port}"
    if rank == 0:
        worker_module._BUCKET_BYTES = max_bytes
        worker = make_worker(0, 1, port, role="actor", **settings)
        worker.init(forward_only=True)
        worker.join_weight_group(address, world_size, 0, "weights")
        buckets = worker.weight_buckets()
        for index in range(len(buckets)):
            worker.broadcast_bucket(index)
        worker.close()
        return buckets
    rules = build_rules(Architecture.from_hf(settings["hf_checkpoint"]), pipeline_size=1)
    sizes = [
        sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in bucket.metadata())
        for bucket in build_buckets(rules, dtype=torch.float32, max_bytes=max_bytes)
    ]
    group = join_weight_group(address, world_size, 1, "weights")
    received = []
    for size in sizes:
        flat = torch.empty(size, dtype=torch.uint8)
        group.broadcast(flat, 0).wait()
        received.append(flat.numpy().tobytes())
    leave_weight_group(group)
    return received


def split_log_probs(
    rank: int, world_size: int, port: int, *, logits: np.ndarray, targets: list[int], vocab_size: int, **options: Any
) -> dict[str, np.ndarray]:
    """This rank's columns of the gradient of weighted log-probabilities and entropies, and both."""
    import torch
    import torch.distributed as dist

    from miles.backends.megatron.vocab_parallel import token_log_probs

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        columns = logits.shape[1] // world_size
        leaf = torch.tensor(logits[:, rank * columns : (rank + 1) * columns]).requires_grad_()
        log_probs, entropy = token_log_probs(
            leaf * 1.0,
            torch.tensor(targets),
            vocab_size=vocab_size,
            rank=rank,
            group=dist.group.WORLD,
            with_entropy=True,
            reuse_logits=True,
            **options,
        )
        weight = torch.arange(1, len(targets) + 1)
        (log_probs * weight - 0.5 * entropy * weight).sum().backward()
        assert leaf.grad is not None
        return {
            "log_probs": log_probs.detach().numpy(),
            "entropy": entropy.detach().numpy(),
            "gradient": leaf.grad.numpy(),
        }
    finally:
        dist.destroy_process_group()
