"""What the denominators of losses are counted over."""

import pytest

from miles.config import Args
from miles.data.batch import validate_batch
from miles.ray.rollout.train_data_conversion import build_shards


@pytest.mark.parametrize(
    ("columns", "sequence_tokens", "sequences"),
    [
        ({}, [2, 2, 4], 3),
        ({"trajectory_ids": ["x", "x", "y"]}, [4, 4, 4], 2),
        ({"compaction_trajectory_ids": ["x", "y", "y"], "trajectory_ids": ["x", "x", "y"]}, [2, 6, 6], 2),
    ],
    ids=["rows", "siblings", "segments"],
)
def test_rows_of_one_trajectory_are_one_sequence(
    columns: dict[str, list[str]], sequence_tokens: list[int], sequences: int
) -> None:
    lengths = [2, 2, 4]
    batch = columns | {
        "tokens": [[1] * (1 + length) for length in lengths],
        "response_lengths": lengths,
        "loss_masks": [[1] * length for length in lengths],
        "sample_indices": [0, 1, 2],
        "advantages": [[0.0] * length for length in lengths],
    }
    validate_batch(batch, "policy")
    (shard,) = build_shards(Args.build(micro_batch_size=3), batch, dp_size=1)
    by_sample = dict(zip(shard["sample_indices"], shard["sequence_tokens"], strict=True))
    assert [by_sample[index] for index in range(3)] == sequence_tokens
    assert shard["global_counts"] == {"samples": 3, "sequences": sequences, "tokens": 8}
