"""Advantages and returns, one sample at a time, on its trainable tokens only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.aggregation import masked

_CHUNK = 128  # tokens solved at once by one triangular matrix
_GROUP_TOKENS = 1 << 22  # padded tokens of the rows that are solved together


def discounted_sums(x_NT: Tensor, *, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension, y beyond the end 0. Any leading dimensions, float64.

    Solved in chunks of up to 128 tokens by one product with a triangular matrix of powers; only the carry from chunk
    to chunk is sequential.
    """
    length = x_NT.shape[-1]
    if length == 0:
        return x_NT.clone()
    size = min(_CHUNK, length)
    num_chunks = -(-length // size)
    x_NCK = torch.nn.functional.pad(x_NT, (0, num_chunks * size - length)).unflatten(-1, (num_chunks, size))
    step_K = torch.arange(size, dtype=x_NT.dtype, device=x_NT.device)
    distance_KK = step_K[None, :] - step_K[:, None]
    power_KK = torch.where(distance_KK >= 0, decay ** distance_KK.clamp(min=0), 0.0)
    y_NCK = x_NCK @ power_KK.T
    carry_K = decay ** (size - step_K)
    for chunk in range(num_chunks - 2, -1, -1):
        y_NCK[..., chunk, :] += carry_K * y_NCK[..., chunk + 1, :1]
    return y_NCK.flatten(-2)[..., :length]


def _check_decays(gamma: float, lam: float) -> None:
    for name, number in (("gamma", gamma), ("lambda", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], got {number}")


def _gae_compressed(*, reward_NA: Tensor, value_NA: Tensor, gamma: float, lam: float) -> Tensor:
    """Advantages over trainable tokens that stand side by side, rows filled up with zeros at the end. Float64."""
    next_value_NA = torch.nn.functional.pad(value_NA[..., 1:], (0, 1))
    return discounted_sums(reward_NA + gamma * next_value_NA - value_NA, decay=gamma * lam)


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
    _check_decays(gamma, lam)
    active_T = loss_mask_T.bool()
    reward_A = rewards_T[active_T].double()
    value_A = values_T[active_T].double()
    if len(reward_A):
        reward_A[-1] += terminal_reward
    elif terminal_reward != 0.0:
        raise ValueError("the loss mask is empty: there is no trainable token to put the terminal reward on")
    advantage_A = _gae_compressed(reward_NA=reward_A, value_NA=value_A, gamma=gamma, lam=lam)
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
    _check_decays(gamma, lam)
    _check_decays(gamma, critic_lam)
    masks = [np.asarray(mask).astype(bool) for mask in batch["loss_masks"]]
    values = [np.asarray(row_values, dtype=np.float64) for row_values in batch["values"]]
    for row, (row_values, mask) in enumerate(zip(values, masks, strict=True)):
        if row_values.shape != mask.shape or row_values.ndim != 1:
            raise ValueError(f"row {row}: {row_values.shape} values for {mask.shape} mask entries")
        if not np.isfinite(row_values[mask]).all():
            raise ValueError(f"row {row}: the critic's values are not finite on trainable tokens")
    advantages = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    returns = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    for rows in _groups([int(mask.sum()) for mask in masks]):
        longest = int(masks[rows[-1]].sum())
        reward_NA = torch.zeros(len(rows), longest, dtype=torch.float64)
        value_NA = torch.zeros(len(rows), longest, dtype=torch.float64)
        for i, row in enumerate(rows):
            active_values = values[row][masks[row]]
            value_NA[i, : len(active_values)] = torch.from_numpy(active_values)
            reward_NA[i, len(active_values) - 1] = float(batch["rewards"][row])
        advantage_NA = _gae_compressed(reward_NA=reward_NA, value_NA=value_NA, gamma=gamma, lam=lam)
        critic_NA = advantage_NA
        if critic_lam != lam:
            critic_NA = _gae_compressed(reward_NA=reward_NA, value_NA=value_NA, gamma=gamma, lam=critic_lam)
        return_NA = critic_NA + value_NA
        for i, row in enumerate(rows):
            active = int(masks[row].sum())
            advantages[row][masks[row]] = advantage_NA[i, :active].numpy()
            returns[row][masks[row]] = return_NA[i, :active].numpy()
    if normalize:
        white = whiten(
            advantages_N=[torch.from_numpy(a) for a in advantages], loss_masks_N=[torch.from_numpy(m) for m in masks]
        )
        advantages = [a.numpy() for a in white]
    return advantages, returns


def _groups(active_counts: Sequence[int]) -> list[list[int]]:
    """Rows with trainable tokens in groups of similar length, shortest first, bounded in padded size."""
    groups: list[list[int]] = []
    for row in sorted(range(len(active_counts)), key=active_counts.__getitem__):
        # a row without trainable tokens has nothing to learn from its reward
        if active_counts[row] == 0:
            continue
        if not groups or (len(groups[-1]) + 1) * active_counts[row] > _GROUP_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return groups
