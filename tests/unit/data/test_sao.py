"""SAO's data validator and the columns of compacted trajectories (formulas A10.1)."""

import math
from typing import Any

import numpy as np
import pytest

from miles.data.batch import samples_to_batch
from miles.data.sample import Sample, SampleStatus
from miles.data.sao import compaction_token_counts, validate_sao_train_data

MASKS = ([1, 0, 1], [1], [0, 1, 1, 1])


def segment(index: int, mask: list[int], **changes: Any) -> Sample:
    sample = Sample(
        index=index,
        group_index=index,
        rollout_id=0,
        prompt="p",
        tokens=[5] + [6] * len(mask),
        response_length=len(mask),
        loss_mask=list(mask),
        rollout_log_probs=[-0.5] * len(mask),
        reward=1.0,
        status=SampleStatus.COMPLETED,
        metadata={
            "compaction_schema_version": 1,
            "compaction_trajectory_id": "t",
            "compaction_segment_index": index,
            "compaction_segment_type": "summary" if index % 2 else "execution",
        },
    )
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def compacted() -> dict[str, Any]:
    return samples_to_batch([segment(i, mask) for i, mask in enumerate(MASKS)])


def test_counts_of_later_and_all_active_tokens_as_in_the_example() -> None:
    batch = compacted()
    assert batch["compaction_subsequent_active_tokens"] == [4, 3, 0]
    assert batch["compaction_trajectory_active_tokens"] == [6, 6, 6]
    assert validate_sao_train_data(batch, compaction=True) == {
        "samples": 3,
        "response_tokens": 8,
        "active_action_tokens": 6,
    }


def test_rows_in_any_order_count_alike() -> None:
    batch = samples_to_batch([segment(i, MASKS[i]) for i in (2, 0, 1)])
    assert batch["compaction_subsequent_active_tokens"] == [0, 4, 3]
    validate_sao_train_data(batch, compaction=True)


def test_plain_batch_has_no_compaction_columns_and_is_valid() -> None:
    batch = samples_to_batch([segment(0, [1, 1], metadata={}), segment(1, [0, 1], metadata={})])
    assert not any(name.startswith("compaction") for name in batch)
    assert validate_sao_train_data(batch, compaction=False)["active_action_tokens"] == 3
    with pytest.raises(ValueError, match="missing required fields: compaction_segment_indices, "):
        validate_sao_train_data(batch, compaction=True)


def test_batch_of_segments_and_plain_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 1: .* misses compaction_trajectory_id"):
        samples_to_batch([segment(0, [1]), segment(1, [1], metadata={})])


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("response_lengths", 0, 0, "response_lengths of row 0"),
        ("response_lengths", 1, True, "response_lengths of row 1"),
        ("tokens", 2, [1, 2], "2 tokens for a response of 4"),
        ("loss_masks", 0, [1, 2, 1], "loss_masks of row 0 must be 0 or 1"),
        ("loss_masks", 0, [1, 1], "loss_masks of row 0 has shape"),
        ("rollout_log_probs", 0, np.array([-1.0, math.nan, 0.0]), "rollout_log_probs of row 0 are not finite"),
        ("rewards", 2, math.inf, "rewards of row 2 is inf"),
        ("rewards", 2, None, "rewards of row 2 is None"),
        ("rewards", 2, 0.5, "must share one reward"),
        ("compaction_trajectory_ids", 0, "", "compaction_trajectory_ids of row 0 is empty"),
        ("compaction_segment_indices", 1, -1, "compaction_segment_indices of row 1"),
        ("compaction_segment_indices", 1, 2, "invalid segment sequence"),
        ("compaction_segment_types", 1, "execution", "invalid segment sequence"),
        ("compaction_segment_types", 1, "other", "expected execution or summary"),
        ("compaction_subsequent_active_tokens", 0, 3, "invalid future-token count 3, expected 4"),
        ("compaction_trajectory_active_tokens", 2, 5, "invalid trajectory-token count 5, expected 6"),
        ("compaction_trajectory_active_tokens", 2, 0, "expected above 0"),
    ],
)
def test_wrong_entry_is_refused_by_name(column: str, row: int, value: Any, message: str) -> None:
    batch = compacted()
    batch[column] = [*batch[column]]
    batch[column][row] = value
    with pytest.raises(ValueError, match=message):
        validate_sao_train_data(batch, compaction=True)


def test_trajectory_that_ends_in_a_summary_is_refused() -> None:
    batch = samples_to_batch([segment(0, [1]), segment(1, [1])])
    with pytest.raises(ValueError, match="invalid segment sequence"):
        validate_sao_train_data(batch, compaction=True)


def test_missing_columns_are_named_in_order() -> None:
    with pytest.raises(ValueError, match=r"^missing required fields: loss_masks, rewards$"):
        validate_sao_train_data(
            {name: [] for name in ("tokens", "response_lengths", "rollout_log_probs")}, compaction=False
        )


def test_nothing_trainable_is_refused() -> None:
    batch = compacted()
    batch["loss_masks"] = [[0] * len(mask) for mask in MASKS]
    with pytest.raises(ValueError, match="at least one active action token"):
        validate_sao_train_data(batch, compaction=False)


def test_row_without_an_active_token_beside_others_is_refused_unless_it_failed() -> None:
    plain = [segment(0, [1, 1], metadata={}), segment(1, [0, 0], metadata={})]
    with pytest.raises(ValueError, match=r"loss_masks of row 1 is zero: SAO needs an active action token in every"):
        validate_sao_train_data(samples_to_batch(plain), compaction=False)
    lost = segment(1, [1, 1], metadata={}, status=SampleStatus.FAILED, reward=None)
    batch = samples_to_batch([plain[0], lost])
    assert batch["failed"] == [False, True]
    assert validate_sao_train_data(batch, compaction=False)["active_action_tokens"] == 2


def test_trajectory_without_a_reward_is_let_through_whole_and_not_in_part() -> None:
    other = {"compaction_trajectory_id": "u", "compaction_segment_index": 0, "compaction_segment_type": "execution"}
    lost = [segment(i, mask, status=SampleStatus.FAILED, reward=None) for i, mask in enumerate(MASKS)]
    batch = samples_to_batch([*lost, segment(3, [1, 1], metadata=other)])
    assert batch["compaction_subsequent_active_tokens"] == [0, 0, 0, 0]
    assert batch["compaction_trajectory_active_tokens"] == [0, 0, 0, 2]
    assert validate_sao_train_data(batch, compaction=True)["active_action_tokens"] == 2
    part = [lost[0], *(segment(i, MASKS[i]) for i in (1, 2))]
    with pytest.raises(ValueError, match="trajectory t: some of its segments got no reward and some did"):
        validate_sao_train_data(samples_to_batch(part), compaction=True)


def test_compaction_without_one_token_normaliser_is_refused() -> None:
    with pytest.raises(ValueError, match="one token normaliser"):
        validate_sao_train_data(compacted(), compaction=True, calculate_per_token_loss=False)


def test_compaction_token_counts_known_answer_in_any_row_order():
    # formulas.md A10.1
    masks = [[1, 0, 1], [1], [0, 1, 1, 1]]
    assert compaction_token_counts(trajectory_ids=["a"] * 3, segment_indices=[0, 1, 2], loss_masks=masks) == (
        [4, 3, 0],
        [6, 6, 6],
    )
    shuffled = compaction_token_counts(
        trajectory_ids=["a", "b", "a", "a"], segment_indices=[2, 0, 0, 1], loss_masks=[masks[2], [1, 1], *masks[:2]]
    )
    assert shuffled == ([0, 0, 4, 3], [6, 2, 6, 6])
