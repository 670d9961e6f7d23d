"""The reward is reasoning-gym's own: its answer scores 1, another number less."""

import pytest
import reasoning_gym

from miles.data.sample import Sample
from miles.rollout.reward_functions.reasoning_gym import extract_answer, score


def sample_of(entry, response, dataset="chain_sum"):
    metadata = {"entry": entry} if dataset is None else {"entry": entry, "dataset": dataset}
    return Sample(index=4, group_index=0, rollout_id=0, prompt="p", tokens=[1], response=response, metadata=metadata)


@pytest.mark.parametrize("dataset", ["chain_sum", "basic_arithmetic", "gsm_symbolic"])
def test_right_answer_scores_one_and_a_wrong_one_less(dataset):
    for entry in reasoning_gym.create_dataset(dataset, size=5, seed=3):
        assert score(sample_of(entry, f" {entry['answer']}\n", dataset)) == 1.0
        assert score(sample_of(entry, "banana", dataset)) < 0.5
        assert score(sample_of(entry, "", dataset)) < 0.5


def test_scorer_of_the_data_set_is_used_where_there_is_more_than_one_right_answer():
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=5)[0]
    assert score(sample_of(entry, entry["answer"], "countdown")) == 1.0
    swapped = entry["answer"].replace(" ", "")
    assert score(sample_of(entry, swapped, "countdown")) == 1.0


def test_data_set_is_taken_from_the_entry_where_it_is_not_given():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    assert score(sample_of(entry, entry["answer"], None)) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 12 \n", "12"),
        ("so <answer> 12 </answer> indeed", "12"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1", "<answer>1"),
        ("", ""),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "sample 4: metadata.entry must be a reasoning-gym row"),
        ({"entry": {"question": "?"}}, "sample 4: metadata.entry must be"),
        ({"entry": {"answer": "1"}}, "sample 4: metadata.dataset must name"),
        ({"entry": {"answer": "1"}, "dataset": "no_such"}, "sample 4: .*no_such"),
    ],
)
def test_bad_metadata_names_the_sample(metadata, message):
    sample = Sample(index=4, group_index=0, rollout_id=0, prompt="p", tokens=[1], metadata=metadata)
    with pytest.raises(ValueError, match=message):
        score(sample)
