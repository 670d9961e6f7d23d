"""Advantages and returns, one sample at a time, on its trainable tokens only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.aggregation import masked

_CHUNK = 128  # tokens solved at once by one triangular matrix


def discounted_sums(x_T: Tensor, *, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, y beyond the end 0. Float64 in and out, [T].

    Solved in chunks of 128 tokens by one product with a triangular matrix of powers; only the carry from chunk to
    chunk is sequential.
    """
    length = x_T.shape[0]
    if length == 0:
        return x_T.clone()
    num_chunks = -(-length // _CHUNK)
    x_CK = torch.nn.functional.pad(x_T, (0, num_chunks * _CHUNK - length)).view(num_chunks, _CHUNK)
    step_K = torch.arange(_CHUNK, dtype=x_T.dtype, device=x_T.device)
    distance_KK = step_K[None, :] - step_K[:, None]
    power_KK = torch.where(distance_KK >= 0, decay ** distance_KK.clamp(min=0), 0.0)
    y_CK = x_CK @ power_KK.T
    carry_K = decay ** (_CHUNK - step_K)
    for chunk in range(num_chunks - 2, -1, -1):
        y_CK[chunk] += carry_K * y_CK[chunk + 1, 0]
    return y_CK.reshape(-1)[:length]


def gae(
    *,
    rewards_T: Tensor,
    values_T: Tensor,
    loss_mask_T: Tensor,
    gamma: float,
    lam: float,
    terminal_reward: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation on the compressed trainable subsequence of one sample.

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, R_t = A_t + V_t, where `next` is the next
    trainable token: observations are stepped over and cost no discount. V and A beyond the last one are 0
    (arXiv 1506.02438; observation skipping as in SAO, Eq. 4-5). Accumulates in float64.

    Args:
        rewards_T: per-token rewards, [T]; entries outside the mask are ignored.
        values_T: critic values, [T].
        loss_mask_T: 1 for trainable tokens, [T].
        terminal_reward: the trajectory's scalar reward, added at the LAST TRAINABLE token.

    Returns:
        advantages and returns, [T] each, dtype of `values_T`, 0 outside the mask.

    Raises:
        ValueError: shapes differ, gamma or lam outside [0, 1], nothing trainable to put the terminal reward on.
    """
    if not rewards_T.shape == values_T.shape == loss_mask_T.shape or values_T.dim() != 1:
        raise ValueError(
            f"rewards {tuple(rewards_T.shape)}, values {tuple(values_T.shape)} and loss mask"
            f" {tuple(loss_mask_T.shape)} must have one and the same length"
        )
    for name, number in (("gamma", gamma), ("lambda", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {number}")
    active_T = loss_mask_T.bool()
    reward_A = rewards_T[active_T].double()
    value_A = values_T[active_T].double()
    if len(reward_A):
        reward_A[-1] += terminal_reward
    elif terminal_reward != 0.0:
        raise ValueError("the loss mask is empty: there is no trainable token to put the terminal reward on")
    next_value_A = torch.cat([value_A[1:], value_A.new_zeros(min(1, len(value_A)))])
    delta_A = reward_A + gamma * next_value_A - value_A
    advantage_A = discounted_sums(delta_A, decay=gamma * lam)
    advantages_T = torch.zeros_like(values_T)
    returns_T = torch.zeros_like(values_T)
    advantages_T[active_T] = advantage_A.to(values_T.dtype)
    returns_T[active_T] = (advantage_A + value_A).to(values_T.dtype)
    return advantages_T, returns_T


def whiten(*, advantages_N: Sequence[Tensor], loss_masks_N: Sequence[Tensor], eps: float = 1e-8) -> list[Tensor]:
    """(A - mean) / sqrt(var + eps), moments taken once over the trainable tokens of ALL samples given.

    Two-pass in float64, population variance. Pass the whole batch, never one rank's share. Samples may be empty.

    Args:
        advantages_N, loss_masks_N: one [T_i] tensor per sample.

    Returns:
        one [T_i] tensor per sample in the input's dtype, 0 outside the mask.
    """
    active = [a[m.bool()].double() for a, m in zip(advantages_N, loss_masks_N, strict=True)]
    pooled = torch.cat(active) if active else torch.zeros(0, dtype=torch.float64)
    if len(pooled) == 0:
        return [torch.zeros_like(a) for a in advantages_N]
    mean = pooled.mean()
    scale = torch.rsqrt((pooled - mean).square().mean() + eps)
    return [
        masked(((a.double() - mean) * scale).to(a.dtype), m) for a, m in zip(advantages_N, loss_masks_N, strict=True)
    ]


def compute_advantages_and_returns(
    batch: dict[str, Any],
    *,
    estimator: str,
    gamma: float,
    lam: float,
    critic_lam: float | None = None,
    normalize: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages for the actor and value targets for the critic, for every row of a column batch.

    `rewards[i]` is the trajectory's reward and is placed on its last trainable token in here. The critic's targets use
    `critic_lam` (default: `lam`) and are never normalised.

    Args:
        batch: columns `rewards`, `values`, `loss_masks` (see `miles.data.batch`).
        estimator: "gae".
        normalize: whiten the advantages over all trainable tokens of the batch.

    Returns:
        (advantages, returns): per row a float32 array of response_length numbers, 0 outside the mask.

    Raises:
        ValueError: unknown estimator; non-finite value under the mask, naming the row.
    """
    if estimator != "gae":
        raise ValueError(f"unknown advantage estimator {estimator!r}, expected 'gae'")
    critic_lam = lam if critic_lam is None else critic_lam
    advantages: list[Tensor] = []
    returns: list[Tensor] = []
    masks = [torch.as_tensor(np.asarray(mask)) for mask in batch["loss_masks"]]
    for row, (reward, values, mask_T) in enumerate(zip(batch["rewards"], batch["values"], masks, strict=True)):
        values_T = torch.as_tensor(np.asarray(values, dtype=np.float32))
        if not torch.isfinite(masked(values_T, mask_T)).all():
            raise ValueError(f"row {row}: the critic's values are not finite on trainable tokens")
        # a row without trainable tokens has nothing to learn from its reward
        terminal_reward = float(reward) if mask_T.any() else 0.0
        common = {
            "rewards_T": torch.zeros_like(values_T),
            "values_T": values_T,
            "loss_mask_T": mask_T,
            "terminal_reward": terminal_reward,
            "gamma": gamma,
        }
        advantages_T, returns_T = gae(**common, lam=lam)
        if critic_lam != lam:
            _, returns_T = gae(**common, lam=critic_lam)
        advantages.append(advantages_T)
        returns.append(returns_T)
    if normalize:
        advantages = whiten(advantages_N=advantages, loss_masks_N=masks)
    return [a.numpy() for a in advantages], [r.numpy() for r in returns]
