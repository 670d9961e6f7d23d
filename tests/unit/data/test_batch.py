"""The batch schema refuses what does not fit, naming column and row."""

import math
import pickle

import numpy as np
import pytest

from miles.data.batch import check_reward, samples_to_batch, select_rows, validate_batch
from miles.data.sample import Sample, SampleStatus


def value_batch() -> dict:
    return {
        "tokens": [[1, 2, 3], [4, 5]],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 0], [1]],
        "returns": [[1.0, 0.0], [0.5]],
        "sample_indices": [10, 11],
        "sample_ids": ["a", "b"],
    }


def finished(index: int = 0, **changes) -> Sample:
    sample = Sample(index=index, group_index=0, rollout_id=0, prompt="p", tokens=[1, 2])
    sample.append_response_tokens([3, 4], log_probs=[-0.5, -0.25])
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_validate_batch_value_columns_accepted():
    validate_batch(value_batch(), "value")


@pytest.mark.parametrize(
    ("column", "entry", "message"),
    [
        ("tokens", [1, -2, 3], "tokens row 0 .sample 10.: expected a flat list of integers"),
        ("tokens", [1.5, 2, 3], "tokens row 0"),
        ("response_lengths", 3, "must leave at least one prompt token"),
        ("response_lengths", 0, "expected an integer >= 1"),
        ("response_lengths", True, "expected an integer >= 1"),
        ("loss_masks", [1], "loss_masks row 0 .sample 10.: expected 2 entries of 0 or 1"),
        ("loss_masks", [1, 2], "loss_masks row 0"),
        ("loss_masks", [1, math.nan], "loss_masks row 0"),
        ("returns", [1.0], "returns row 0 .sample 10.: expected 2 numbers"),
        ("returns", [1.0, math.inf], "returns row 0 .sample 10.: not finite at response token 1"),
        ("returns", ["1", "2"], "returns row 0"),
    ],
)
def test_validate_batch_bad_entry_names_column_and_row(column, entry, message):
    batch = value_batch()
    batch[column][0] = entry
    with pytest.raises(ValueError, match=message):
        validate_batch(batch, "value")


def test_validate_batch_uneven_columns_refused():
    batch = value_batch()
    batch["returns"].pop()
    with pytest.raises(ValueError, match="column returns has 1 rows, tokens has 2"):
        validate_batch(batch, "value")


def test_validate_batch_missing_and_unknown_columns_named():
    batch = value_batch()
    del batch["returns"]
    with pytest.raises(ValueError, match="misses columns: returns"):
        validate_batch(batch, "value")
    with pytest.raises(ValueError, match="unknown columns: advantage"):
        validate_batch(value_batch() | {"advantage": [[0.0], [0.0]]}, "value")
    with pytest.raises(ValueError, match="unknown batch objective 'sft'"):
        validate_batch(value_batch(), "sft")


def test_validate_batch_nothing_to_train_on_refused():
    batch = value_batch() | {"loss_masks": [[0, 0], [0]]}
    with pytest.raises(ValueError, match="every loss mask is zero"):
        validate_batch(batch, "value")
    with pytest.raises(ValueError, match="no rows"):
        validate_batch({name: [] for name in value_batch()}, "value")


def test_validate_batch_values_need_to_be_finite_only_under_the_mask():
    # faults.md row 10
    batch = value_batch() | {"values": [[0.5, math.nan], [0.5]]}
    validate_batch(batch, "value")
    batch["values"][1][0] = math.nan
    with pytest.raises(ValueError, match=r"values row 1 \(sample 11\): not finite at response token 0"):
        validate_batch(batch, "value")


def test_samples_to_batch_columns_follow_the_samples():
    batch = samples_to_batch([finished(4), finished(2, reward=0.0, status=SampleStatus.TRUNCATED)])
    assert batch["sample_indices"] == [4, 2]
    assert [x.tolist() for x in batch["tokens"]] == [[1, 2, 3, 4]] * 2
    assert batch["rewards"] == [1.0, 0.0]
    assert [x.tolist() for x in batch["rollout_log_probs"]] == [[-0.5, -0.25]] * 2


def test_samples_to_batch_pickled_has_the_same_rows_as_views_of_one_array_a_column():
    batch = samples_to_batch([finished(4), finished(2, tokens=[7, 8, 9, 3, 4])])
    assert batch["loss_masks"][0].nbytes == 2
    back = pickle.loads(pickle.dumps(batch))
    assert back.keys() == batch.keys()
    for name in ("tokens", "loss_masks", "rollout_log_probs"):
        assert [(x.tolist(), x.dtype) for x in back[name]] == [(x.tolist(), x.dtype) for x in batch[name]]
        assert all(np.shares_memory(x, back[name][0].base) for x in back[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": SampleStatus.ABORTED, "reward": None}, "sample 5 is aborted"),
        ({"status": SampleStatus.PENDING}, "sample 5 is pending"),
        ({"reward": None}, "reward of sample 5 is None"),
        ({"reward": math.nan}, "reward of sample 5 is nan"),
        ({"reward": "1"}, "reward of sample 5 is '1'"),
        ({"reward": 10**400}, "reward of sample 5 is 10000"),
        ({"index": 1}, "sample 1 is there twice"),
        ({"loss_mask": [1]}, "sample 5: loss_mask has 1 entries"),
        ({"loss_mask": [1, 2]}, "loss_masks row 1 .sample 5.: expected 2 entries of 0 or 1"),
        ({"loss_mask": [1, 0.5]}, "loss_masks row 1 .sample 5.: expected 2 entries of 0 or 1"),
        ({"loss_mask": [1, 256]}, "loss_masks row 1 .sample 5.: expected 2 entries of 0 or 1"),
    ],
)
def test_samples_to_batch_unfit_sample_refused_by_index(changes, message):
    # faults.md row 24
    with pytest.raises(ValueError, match=message):
        samples_to_batch([finished(1), finished(**{"index": 5, **changes})])


def test_samples_to_batch_failed_sample_keeps_its_row_and_trains_nothing():
    batch = samples_to_batch([finished(1), finished(5, status=SampleStatus.FAILED, reward=None)])
    assert batch["loss_masks"][1].tolist() == [0, 0]
    assert batch["rewards"] == [1.0, 0.0]


@pytest.mark.parametrize("reward", [1, 0.5, True, np.float32(0.5), np.int64(1)])
def test_check_reward_numbers_accepted(reward):
    check_reward(reward, "sample 0")


def test_select_rows_reorders_every_column():
    picked = select_rows(value_batch(), [1, 0, 1])
    assert picked["sample_ids"] == ["b", "a", "b"]
    assert picked["returns"] == [[0.5], [1.0, 0.0], [0.5]]
