"""What the rollout side says before it starts engines, and the figures of a rollout."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles.config import Args
from miles.data.sample import Sample, SampleStatus, read_samples
from miles.ray.rollout.manager import RolloutManager, _prompt_limit, _rollout_metrics


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A manager sets logging up for its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 128 - 8),
        ({"sglang_max_total_tokens": 64, "device": "cuda"}, 64 - 8),
        ({"max_tokens_per_gpu": 32}, 32 - 8),
        ({"max_tokens_per_gpu": 32, "context_parallel_size": 2}, 64 - 8),
        ({"rollout_max_prompt_len": 9}, 9),
    ],
)
def test_prompt_limit_is_what_the_tightest_place_leaves(settings: dict[str, Any], limit: int) -> None:
    assert _prompt_limit(Args.build(**settings), {"max_position_embeddings": 128}, 8, trained=True) == limit


def test_prompt_limit_of_what_is_not_trained_on_is_not_a_micro_batchs() -> None:
    args = Args.build(max_tokens_per_gpu=32)
    assert _prompt_limit(args, {"max_position_embeddings": 128}, 64, trained=False) == 128 - 64


@pytest.mark.parametrize(("device", "limit"), [("cpu", 32768 - 8), ("cuda", None)])
def test_prompt_limit_of_an_unset_cache_is_that_of_a_cpu(device: str, limit: int | None) -> None:
    assert _prompt_limit(Args.build(device=device), {}, 8, trained=True) == limit


def sample(index: int, reward: float | None, **changes: Any) -> Sample:
    made = Sample(
        index=index,
        group_index=index // 2,
        rollout_id=0,
        prompt="p",
        tokens=[1, 2, 3],
        response_length=1 + index % 2,
        loss_mask=[1] * (1 + index % 2),
        rollout_log_probs=[-1.0] * (1 + index % 2),
        reward=reward,
        status=SampleStatus.COMPLETED if reward is not None else SampleStatus.FAILED,
        weight_versions=["3"],
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_figures_of_a_rollout_leave_unscored_samples_out_of_rewards() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0), sample(2, 1.0), sample(3, None, weight_versions=["2", "3"])]
    figures = _rollout_metrics(samples)
    assert figures["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert (figures["rollout/count"], figures["rollout/unscored"]) == (4, 1)
    assert (figures["rollout/reward_min"], figures["rollout/reward_max"]) == (0.0, 1.0)
    assert figures["rollout/response_length_max"] == 2
    assert figures["rollout/equal_reward_groups"] == pytest.approx(0.5)
    assert figures["rollout/stale_fraction"] == pytest.approx(0.25)


def test_rollout_without_any_reward_is_one_line() -> None:
    with pytest.raises(RuntimeError, match="no sample of 2 has a reward"):
        _rollout_metrics([sample(0, None), sample(1, None)])


def write(folder: Path, rollout: int, samples: list[Sample]) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(one.to_dict()) + "\n" for one in samples)
    (folder / f"rollout_{rollout:06d}.jsonl").write_text(text)


async def test_kept_rollouts_are_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    write(folder, 0, [sample(0, 1.0), sample(1, 0.0)])
    settings = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "load_rollouts": str(folder)}
    manager = RolloutManager(Args.build(num_rollout=1, **settings), [])
    assert await manager.start() == []
    batch = (await manager.generate(0))["batch"]
    assert (batch["sample_indices"], batch["rewards"], batch["group_indices"]) == ([0, 1], [1.0, 0.0], [0, 0])
    write(folder, 0, [sample(0, 1.0)])
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl: 1 samples, --rollout-batch-size 1 x"):
        await manager.generate(0)


def test_damaged_line_of_a_kept_rollout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollout_000000.jsonl"
    path.write_text(json.dumps(sample(0, 1.0).to_dict()) + "\n{}\n")
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl:2: sample misses fields"):
        read_samples(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no samples"):
        read_samples(path)
