"""Discounted sums and generalised advantage estimation on trainable tokens; lambda by length; compaction."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_CHUNK = 32  # tokens solved at once by one triangular matrix
_GROUP_TOKENS = 1 << 18  # tokens of the rows that are solved together: about what a cache holds


def check_decay(name: str, number: float) -> None:
    """Raise ValueError unless `number` lies in [0, 1]."""
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")


def discounted_sums(x_NT: Tensor, *, decay: float | Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last dimension, y beyond the end 0. [..., T], in `x_NT`'s dtype.

    A scan in chunks of 32 tokens: each chunk is solved by one product with a triangular matrix of powers, and the
    chunks' first elements are a problem of the same form, 32 times shorter.

    Args:
        decay: one number, or one per row ([N] for [N, T]).
    """
    length = x_NT.shape[-1]
    if length == 0:
        return x_NT.clone()
    size = min(_CHUNK, length)
    num_chunks = -(-length // size)
    if filling := num_chunks * size - length:
        x_NT = torch.nn.functional.pad(x_NT, (0, filling))
    x_NCK = x_NT.unflatten(-1, (num_chunks, size))
    if isinstance(decay, Tensor):
        power_K, power_KK = _powers(decay.to(x_NT), size)
    else:
        power_K, power_KK = _powers_of(decay, size, x_NT.dtype, x_NT.device)
    y_NCK = x_NCK @ power_KK
    if num_chunks > 1:
        beyond = power_K[..., -1] if isinstance(decay, Tensor) else power_K[-1].item()
        first_NC = discounted_sums(y_NCK[..., 0].contiguous(), decay=beyond)
        carry_K = power_K.flip(-1)
        y_NCK[..., :-1, :].addcmul_(first_NC[..., 1:, None], carry_K.unsqueeze(-2))
    return y_NCK.flatten(-2)[..., :length]


def _powers(decay: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """decay ** 1 to decay ** `size`, [..., K], and the triangular matrix of decay ** (row - column), [..., K, K]."""
    power_K = decay.unsqueeze(-1) ** torch.arange(1, size + 1, dtype=decay.dtype, device=decay.device)
    step_K = torch.arange(size, device=decay.device)
    distance_KK = step_K[:, None] - step_K[None, :]
    one_power_K = torch.cat([torch.ones_like(power_K[..., :1]), power_K], dim=-1)
    return power_K, torch.where(distance_KK >= 0, one_power_K[..., distance_KK.clamp(min=0)], 0.0)


@lru_cache(maxsize=16)
def _powers_of(decay: float, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # A sixth of a scan's time if each group of rows makes them anew.
    return _powers(torch.tensor(decay, dtype=dtype, device=device), size)


def discounted_row_sums(x_A: np.ndarray, *, counts_N: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """`discounted_sums` of rows of different lengths laid end to end, float64 [A].

    Rows are solved together with rows of up to twice their length, so padding at most doubles the work.

    Args:
        x_A: the rows' numbers, float64, A = sum(counts_N).
        counts_N: numbers in each row, 0 allowed.
        decay: one number, or one per row [N].
    """
    decay_N = np.broadcast_to(np.asarray(decay, dtype=np.float64), counts_N.shape)
    end_N = np.cumsum(counts_N)
    one_decay = np.ndim(decay) == 0
    y_A = np.empty(len(x_A))
    for rows in _groups(counts_N):
        # Lists: numbers of NumPy's are slow to slice with, one by one.
        spans = list(zip((end_N - counts_N)[rows].tolist(), end_N[rows].tolist(), strict=True))
        first, last = spans[0][0], spans[-1][1]
        width = -(-int(counts_N[rows[-1]]) // _CHUNK) * _CHUNK
        decay_R = float(decay_N[rows[0]]) if one_decay else torch.from_numpy(decay_N[rows])
        # They may lie as a matrix already, as rows of a batch without padding do.
        is_matrix = counts_N[rows[0]] == width and last - first == len(rows) * width
        if is_matrix:
            x_RL = x_A[first:last].reshape(len(rows), width)
        else:
            # Not zeros: memory that comes fresh from the system is slow to write to.
            x_RL = np.empty((len(rows), width))
            for x_L, (start, end) in zip(x_RL, spans, strict=True):
                x_L[: end - start] = x_A[start:end]
                x_L[end - start :] = 0.0
        y_RL = discounted_sums(torch.from_numpy(x_RL), decay=decay_R).numpy()
        if is_matrix and last - first == len(x_A):
            return y_RL.reshape(-1)
        for y_L, (start, end) in zip(y_RL, spans, strict=True):
            y_A[start:end] = y_L[: end - start]
    return y_A


def _groups(counts_N: np.ndarray) -> list[np.ndarray]:
    """Rows that are not empty, in groups of similar length and bounded padded size."""
    groups: list[np.ndarray] = []
    order = np.argsort(counts_N, kind="stable")
    order = order[np.searchsorted(counts_N[order], 1) :]
    while len(order):
        shortest = counts_N[order[0]]
        similar = int(np.searchsorted(counts_N[order], 2 * shortest, side="right"))
        fitting = max(1, int(_GROUP_TOKENS // counts_N[order[similar - 1]]))
        groups.append(order[: min(similar, fitting)])
        order = order[min(similar, fitting) :]
    return groups


def row_ends(counts_N: np.ndarray) -> np.ndarray:
    """Place of the last number of every row that is not empty, among rows laid end to end."""
    return np.cumsum(counts_N)[counts_N > 0] - 1


def gae_rows(
    *,
    rewards_A: np.ndarray,
    values_A: np.ndarray,
    counts_N: np.ndarray,
    gamma: float,
    lam: float | np.ndarray,
    terminal_rewards_N: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages of rows of trainable tokens laid end to end, float64 [A]; the formula is in `gae`."""
    delta_A = np.subtract(rewards_A, values_A, dtype=np.float64)
    # V after the last token of a row is 0
    ends = row_ends(counts_N)
    last_E = delta_A[ends]
    if terminal_rewards_N is not None:
        last_E += terminal_rewards_N[counts_N > 0]
    delta_A[:-1] += values_A[1:] if gamma == 1.0 else np.multiply(values_A[1:], gamma, dtype=np.float64)
    delta_A[ends] = last_E
    return discounted_row_sums(delta_A, counts_N=counts_N, decay=gamma * lam)


def gae(
    *,
    rewards_NT: Tensor,
    values_NT: Tensor,
    loss_mask_NT: Tensor,
    gamma: float,
    lam: float | Tensor,
    terminal_rewards_N: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation on the compressed trainable subsequence of each row, on the CPU.

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, R_t = A_t + V_t, where `next` is the next
    trainable token: observations are stepped over and cost no discount. V and A beyond the last one are 0
    (arXiv 1506.02438; observation skipping as in SAO, arXiv 2607.07508, Eq. 4-5). Accumulates in float64.

    Args:
        rewards_NT: per-token rewards, [N, T], or [T] for one sample; entries outside the mask are ignored.
        values_NT, loss_mask_NT: critic values and 1 for trainable tokens, shaped like the rewards.
        lam: one number, or one per row [N] (see `adaptive_lambda`).
        terminal_rewards_N: the trajectory's scalar reward, [N] or one for all, added at the LAST TRAINABLE token.

    Returns:
        advantages and returns, shaped like `values_NT` in its dtype, 0 outside the mask.

    Raises:
        ValueError: shapes differ, gamma or lam outside [0, 1], a row with a terminal reward but nothing trainable.
    """
    if not rewards_NT.shape == values_NT.shape == loss_mask_NT.shape or values_NT.dim() not in (1, 2):
        raise ValueError(
            f"rewards {tuple(rewards_NT.shape)}, values {tuple(values_NT.shape)} and loss mask"
            f" {tuple(loss_mask_NT.shape)} must have one and the same shape, [N, T] or [T]"
        )
    check_decay("gamma", gamma)
    lam_N = lam.double().numpy() if isinstance(lam, Tensor) else lam
    for number in np.atleast_1d(lam_N):
        check_decay("lambda", float(number))
    mask_NT = loss_mask_NT.bool().reshape(-1, values_NT.shape[-1]).numpy()
    counts_N = np.count_nonzero(mask_NT, axis=1)
    terminal_N = torch.as_tensor(terminal_rewards_N, dtype=torch.float64).expand(len(counts_N)).numpy()
    if ((counts_N == 0) & (terminal_N != 0)).any():
        raise ValueError("the loss mask is empty: there is no trainable token to put the terminal reward on")
    advantages_NT, returns_NT = (torch.empty(values_NT.shape, dtype=values_NT.dtype) for _ in range(2))
    step = max(1, _GROUP_TOKENS // max(mask_NT.shape[1], 1))
    for start in range(0, len(mask_NT), step):
        part = slice(start, start + step)

        def flat(x_NT: Tensor, part: slice = part) -> np.ndarray:
            return x_NT.detach().numpy().reshape(mask_NT.shape)[part].reshape(-1)

        place_A = slice(None) if mask_NT[part].all() else np.flatnonzero(mask_NT[part])
        value_A = flat(values_NT)[place_A]
        advantage_A = gae_rows(
            rewards_A=flat(rewards_NT)[place_A],
            values_A=value_A,
            counts_N=counts_N[part],
            gamma=gamma,
            lam=lam_N[part] if isinstance(lam_N, np.ndarray) and lam_N.ndim else lam_N,
            terminal_rewards_N=terminal_N[part],
        )
        put(advantage_A, place_A, into=flat(advantages_NT))
        advantage_A += value_A
        put(advantage_A, place_A, into=flat(returns_NT))
    return advantages_NT, returns_NT


def put(x_A: np.ndarray, place_A: np.ndarray | slice, *, into: np.ndarray) -> None:
    """Write numbers to their places in an array, in its dtype, and zeros elsewhere; `slice(None)`: they are all."""
    if isinstance(place_A, slice):
        into[place_A] = x_A
        return
    # Three times as fast as NumPy's own.
    torch.from_numpy(into).zero_().index_copy_(0, torch.from_numpy(place_A), torch.from_numpy(x_A.astype(into.dtype)))


def adaptive_lambda(num_tokens: Tensor | Sequence[int], *, alpha: float, min_length: int = 1) -> Tensor:
    """lambda(L) = max(1 - 1 / (alpha L), 0) for trajectories of L trainable tokens, float64, [N].

    A trajectory of no token, or of fewer than `min_length`, gets 1. VAPO takes alpha .05 (arXiv 2504.05118), SAO 1.5
    (arXiv 2607.07508). With compaction L counts the trainable tokens of the whole trajectory, not of the segment.

    Raises:
        ValueError: alpha not above 0 or not finite, a negative length or `min_length`.
    """
    if not 0.0 < alpha < float("inf"):
        raise ValueError(f"the alpha of the length-adaptive lambda must be a finite number above 0, got {alpha}")
    if min_length < 0:
        raise ValueError(f"the minimum length of the length-adaptive lambda must be at least 0, got {min_length}")
    length_N = torch.as_tensor(num_tokens, dtype=torch.float64)
    if bool((length_N < 0).any()):
        raise ValueError(f"a trajectory cannot have {int(length_N.min())} tokens")
    lam_N = (1.0 - 1.0 / (alpha * length_N.clamp(min=1.0))).clamp(min=0.0)
    return torch.where((length_N < min_length) | (length_N == 0), 1.0, lam_N)
