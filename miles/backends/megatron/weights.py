"""Our own mapping between Hugging Face's weights and Megatron's, both ways, for Llama, Qwen2 and Qwen3 dense decoders.

Megatron keeps query, key and value of one group of heads side by side (q..q k v | q..q k v | ...), gate and up
projections in one matrix (per tensor-parallel rank: its rows of gate, then its rows of up), and pads the vocabulary. A
`Rule` says this of one Megatron parameter; everything here walks the list of rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.hf_files import HFWeights
from miles.backends.megatron.parallel import ParallelState
from miles.backends.megatron.weight_rules import Rule, build_rules, check_tensors

TensorInfo = tuple[str, torch.dtype, tuple[int, ...]]


def to_shard(
    rule: Rule, tensors: list[torch.Tensor], *, architecture: Architecture, rank: int, size: int
) -> torch.Tensor:
    """This tensor-parallel rank's part of a Megatron parameter, from whole Hugging Face tensors."""
    if rule.kind == "copy":
        return tensors[0]
    if rule.kind == "columns":
        return tensors[0].chunk(size, dim=1)[rank]
    if rule.kind == "gate_up":
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
    if rule.kind == "vocab":
        rows = architecture.padded_vocab_size(size) // size
        part = tensors[0][rank * rows : (rank + 1) * rows]
        if part.shape[0] == rows:
            return part
        padded = part.new_zeros(rows, *part.shape[1:])
        padded[: part.shape[0]] = part
        return padded
    groups = architecture.num_query_groups
    grouped = [tensor.unflatten(0, (groups, -1)).chunk(size)[rank] for tensor in tensors]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def from_shards(rule: Rule, shards: list[torch.Tensor], *, architecture: Architecture) -> list[torch.Tensor]:
    """Whole Hugging Face tensors from the parts that the tensor-parallel ranks hold, the inverse of `to_shard`."""
    if rule.kind == "copy":
        return [shards[0]]
    if rule.kind == "columns":
        return [torch.cat(shards, dim=1)]
    if rule.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]
    if rule.kind == "vocab":
        return [torch.cat(shards)[: architecture.vocab_size]]
    grouped = torch.cat(shards).unflatten(0, (architecture.num_query_groups, -1))
    queries = architecture.num_attention_heads // architecture.num_query_groups * architecture.head_dim
    parts = grouped.split([queries, architecture.head_dim, architecture.head_dim], dim=1)
    return [part.flatten(0, 1) for part in parts]


@torch.no_grad()
def load_hf_weights(
    model: torch.nn.Module,
    folder: str,
    *,
    architecture: Architecture,
    parallel: ParallelState,
    fused_norms: bool,
    critic: bool = False,
) -> None:
    """Fill this rank's model from a Hugging Face folder, one tensor at a time, strictly.

    Every parameter is filled but a critic's value head, and every tensor of the folder has a place (a critic leaves
    the language-model head out).

    Args:
        architecture: As the folder's config.json says it (tied or not).

    Raises:
        ValueError: Folder or file missing, truncated or damaged; a tensor missing, unknown, or of another shape.
    """
    check_tensors(folder, architecture, output_layer=not critic)
    rules = build_rules(architecture, pipeline_size=parallel.pp_size, fused_norms=fused_norms, output_layer=not critic)
    params = dict(model.named_parameters())
    unfilled = set(params)
    if critic:
        unfilled -= {"output_layer.weight", "output_layer.bias"}
    with HFWeights(folder) as weights:
        for rule in rules:
            if rule.stage != parallel.pp_rank:
                continue
            tensors = [weights.read(name, shape) for name, shape in zip(rule.hf, rule.shapes, strict=True)]
            shard = to_shard(rule, tensors, architecture=architecture, rank=parallel.tp_rank, size=parallel.tp_size)
            assert params[rule.megatron].shape == shard.shape, (rule.megatron, shard.shape)
            params[rule.megatron].copy_(shard)
            unfilled.discard(rule.megatron)
        if "output_layer.weight" in unfilled and architecture.tied_embeddings:
            # With several pipeline stages the last one keeps its own copy of the tied embedding.
            rule = rules[0]
            shard = to_shard(
                rule,
                [weights.read(rule.hf[0], rule.shapes[0])],
                architecture=architecture,
                rank=parallel.tp_rank,
                size=parallel.tp_size,
            )
            params["output_layer.weight"].copy_(shard)
            unfilled.discard("output_layer.weight")
    assert not unfilled, f"parameters without a weight: {sorted(unfilled)}"


@dataclass(frozen=True)
class Bucket:
    """Consecutive rules whose Hugging Face tensors travel together."""

    rules: tuple[Rule, ...]
    dtype: torch.dtype

    def metadata(self) -> list[TensorInfo]:
        """(name, dtype, shape) of each tensor, in the order it travels."""
        return [
            (name, self.dtype, shape) for rule in self.rules for name, shape in zip(rule.hf, rule.shapes, strict=True)
        ]


def build_buckets(rules: list[Rule], *, dtype: torch.dtype, max_bytes: int) -> list[Bucket]:
    """Cut the rules, in order, into buckets of at most `max_bytes` (a larger parameter is a bucket by itself)."""
    buckets: list[list[Rule]] = []
    room = 0
    for rule in rules:
        size = sum(torch.Size(shape).numel() for shape in rule.shapes) * dtype.itemsize
        if not buckets or size > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(rule)
        room -= size
    return [Bucket(tuple(rules), dtype) for rules in buckets]


@torch.no_grad()
def gather_bucket(
    model: torch.nn.Module, bucket: Bucket, *, architecture: Architecture, parallel: ParallelState
) -> Iterator[tuple[str, torch.Tensor]]:
    """Bring a bucket's weights together on global rank 0 as whole Hugging Face tensors; every rank must iterate.

    Tensor-parallel parts are gathered on the stage that owns them, in the first copy of the model; the stage's
    first rank sends the whole tensors to rank 0.

    Yields:
        (name, tensor) on rank 0 in the order of `bucket.metadata()`; nothing on other ranks.
    """
    if parallel.replica_rank != 0:
        return
    params = dict(model.named_parameters())
    for rule in bucket.rules:
        tensors: list[torch.Tensor] = []
        if rule.stage == parallel.pp_rank:
            local = params[rule.megatron].detach()
            shards = [local]
            if parallel.tp_size > 1 and rule.kind != "copy":
                shards = [torch.empty_like(local) for _ in range(parallel.tp_size)]
                dist.all_gather(shards, local.contiguous(), group=parallel.tp_group)
            if parallel.tp_rank == 0:
                tensors = [tensor.contiguous() for tensor in from_shards(rule, shards, architecture=architecture)]
        if rule.stage != 0 and parallel.tp_rank == 0:
            if parallel.pp_rank == rule.stage:
                for tensor in tensors:
                    dist.send(tensor, dst=0, group=parallel.pp_group)
            elif parallel.pp_rank == 0:
                source = dist.get_global_rank(parallel.pp_group, rule.stage)
                device = next(iter(params.values())).device
                tensors = [torch.empty(shape, dtype=bucket.dtype, device=device) for shape in rule.shapes]
                for tensor in tensors:
                    dist.recv(tensor, src=source, group=parallel.pp_group)
        if parallel.rank == 0:
            yield from zip(rule.hf, tensors, strict=True)
