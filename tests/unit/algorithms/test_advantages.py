"""GAE against a per-token loop in NumPy and against values worked out by hand.

The loop below is the reference: it walks the response backwards and simply skips observations. A sign, an off-by-one
at an observation or a reward on the wrong token shows here first.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.advantages import compute_advantages_and_returns, discounted_sums, gae, whiten


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def loop_gae(rewards, values, mask, gamma, lam, terminal_reward):
    """The definition, one token at a time, from the last to the first."""
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    next_value = next_advantage = 0.0
    last = True
    for t in range(len(values) - 1, -1, -1):
        if not mask[t]:
            continue
        reward = rewards[t] + (terminal_reward if last else 0.0)
        last = False
        next_advantage = reward + gamma * next_value - values[t] + gamma * lam * next_advantage
        advantages[t], returns[t] = next_advantage, next_advantage + values[t]
        next_value = values[t]
    return advantages, returns


def test_gae_observations_inside_and_behind_are_stepped_over():
    # faults.md row 1
    advantages, returns = gae(
        rewards_T=torch.zeros(6),
        values_T=tensor(0.2, 0.4, 5, 5, 0.6, 5),
        loss_mask_T=tensor(1, 1, 0, 0, 1, 0),
        gamma=0.9,
        lam=0.5,
        terminal_reward=1.0,
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
        rewards_T=torch.zeros(len(mask)),
        values_T=torch.zeros(len(mask)),
        loss_mask_T=torch.tensor(mask),
        gamma=0.0,
        lam=1.0,
        terminal_reward=10.0,
    )
    expected = torch.zeros(len(mask))
    expected[expected_index] = 10.0
    torch.testing.assert_close(advantages, expected)


def test_gae_left_and_right_padding_give_the_same_numbers():
    # faults.md row 4
    values, rewards = [0.3, -0.2, 0.5], [0.1, 0.0, 0.2]
    common = {"gamma": 0.9, "lam": 0.8, "terminal_reward": 1.0}
    right, _ = gae(
        rewards_T=tensor(*rewards, 7, 7), values_T=tensor(*values, 9, 9), loss_mask_T=tensor(1, 1, 1, 0, 0), **common
    )
    left, _ = gae(
        rewards_T=tensor(7, 7, *rewards), values_T=tensor(9, 9, *values), loss_mask_T=tensor(0, 0, 1, 1, 1), **common
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
        rewards_T=tensor(*rewards),
        values_T=tensor(*values),
        loss_mask_T=tensor(*mask),
        gamma=1.0,
        lam=lam,
        terminal_reward=terminal,
    )
    torch.testing.assert_close(got[0], tensor(*advantages), rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1], tensor(*returns), rtol=0, atol=1e-6)


def test_gae_gamma_half_observation_costs_no_discount():
    # faults.md row 2, second input: one discount between two trainable tokens, however long the observation
    _, returns = gae(
        rewards_T=torch.zeros(3),
        values_T=torch.zeros(3),
        loss_mask_T=tensor(1, 0, 1),
        gamma=0.5,
        lam=1.0,
        terminal_reward=1.0,
    )
    torch.testing.assert_close(returns, tensor(0.5, 0.0, 1.0))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 420),
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 0.95, 1.0]),
)
def test_gae_any_mask_equals_the_loop(length, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    mask = (rng.random(length) < rng.choice([0.1, 0.5, 1.0])).astype(int)
    mask[rng.integers(length)] = 1
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    expected = loop_gae(rewards, values, mask, gamma, lam, 0.7)
    got = gae(
        rewards_T=torch.tensor(rewards),
        values_T=torch.tensor(values),
        loss_mask_T=torch.tensor(mask),
        gamma=gamma,
        lam=lam,
        terminal_reward=0.7,
    )
    np.testing.assert_allclose(got[0].numpy(), expected[0], atol=1e-10)
    np.testing.assert_allclose(got[1].numpy(), expected[1], atol=1e-10)


def test_discounted_sums_8192_tokens_equal_the_loop():
    x = np.random.default_rng(0).normal(size=8192)
    expected, carry = np.zeros(8192), 0.0
    for t in range(8191, -1, -1):
        carry = x[t] + 0.999 * carry
        expected[t] = carry
    np.testing.assert_allclose(discounted_sums(torch.tensor(x), decay=0.999).numpy(), expected, atol=1e-9)


def test_gae_nan_outside_the_mask_stays_outside():
    nan = float("nan")
    advantages, returns = gae(
        rewards_T=tensor(0, nan, 0),
        values_T=tensor(0.5, nan, 0.5),
        loss_mask_T=tensor(1, 0, 1),
        gamma=1.0,
        lam=1.0,
        terminal_reward=1.0,
    )
    torch.testing.assert_close(advantages, tensor(0.5, 0, 0.5))
    torch.testing.assert_close(returns, tensor(1, 0, 1))


def test_gae_nan_inside_the_mask_surfaces():
    advantages, _ = gae(
        rewards_T=torch.zeros(2), values_T=tensor(0.5, float("nan")), loss_mask_T=tensor(1, 1), gamma=1.0, lam=1.0
    )
    assert torch.isnan(advantages).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, "gamma must lie in"),
        ({"lam": -0.1}, "lambda must lie in"),
        ({"values_T": torch.zeros(3)}, "one and the same length"),
        ({"loss_mask_T": torch.zeros(2)}, "no trainable token"),
    ],
)
def test_gae_bad_arguments_refused(change, message):
    arguments = {
        "rewards_T": torch.zeros(2),
        "values_T": torch.zeros(2),
        "loss_mask_T": torch.ones(2),
        "gamma": 1.0,
        "lam": 1.0,
        "terminal_reward": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        gae(**(arguments | change))


def make_batch(seed: int = 0, rows: int = 5):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=rows)
    masks = [(rng.random(n) < 0.7).astype(int) for n in lengths]
    for mask in masks:
        mask[0] = 1
    return {
        "rewards": rng.normal(size=rows).tolist(),
        "values": [rng.normal(size=n).astype(np.float32) for n in lengths],
        "loss_masks": [mask.tolist() for mask in masks],
    }


def test_compute_advantages_critic_lambda_differs_each_matches_its_own_loop():
    batch = make_batch()
    advantages, returns = compute_advantages_and_returns(
        batch, estimator="gae", gamma=0.9, lam=0.6, critic_lam=1.0, normalize=False
    )
    for row in range(5):
        arguments = (np.zeros(len(batch["values"][row])), batch["values"][row], batch["loss_masks"][row], 0.9)
        actor, _ = loop_gae(*arguments, 0.6, batch["rewards"][row])
        _, critic = loop_gae(*arguments, 1.0, batch["rewards"][row])
        np.testing.assert_allclose(advantages[row], actor, atol=1e-5)
        np.testing.assert_allclose(returns[row], critic, atol=1e-5)
        assert advantages[row].dtype == returns[row].dtype == np.float32


def test_compute_advantages_row_without_trainable_token_is_all_zero():
    batch = {"rewards": [1.0, 1.0], "values": [np.ones(2), np.ones(1)], "loss_masks": [[0, 0], [1]]}
    advantages, returns = compute_advantages_and_returns(batch, estimator="gae", gamma=1.0, lam=1.0, normalize=True)
    assert advantages[0].tolist() == returns[0].tolist() == [0.0, 0.0]


def test_compute_advantages_non_finite_value_names_the_row():
    batch = make_batch()
    batch["values"][3][0] = np.inf
    with pytest.raises(ValueError, match="row 3"):
        compute_advantages_and_returns(batch, estimator="gae", gamma=1.0, lam=1.0)


def test_compute_advantages_unknown_estimator_refused():
    with pytest.raises(ValueError, match="unknown advantage estimator 'vtrace'"):
        compute_advantages_and_returns(make_batch(), estimator="vtrace", gamma=1.0, lam=1.0)


def test_compute_advantages_normalized_returns_stay_raw():
    batch = make_batch(rows=8)
    plain = compute_advantages_and_returns(batch, estimator="gae", gamma=1.0, lam=0.9)
    white = compute_advantages_and_returns(batch, estimator="gae", gamma=1.0, lam=0.9, normalize=True)
    pooled = np.concatenate([a[np.array(m, bool)] for a, m in zip(white[0], batch["loss_masks"], strict=True)])
    assert abs(pooled.mean()) < 1e-6
    assert abs(pooled.std() - 1) < 1e-5
    for a, b in zip(plain[1], white[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_whiten_padding_counts_in_neither_mean_nor_variance():
    # faults.md row 12: mean 2, variance 1 over the mask
    (white,) = whiten(advantages_N=[tensor(1, 3, 0, 0)], loss_masks_N=[tensor(1, 1, 0, 0)])
    torch.testing.assert_close(white, tensor(-1, 1, 0, 0))


def test_whiten_sample_without_tokens_does_not_change_the_others():
    # faults.md row 11: a share without tokens takes part and changes nothing
    one, empty = whiten(advantages_N=[tensor(1, 2, 3), tensor()], loss_masks_N=[tensor(1, 1, 1), tensor()])
    torch.testing.assert_close(one, tensor(-1.2247449, 0, 1.2247449))
    assert empty.numel() == 0


def test_whiten_constant_advantages_give_zero_not_nan():
    # faults.md row 23
    (white,) = whiten(advantages_N=[tensor(5)], loss_masks_N=[tensor(1)])
    assert white.item() == 0.0


def test_whiten_nan_outside_the_mask_ignored_inside_surfaces():
    nan = float("nan")
    (outside,) = whiten(advantages_N=[tensor(1, nan, 3)], loss_masks_N=[tensor(1, 0, 1)])
    torch.testing.assert_close(outside, tensor(-1, 0, 1))
    (inside,) = whiten(advantages_N=[tensor(1, nan, 3)], loss_masks_N=[tensor(1, 1, 1)])
    assert torch.isnan(inside).all()


def test_gae_returns_lambda_below_one_flatter_a_critic_that_knows_nothing():
    # faults.md row 69: why explained variance is judged against Monte-Carlo (lambda 1) returns. The critic answers one
    # random constant per sequence; lambda-returns are mostly made of that constant.
    rng = np.random.default_rng(0)
    length, rows = 256, 120
    batch = {
        "rewards": [float(i % 2) for i in range(rows)],
        "values": [np.full(length, rng.random(), dtype=np.float32) for _ in range(rows)],
        "loss_masks": [[1] * length] * rows,
    }
    values = np.concatenate(batch["values"])

    def explained(lam: float) -> float:
        _, returns = compute_advantages_and_returns(batch, estimator="gae", gamma=1.0, lam=lam)
        pooled = np.concatenate(returns)
        return float(1 - np.var(pooled - values) / np.var(pooled))

    assert explained(0.95) > 0.75
    assert explained(1.0) < -0.2
