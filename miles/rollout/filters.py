"""Ready-made filters for `--dynamic-sampling-filter-path`: whether the samples of one prompt are worth training on."""

from collections.abc import Sequence

from miles.data.sample import Sample


def nonzero_reward_std(samples: Sequence[Sample]) -> bool:
    """Keep a group whose rewards differ: one that is all right or all wrong has no advantage (DAPO, 2503.14476)."""
    return len({sample.reward for sample in samples}) > 1
