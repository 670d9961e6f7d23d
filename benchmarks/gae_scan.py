"""Seconds of GAE: the chunked scan against a loop over time steps that handles all rows at once, in one run.

Usage: python benchmarks/gae_scan.py [--rows 128] [--tokens 8192] [--repeats 20]

Both get the same [rows, tokens] tensors and return advantages and returns of them; they take turns, and the fastest of
each counts. "holes": one token in ten is an observation that the recursion steps over; "whole": none is, and the loop
is spared the masks. "lists": `compute_advantages_and_returns` on a batch of rows of different lengths, as a step of
training calls it, against the loop on the padded tensors. Exits with 1 where results differ by more than 1e-5 or the
scan is not ten times as fast.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.advantages import compute_advantages_and_returns
from miles.algorithms.gae import gae

GAMMA, LAMBDA = 1.0, 0.95


def loop(values_NT: Tensor, mask_NT: Tensor | None, terminal_N: Tensor) -> tuple[Tensor, Tensor]:
    """The recursion, one time step of all rows after the other; without a mask every token is trainable."""
    num_rows, length = values_NT.shape
    if mask_NT is None:
        last_N = torch.full((num_rows,), length - 1)
    else:
        last_N = length - 1 - mask_NT.flip(1).int().argmax(1)
    reward_NT = torch.zeros_like(values_NT)
    reward_NT[torch.arange(num_rows), last_N] = terminal_N
    # time first, so that each step reads what lies together
    reward_TN, value_TN = reward_NT.T.contiguous(), values_NT.T.contiguous()
    mask_TN = None if mask_NT is None else mask_NT.T.contiguous()
    advantage_TN = torch.zeros_like(value_TN)
    next_value_N = torch.zeros(num_rows)
    next_advantage_N = torch.zeros(num_rows)
    for t in range(length - 1, -1, -1):
        delta_N = reward_TN[t] + GAMMA * next_value_N - value_TN[t]
        advantage_N = delta_N + GAMMA * LAMBDA * next_advantage_N
        if mask_TN is None:
            next_advantage_N, next_value_N = advantage_N, value_TN[t]
            advantage_TN[t] = advantage_N
            continue
        next_advantage_N = torch.where(mask_TN[t], advantage_N, next_advantage_N)
        next_value_N = torch.where(mask_TN[t], value_TN[t], next_value_N)
        advantage_TN[t] = torch.where(mask_TN[t], advantage_N, 0.0)
    advantage_NT = advantage_TN.T.contiguous()
    returns_NT = advantage_NT + values_NT
    return advantage_NT, returns_NT if mask_NT is None else torch.where(mask_NT, returns_NT, 0.0)


def exact(values_T: np.ndarray, mask_T: np.ndarray, terminal: float) -> np.ndarray:
    """Advantages of one row in float64."""
    advantages = np.zeros(len(values_T))
    next_value = next_advantage = 0.0
    reward = terminal
    for t in np.flatnonzero(mask_T)[::-1]:
        next_advantage = reward + GAMMA * next_value - values_T[t] + GAMMA * LAMBDA * next_advantage
        next_value, reward = values_T[t], 0.0
        advantages[t] = next_advantage
    return advantages


def fastest(calls: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    seconds = dict.fromkeys(calls, float("inf"))
    results = {}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            results[name] = call()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds, results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.tokens)
    values = torch.randn(shape, generator=generator)
    terminal = torch.rand(args.rows, generator=generator)
    holes = torch.rand(shape, generator=generator) < 0.9
    holes[:, 0] = True
    lengths = torch.randint(args.tokens // 4, args.tokens + 1, (args.rows,), generator=generator)
    ragged = holes & (torch.arange(args.tokens) < lengths[:, None])
    masks = {"holes": holes, "whole": torch.ones(shape, dtype=torch.bool), "lists": ragged}
    print(f"{args.rows} x {args.tokens} tokens, {torch.get_num_threads()} threads, fastest of {args.repeats}")
    print(f"{'case':<8}{'loop s':>10}{'scan s':>10}{'ratio':>8}{'largest difference':>21}")
    passed = True
    for case, mask in masks.items():
        rewards = torch.zeros(shape)
        batch = {
            "rewards": terminal.tolist(),
            "values": [row[:length].numpy() for row, length in zip(values, lengths, strict=True)],
            "loss_masks": [row[:length].numpy() for row, length in zip(mask, lengths, strict=True)],
        }

        def scan(mask: Tensor = mask, rewards: Tensor = rewards) -> Any:
            return gae(
                rewards_NT=rewards,
                values_NT=values,
                loss_mask_NT=mask,
                gamma=GAMMA,
                lam=LAMBDA,
                terminal_rewards_N=terminal,
            )

        def lists(batch: dict[str, Any] = batch) -> Any:
            return compute_advantages_and_returns(batch, estimator="gae", gamma=GAMMA, lam=LAMBDA)

        def baseline(mask: Tensor | None = None if case == "whole" else mask) -> Any:
            return loop(values, mask, terminal)

        seconds, results = fastest({"loop": baseline, "scan": lists if case == "lists" else scan}, args.repeats)
        ratio = seconds["loop"] / seconds["scan"]
        difference = 0.0
        for row in range(args.rows):
            expected = exact(values[row].numpy(), mask[row].numpy(), float(terminal[row]))
            found = np.asarray(results["scan"][0][row])
            difference = max(difference, float(np.abs(found - expected[: len(found)]).max()))
        print(f"{case:<8}{seconds['loop']:>10.4f}{seconds['scan']:>10.4f}{ratio:>8.1f}{difference:>21.1e}")
        passed = passed and ratio >= 10 and difference <= 1e-5
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
