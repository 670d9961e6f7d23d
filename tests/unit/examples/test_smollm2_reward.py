import pytest

from examples.smollm2.reward import last_number, score
from miles.data.sample import Sample


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", ""),
        ("no idea", ""),
        ("3 + 4 = 7", "7"),
        ("10-5=5.", "5"),
        ("So the answer is -12.", "-12"),
        ("He pays $1,250.50 in all", "1250.50"),
        ("First 3, then 4,000", "4000"),
    ],
)
def test_last_number_text_expected(text, number):
    assert last_number(text) == number


def make_sample(response: str) -> Sample:
    entry = {"question": "?", "answer": "42", "metadata": {}}
    metadata = {"dataset": "gsm_symbolic", "entry": entry}
    return Sample(
        index=0, group_index=0, rollout_id=0, prompt="?", tokens=[1], response=response, label="42", metadata=metadata
    )


def test_score_right_number_comes_last_full_reward():
    sample = make_sample("He has 40 and gets 2, so 42")
    assert score(sample) == 1.0
    assert sample.response == "He has 40 and gets 2, so 42"


def test_score_right_number_is_not_last_below_full_reward():
    assert score(make_sample("42 minus 2 is 40")) < 1.0


def test_score_no_number_zero():
    assert score(make_sample("I cannot say")) == 0.0
