"""The figures of a critic's optimizer steps, under the names they are logged by."""

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


def critic_figures(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps, `results` as a critic's `train` returns them one by one; at least one."""
    return {
        name: float(np.mean([result[key] for result in results])) for key, name in _NAMES.items() if key in results[0]
    }
