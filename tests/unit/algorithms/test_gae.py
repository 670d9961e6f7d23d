"""GAE, its scan and its lambdas against loops and against values worked out by hand.

The loop walks the response backwards and simply skips observations. A sign, an off-by-one at an observation or a
reward on the wrong token shows here first.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms import gae as gae_module
from miles.algorithms.gae import (
    adaptive_lambda,
    discounted_row_sums,
    discounted_sums,
    gae,
)


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_gae_observations_inside_and_behind_are_stepped_over():
    # faults.md row 1
    advantages, returns = gae(
        rewards_NT=torch.zeros(6),
        values_NT=tensor(0.2, 0.4, 5, 5, 0.6, 5),
        loss_mask_NT=tensor(1, 1, 0, 0, 1, 0),
        gamma=0.9,
        lam=0.5,
        terminal_rewards_N=1.0,
    )
    torch.testing.assert_close(advantages, tensor(0.304, 0.320, 0, 0, 0.400, 0), rtol=0, atol=1e-6)
    torch.testing.assert_close(returns, tensor(0.504, 0.720, 0, 0, 1.0, 0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "expected_index"),
    [([1, 1, 0], 1), ([1, 1, 1, 0, 0], 2), ([0, 0, 1, 1, 1], 4), ([0, 1, 0, 1, 0], 3)],
    ids=["tool tail", "right padded", "left padded", "holes"],
)
def test_gae_gamma_zero_terminal_reward_lands_on_last_trainable_token(mask, expected_index):
    # faults.md rows 1 and 4: with gamma 0 nothing but the rewarded token itself sees the reward
    advantages, _ = gae(
        rewards_NT=torch.zeros(len(mask)),
        values_NT=torch.zeros(len(mask)),
        loss_mask_NT=torch.tensor(mask),
        gamma=0.0,
        lam=1.0,
        terminal_rewards_N=10.0,
    )
    expected = torch.zeros(len(mask))
    expected[expected_index] = 10.0
    torch.testing.assert_close(advantages, expected)


def test_gae_left_and_right_padding_give_the_same_numbers():
    # faults.md row 4
    values, rewards = [0.3, -0.2, 0.5], [0.1, 0.0, 0.2]
    common = {"gamma": 0.9, "lam": 0.8, "terminal_rewards_N": 1.0}
    right, _ = gae(
        rewards_NT=tensor(*rewards, 7, 7),
        values_NT=tensor(*values, 9, 9),
        loss_mask_NT=tensor(1, 1, 1, 0, 0),
        **common,
    )
    left, _ = gae(
        rewards_NT=tensor(7, 7, *rewards),
        values_NT=tensor(9, 9, *values),
        loss_mask_NT=tensor(0, 0, 1, 1, 1),
        **common,
    )
    torch.testing.assert_close(right[:3], left[2:])


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "lam", "terminal", "advantages", "returns"),
    [
        ([0, 0, 1], [0.2, 999, 0.4], [1, 0, 1], 1.0, 0.0, [0.8, 0, 0.6], [1, 0, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], 0.5, 1.0, [0.5, 0, 1, 0], [0.5, 0, 1, 0]),
        # reward-to-go is not zeroed at observations (faults.md row 2): 1 at every trainable token
        ([0] * 6, [0] * 6, [1, 1, 0, 0, 1, 1], 1.0, 1.0, [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]),
    ],
)
def test_gae_known_answers(rewards, values, mask, lam, terminal, advantages, returns):
    # formulas.md A8
    got = gae(
        rewards_NT=tensor(*rewards),
        values_NT=tensor(*values),
        loss_mask_NT=tensor(*mask),
        gamma=1.0,
        lam=lam,
        terminal_rewards_N=terminal,
    )
    torch.testing.assert_close(got[0], tensor(*advantages), rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1], tensor(*returns), rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 0.95, 1.0, "rows"]),
)
def test_gae_any_masks_equal_the_loop(reference, lengths, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    longest = max(lengths)
    mask = (rng.random((len(lengths), longest)) < rng.choice([0.1, 0.5, 1.0])).astype(int)
    mask *= np.arange(longest) < np.array(lengths)[:, None]
    mask[:, 0] = 1
    rewards, values = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    terminal = rng.normal(size=len(lengths))
    lam_N = rng.random(len(lengths)) if lam == "rows" else np.full(len(lengths), lam)
    got = gae(
        rewards_NT=torch.tensor(rewards),
        values_NT=torch.tensor(values),
        loss_mask_NT=torch.tensor(mask),
        gamma=gamma,
        lam=torch.tensor(lam_N) if lam == "rows" else lam,
        terminal_rewards_N=torch.tensor(terminal),
    )
    for row in range(len(lengths)):
        expected = reference.gae(rewards[row], values[row], mask[row], gamma, lam_N[row], terminal[row])
        np.testing.assert_allclose(got[0][row].numpy(), expected[0], atol=1e-10)
        np.testing.assert_allclose(got[1][row].numpy(), expected[1], atol=1e-10)


@pytest.mark.parametrize("per_row", [False, True])
def test_gae_rows_in_several_blocks_equal_the_loop(reference, monkeypatch, per_row):
    monkeypatch.setattr(gae_module, "_GROUP_TOKENS", 100)
    rng = np.random.default_rng(2)
    mask = rng.random((7, 40)) < 0.8
    mask[3] = True
    mask[5] = False
    values, terminal = rng.normal(size=mask.shape), np.where(mask.any(1), rng.normal(size=7), 0.0)
    lam_N = rng.random(7) if per_row else np.full(7, 0.9)
    got = gae(
        rewards_NT=torch.zeros(7, 40),
        values_NT=torch.tensor(values),
        loss_mask_NT=torch.tensor(mask),
        gamma=0.97,
        lam=torch.tensor(lam_N) if per_row else 0.9,
        terminal_rewards_N=torch.tensor(terminal),
    )
    for row in range(7):
        expected = reference.gae(np.zeros(40), values[row], mask[row], 0.97, lam_N[row], terminal[row])
        np.testing.assert_allclose(got[0][row].numpy(), expected[0], atol=1e-10)
        np.testing.assert_allclose(got[1][row].numpy(), expected[1], atol=1e-10)


@pytest.mark.parametrize("decay", [0.999, 1.0])
def test_discounted_sums_8192_tokens_equal_the_loop(decay):
    x = np.random.default_rng(0).normal(size=8192)
    expected, carry = np.zeros(8192), 0.0
    for t in range(8191, -1, -1):
        carry = x[t] + decay * carry
        expected[t] = carry
    np.testing.assert_allclose(discounted_sums(torch.tensor(x), decay=decay).numpy(), expected, atol=1e-9)


def test_discounted_row_sums_rows_of_any_length_do_not_leak_into_each_other():
    rng = np.random.default_rng(1)
    counts = np.array([0, 3, 200, 1, 0, 64, 33, 1000, 2])
    decays = rng.random(len(counts))
    rows = [rng.normal(size=n) for n in counts]
    got = discounted_row_sums(np.concatenate(rows), counts_N=counts, decay=decays)
    for x, decay, part in zip(rows, decays, np.split(got, np.cumsum(counts)[:-1]), strict=True):
        expected = [sum(decay**k * x[t + k] for k in range(len(x) - t)) for t in range(len(x))]
        np.testing.assert_allclose(part, expected, atol=1e-10)


def test_gae_nan_outside_the_mask_stays_outside():
    nan = float("nan")
    advantages, returns = gae(
        rewards_NT=tensor(0, nan, 0),
        values_NT=tensor(0.5, nan, 0.5),
        loss_mask_NT=tensor(1, 0, 1),
        gamma=1.0,
        lam=1.0,
        terminal_rewards_N=1.0,
    )
    torch.testing.assert_close(advantages, tensor(0.5, 0, 0.5))
    torch.testing.assert_close(returns, tensor(1, 0, 1))


def test_gae_nan_inside_the_mask_surfaces():
    advantages, _ = gae(
        rewards_NT=torch.zeros(2), values_NT=tensor(0.5, float("nan")), loss_mask_NT=tensor(1, 1), gamma=1.0, lam=1.0
    )
    assert torch.isnan(advantages).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, "gamma must lie in"),
        ({"lam": -0.1}, "lambda must lie in"),
        ({"lam": torch.tensor([0.5, 1.2])}, "lambda must lie in"),
        ({"values_NT": torch.zeros(3)}, "one and the same shape"),
        ({"loss_mask_NT": torch.zeros(2)}, "no trainable token"),
    ],
)
def test_gae_bad_arguments_refused(change, message):
    arguments = {
        "rewards_NT": torch.zeros(2),
        "values_NT": torch.zeros(2),
        "loss_mask_NT": torch.ones(2),
        "gamma": 1.0,
        "lam": 1.0,
        "terminal_rewards_N": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        gae(**(arguments | change))


# --- lambda by length


@pytest.mark.parametrize(
    ("alpha", "length", "expected"),
    [
        (1.5, 0, 1.0),
        (1.5, 1, 1 / 3),
        (1.5, 2, 2 / 3),
        (1.5, 6, 8 / 9),
        (1.5, 100, 0.99333333),
        (1.5, 1000, 0.99933333),
        (0.05, 10, 0.0),
        (0.05, 20, 0.0),
        (0.05, 40, 0.5),
        (0.05, 400, 0.95),
    ],
)
def test_adaptive_lambda_known_answers(alpha, length, expected):
    # formulas.md A8 (SAO) and D (VAPO)
    assert adaptive_lambda([length], alpha=alpha).item() == pytest.approx(expected, abs=1e-8)


def test_adaptive_lambda_below_the_minimum_length_is_one():
    got = adaptive_lambda([0, 3, 4, 5], alpha=1.0, min_length=5)
    assert got.tolist() == [1.0, 1.0, 1.0, 0.8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": 1.0, "min_length": -1}, "minimum length"),
        ({"alpha": 1.0, "num_tokens": [-2]}, "-2 tokens"),
    ],
)
def test_adaptive_lambda_bad_arguments_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        adaptive_lambda(**({"num_tokens": [3]} | arguments))
