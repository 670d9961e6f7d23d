"""Reward of a model that reasons aloud: the last number it names is its answer, scored by reasoning-gym."""

import re
from dataclasses import replace

from miles.data.sample import Sample
from miles.rollout.reward_functions import reasoning_gym

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str:
    """The last number in `text` without thousands separators, "" where there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


def score(sample: Sample) -> float:
    """Score the last number of the response; the problem's own scorer, in 0..1, decides.

    Raises:
        ValueError: the sample's metadata does not name a reasoning-gym problem.
    """
    return reasoning_gym.score(replace(sample, response=last_number(sample.response)))
