"""From settings to advantages: the estimator of a run, and the KL penalty of its tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from miles.algorithms.advantages import AdvantageBatch, compute_advantages_and_returns, resolve_advantage_estimator
from miles.algorithms.kl import kl_estimate
from miles.algorithms.value_losses import explained_variance
from miles.config import Args
from miles.config.choices import is_hook
from miles.data.batch import select_rows
from miles.data.sao import failed_rows
from miles.rollout.functions import describe_in, load_function


class Advantages:
    """The advantage estimator that `args` name."""

    def __init__(self, args: Args) -> None:
        """Load a function of the user's.

        Raises:
            ValueError: it cannot be loaded, or needs what the run has not.
        """
        name = args.advantage_estimator
        self._args = args
        self._estimator = load_function(name, flag="--advantage-estimator", awaited=False) if is_hook(name) else name
        facts = resolve_advantage_estimator(self._estimator)
        if facts.needs_values and not args.has_critic:
            raise ValueError(f"--advantage-estimator {name} needs a critic: --use-critic")
        if facts.needs_groups and args.n_samples_per_prompt < 2:
            raise ValueError(f"--advantage-estimator {name} needs --n-samples-per-prompt of at least 2")

    def __call__(self, batch: dict[str, Any], *, kl_coef: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Advantages and value targets of every row, float32 [response_length] each.

        Rows of samples that got no reward (column "failed") count in no statistic and get zeros. One whose tokens are
        all masked out keeps its reward among its siblings'.
        """
        args = self._args
        if not any(np.any(mask) for mask in batch["loss_masks"]):
            raise ValueError("no sample of the rollout has a trainable token")
        rows = [row for row, lost in enumerate(failed_rows(batch)) if not lost]
        lost = len(batch["loss_masks"]) - len(rows)
        # Groups that lost members are no mistake of the settings.
        because = f"{lost} of the rollout's {len(batch['loss_masks'])} samples have no reward (late or failed): "
        try:
            found = compute_advantages_and_returns(
                _take(batch, rows),
                estimator=self._estimator,
                gamma=args.gamma,
                lam=args.lambd,
                critic_lam=args.critic_lambd,
                normalize=args.normalize_advantages,
                kl_coef=kl_coef,
                adaptive_mode=args.gae_adaptive_mode,
                adaptive_alpha=args.gae_adaptive_alpha,
                adaptive_min_length=args.gae_adaptive_min_length,
            )
        except (Exception, SystemExit) as error:
            if not isinstance(self._estimator, str):
                text = f"--advantage-estimator {args.advantage_estimator}: {describe_in(error, self._estimator)}"
                raise ValueError(because * bool(lost) + text) from error
            if lost and isinstance(error, ValueError):
                raise ValueError(f"{because}{error}") from None
            raise
        if not lost:
            return found
        advantages, returns = (
            [np.zeros(length, dtype=np.float32) for length in batch["response_lengths"]] for _ in range(2)
        )
        for row, advantage, target in zip(rows, *found, strict=True):
            advantages[row], returns[row] = advantage, target
        return advantages, returns

    def explained_variance(self, batch: dict[str, Any], *, kl_coef: float) -> float | None:
        """EV of the batch's `values` over its trainable tokens, None where every return is the same.

        Against the discounted reward to go, whatever the lambdas: a target with lambda below 1 is half made of the
        very values that it would judge.
        """
        rows = AdvantageBatch(batch, kl_coef=kl_coef)
        returns_A = rows.monte_carlo(rows.rewards_N, self._args.gamma).astype(np.float32)
        return explained_variance(values=torch.as_tensor(rows.values_A), returns=torch.as_tensor(returns_A))

    def penalty(self, batch: dict[str, Any]) -> list[np.ndarray]:
        """KL of the old policy to the reference at each token, float32 [response_length] a row, 0 outside the mask."""
        columns = zip(batch["old_log_probs"], batch["ref_log_probs"], batch["loss_masks"], strict=True)
        return [
            kl_estimate(
                # Copies: what comes out of Ray's store is read-only, which torch warns of.
                log_probs=torch.tensor(np.asarray(old, dtype=np.float32)),
                ref_log_probs=torch.tensor(np.asarray(reference, dtype=np.float32)),
                loss_mask=torch.as_tensor(np.asarray(mask, dtype=bool)),
                kind=self._args.kl_loss_type,
            ).numpy()
            for old, reference, mask in columns
        ]


def returns_outside(batch: dict[str, Any], reward_range: Sequence[float]) -> tuple[float, str | None]:
    """Share of the trainable tokens whose return the range of a critic's bins does not hold.

    Returns:
        the share, and the first such return in words, with its sample; None where there is none.
    """
    low, high = reward_range
    # Returns of lambda below 1 are mixed of values, which rounding may take past an end.
    slack = 1e-5 * (high - low)
    count, num_tokens, example = 0, 0, None
    for index, row, mask in zip(batch["sample_indices"], batch["returns"], batch["loss_masks"], strict=True):
        returns_A = np.asarray(row)[np.asarray(mask, dtype=bool)]
        outside_A = returns_A[(returns_A < low - slack) | (returns_A > high + slack)]
        count, num_tokens = count + len(outside_A), num_tokens + len(returns_A)
        if example is None and len(outside_A):
            example = f"the return {float(outside_A[0]):.6g} of sample {index}"
    return count / max(num_tokens, 1), example


def _take(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    return batch if len(rows) == len(batch["loss_masks"]) else select_rows(batch, rows)
