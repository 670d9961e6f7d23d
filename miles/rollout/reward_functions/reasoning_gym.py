"""Reward of a reasoning-gym problem: `--custom-rm-path miles.rollout.reward_functions.reasoning_gym:score`."""

from functools import lru_cache
from typing import Any

from miles.data.sample import Sample


@lru_cache(maxsize=64)
def _scorer(dataset: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(dataset)


def extract_answer(response: str) -> str:
    """What counts as the answer: the last <answer>...</answer>, or the whole response where there is none."""
    _, opened, rest = response.rpartition("<answer>")
    if opened and "</answer>" in rest:
        return rest.partition("</answer>")[0].strip()
    return response.strip()


def score(sample: Sample) -> float:
    """Score `sample.response` by the scorer of the problem's own data set, in 0..1.

    `sample.metadata` holds "entry", a row as reasoning-gym generates it ({"question", "answer", "metadata"}), and
    "dataset", the data set's name (else the entry's own "source_dataset").

    Raises:
        ValueError: metadata without entry or data set, or a data set that reasoning-gym does not know.
    """
    entry = sample.metadata.get("entry")
    if not isinstance(entry, dict) or "answer" not in entry:
        raise ValueError(f"sample {sample.index}: metadata.entry must be a reasoning-gym row with an answer")
    dataset = sample.metadata.get("dataset") or entry.get("metadata", {}).get("source_dataset")
    if not isinstance(dataset, str):
        raise ValueError(f"sample {sample.index}: metadata.dataset must name a reasoning-gym data set")
    try:
        scorer = _scorer(dataset)
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from None
    return float(scorer(answer=extract_answer(sample.response), entry=entry))
