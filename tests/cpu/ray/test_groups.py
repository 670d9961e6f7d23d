"""Placement and training groups on a real Ray cluster, with more devices than this machine has cores."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from miles.config import Args
from miles.ray.actor_group import RayTrainGroup, TrainingRankLost
from miles.ray.cluster import CPU_DEVICE, connect, disconnect
from miles.ray.placement_group import create_placement
from miles.ray.rollout.train_data_conversion import build_shards, split_train_data_by_dp


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        resources={CPU_DEVICE: 8},
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 1024**2,
    )
    yield
    disconnect()


def make_args(model: Path, **more: Any) -> Args:
    settings: dict[str, Any] = {"hf_checkpoint": str(model), "device": "cpu", "micro_batch_size": 2, "lr": 1e-3}
    return Args.build(**(settings | more))


def make_batch(rows: int) -> dict[str, list]:
    """Rows of different lengths; row i has the sample index 100 + i."""
    generator = np.random.default_rng(0)
    lengths = [3 + number % 4 for number in range(rows)]
    return {
        "tokens": [generator.integers(3, 60, size=length).tolist() for length in lengths],
        "response_lengths": [length - 2 for length in lengths],
        "loss_masks": [[1] * (length - 2) for length in lengths],
        "sample_indices": [100 + number for number in range(rows)],
    }


def test_placement_every_purpose_gets_its_own_devices(cluster: None, tiny_hf_model: Path) -> None:
    placement = create_placement(make_args(tiny_hf_model), {"actor": 3, "critic": 2, "rollout": 1})
    indices = [bundle.index for bundles in placement.bundles.values() for bundle in bundles]
    assert {purpose: len(bundles) for purpose, bundles in placement.bundles.items()} == {
        "actor": 3,
        "critic": 2,
        "rollout": 1,
    }
    assert sorted(indices) == list(range(6))
    ray.util.remove_placement_group(placement.group)


def test_connect_cluster_too_small_refused_with_counts(cluster: None, tiny_hf_model: Path) -> None:
    with pytest.raises(ValueError, match=r"9 devices are needed \(6 actor \+ 3 rollout\), the Ray cluster has 8"):
        connect(make_args(tiny_hf_model), devices={"actor": 6, "rollout": 3})


def test_connect_cuda_on_a_cluster_without_gpu_refused(cluster: None, tiny_hf_model: Path) -> None:
    with pytest.raises(ValueError, match="--device cuda: no node"):
        connect(make_args(tiny_hf_model, device="cuda"), devices={"actor": 1})


def test_log_probs_tp2_dp2_equal_transformers_and_a_killed_rank_is_told(cluster: None, tiny_hf_model: Path) -> None:
    """Through placement, shards in the object store, four ranks and the merge by sample index."""
    import torch
    from transformers import AutoModelForCausalLM

    batch = make_batch(8)
    args = make_args(tiny_hf_model, tensor_model_parallel_size=2, actor_num_gpus_per_node=4)

    async def through_ranks() -> tuple[dict[int, Any], int]:
        placement = create_placement(args, {"actor": 4})
        group = RayTrainGroup(args, role="actor", placement=placement)
        loaded = await group.init()
        assert loaded == [0, 0, 0, 0]
        shards = split_train_data_by_dp(args, batch, dp_size=group.dp_size)
        result = await group.compute_log_probs(shards)
        with pytest.raises(ValueError, match="1 shards for 2 data-parallel ranks"):
            await group.compute_log_probs(shards[:1])
        # Its tensor-parallel peer would wait for it in a collective.
        group.kill_last_rank()
        with pytest.raises(TrainingRankLost, match="a rank of the actor group died"):
            await asyncio.wait_for(group.compute_log_probs(shards), 60.0)
        group.shutdown()
        ray.util.remove_placement_group(placement.group)
        return result, group.dp_size

    ours, dp_size = asyncio.run(through_ranks())
    assert dp_size == 2
    model = AutoModelForCausalLM.from_pretrained(tiny_hf_model, dtype=torch.float32)
    for tokens, length, index in zip(batch["tokens"], batch["response_lengths"], batch["sample_indices"], strict=True):
        with torch.no_grad():
            log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        start = len(tokens) - length
        expected = [log_probs[place - 1, tokens[place]].item() for place in range(start, len(tokens))]
        np.testing.assert_allclose(ours[index], expected, atol=1e-5)


def test_rank_that_raises_fails_the_group_with_its_reason(
    cluster: None, tiny_hf_model: Path, make_hf_model: Callable[..., Path]
) -> None:
    args = make_args(tiny_hf_model, load=str(tiny_hf_model))

    async def start() -> None:
        placement = create_placement(args, {"actor": 1})
        try:
            await RayTrainGroup(args, role="actor", placement=placement).init()
        finally:
            ray.util.remove_placement_group(placement.group)

    with pytest.raises(ValueError, match="holds no checkpoint"):
        asyncio.run(start())


@pytest.mark.parametrize("dynamic", [False, True])
def test_shards_hold_every_row_once_and_global_counts(tiny_hf_model: Path, dynamic: bool) -> None:
    batch = make_batch(12)
    sizes = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16} if dynamic else {}
    shards = build_shards(make_args(tiny_hf_model, **sizes), batch, dp_size=3)
    assert sorted(index for shard in shards for index in shard["sample_indices"]) == batch["sample_indices"]
    tokens = sum(len(mask) for mask in batch["loss_masks"])
    counts = {"samples": 12, "sequences": 12, "tokens": tokens}
    assert all(shard["global_counts"] == counts for shard in shards)
    assert len({len(shard["micro_batches"]) for shard in shards}) == 1
    for shard in shards:
        assert sorted(row for rows in shard["micro_batches"] for row in rows) == list(range(len(shard["tokens"])))


@pytest.mark.parametrize(("dp_size", "num_objects"), [(3, 3), (65, 22)])
def test_stored_shards_load_as_they_were_built(
    cluster: None, tiny_hf_model: Path, dp_size: int, num_objects: int
) -> None:
    batch = make_batch(2 * dp_size) | {"sample_ids": [f"sample {number}" for number in range(2 * dp_size)]}
    args = make_args(tiny_hf_model, use_dynamic_batch_size=True, max_tokens_per_gpu=16)
    stored = split_train_data_by_dp(args, batch, dp_size=dp_size)
    assert len({shard.columns for shard in stored}) == num_objects
    for shard, expected in zip(stored, build_shards(args, batch, dp_size=dp_size), strict=True):
        loaded = shard.load()
        for name in ("tokens", "loss_masks"):
            loaded[name] = [row.tolist() for row in loaded[name]]
        assert loaded == expected
