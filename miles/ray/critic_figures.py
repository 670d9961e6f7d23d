"""The figures of a rollout's optimizer steps as one, and the names that a critic's are logged by."""

from collections.abc import Mapping, Sequence

import numpy as np

_NAMES = {
    "value_loss": "value/loss",
    "grad_norm": "value/grad_norm",
    "lr": "value/lr",
    "value_clip_fraction": "value/clip_fraction",
    "value_accuracy": "value/accuracy",
    "value_entropy": "value/entropy",
    "value_confidence": "value/confidence",
}
"""Those of the loss that is not used are absent from a step's results."""


def over_steps(results: Sequence[Mapping[str, float]], key: str) -> float:
    """A figure of several optimizer steps: its mean over all their trainable tokens, and the extreme of extremes.

    A gradient norm or a learning rate is each step's, so theirs is the mean over steps.

    Args:
        results: what a worker's training method returns, by step; at least one has `key`, which extremes of no tokens
            lack.
    """
    having = [result for result in results if key in result]
    numbers = [result[key] for result in having]
    if key.endswith(("_max", "_min")):
        return float(np.max(numbers) if key.endswith("_max") else np.min(numbers))
    if key in ("grad_norm", "lr"):
        return float(np.mean(numbers))
    tokens = [result["tokens"] for result in having]
    # Equal weights leave the mean what it is to the last bit.
    return float(np.mean(numbers) if len(set(tokens)) == 1 else np.average(numbers, weights=tokens))


def critic_figures(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`results` as a critic's `train` returns them one by one; at least one."""
    return {name: over_steps(results, key) for key, name in _NAMES.items() if key in results[0]}
