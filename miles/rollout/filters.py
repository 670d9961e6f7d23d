"""Filters for `--dynamic-sampling-filter-path`: whether the samples of one prompt are worth training on."""

import pickle
from collections.abc import Callable, Sequence

import numpy as np

from miles.data.sample import Sample
from miles.rollout.functions import describe_in, load_function

FLAG = "--dynamic-sampling-filter-path"


def nonzero_reward_std(samples: Sequence[Sample]) -> bool:
    """Keep a group whose rewards differ: one that is all right or all wrong has no advantage (DAPO, 2503.14476)."""
    return len({sample.reward for sample in samples}) > 1


def load_filter(path: str) -> Callable[[list[Sample]], bool]:
    """The filter at `path`. It is asked about copies, so that it decides and changes nothing.

    Raises:
        ValueError: nothing can be loaded from there; later, when it is called, that it raised or did not return a
            bool, naming the group.
    """
    function = load_function(path, flag=FLAG, arguments=1, awaited=False)

    def keep(group: list[Sample]) -> bool:
        asked = f"{FLAG} {path}, asked about group {group[0].group_index}"
        try:
            answer = function(pickle.loads(pickle.dumps(group)))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{asked}: {describe_in(error, function)}") from error
        if not isinstance(answer, bool | np.bool_):
            raise ValueError(f"{asked}: returned {answer!r} ({type(answer).__name__}), expected True or False")
        return bool(answer)

    return keep
