"""Estimators over whole batches against NumPy loops, and what a batch may hold: uneven groups, siblings, holes."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms import advantages as advantages_module
from miles.algorithms import aggregation, corrections, kl, policy_losses, value_losses, whitening
from miles.algorithms import gae as gae_module
from miles.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    compute_advantages_and_returns,
    register_advantage_estimator,
    resolve_advantage_estimator,
)
from miles.algorithms.whitening import whiten
from miles.config import choices
from miles.rollout.functions import load_function

GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def make_batch(seed: int = 0, rows: int = 6, groups=None) -> dict:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=rows)
    masks = [(rng.random(n) < 0.7).astype(int) for n in lengths]
    for mask in masks:
        mask[0] = 1
    return {
        "rewards": rng.normal(size=rows).tolist(),
        "values": [rng.normal(size=n).astype(np.float32) for n in lengths],
        "kl": [rng.normal(size=n).astype(np.float32) for n in lengths],
        "loss_masks": [mask.tolist() for mask in masks],
        "group_indices": list(groups) if groups is not None else [7, 3, 7, 7, 3, 3][:rows],
    }


def scalars(rewards, groups, estimator, **more):
    """The advantage of each one-token row."""
    batch = {"rewards": rewards, "group_indices": groups, "loss_masks": [[1]] * len(rewards), **more}
    advantages, _ = compute_advantages_and_returns(batch, estimator=estimator)
    return [float(a[0]) for a in advantages]


# --- GAE over a batch


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize(("lam", "critic_lam"), [(0.6, 1.0), (0.95, None)])
def test_compute_gae_actor_and_critic_match_their_own_loops(reference, lam, critic_lam, kl_coef):
    batch = make_batch()
    advantages, returns = compute_advantages_and_returns(
        batch, estimator="gae", gamma=0.9, lam=lam, critic_lam=critic_lam, kl_coef=kl_coef
    )
    for row, mask in enumerate(batch["loss_masks"]):
        arguments = (-kl_coef * batch["kl"][row].astype(float), batch["values"][row], mask, 0.9)
        actor, _ = reference.gae(*arguments, lam, batch["rewards"][row])
        _, critic = reference.gae(*arguments, lam if critic_lam is None else critic_lam, batch["rewards"][row])
        np.testing.assert_allclose(advantages[row], actor, atol=1e-6)
        np.testing.assert_allclose(returns[row], critic, atol=1e-6)
        assert advantages[row].dtype == returns[row].dtype == np.float32


@pytest.mark.parametrize("estimator", ["gae", "monte_carlo", "reinforce_plus_plus"])
def test_compute_kl_penalty_reaches_critic_and_actor_alike(estimator):
    # faults.md row 7: kl [1, 1], coefficient .1, reward 1: .8 and .9 to go, whoever asks
    batch = {"rewards": [1.0], "values": [[0.0, 0.0]], "kl": [[1.0, 1.0]], "loss_masks": [[1, 1]]}
    advantages, returns = compute_advantages_and_returns(batch, estimator=estimator, kl_coef=0.1)
    np.testing.assert_allclose(returns[0], [0.8, 0.9], atol=1e-6)
    if estimator != "reinforce_plus_plus":
        np.testing.assert_allclose(advantages[0], [0.8, 0.9], atol=1e-6)


@pytest.mark.parametrize("alpha", [1.5, 0.05])
def test_compute_gae_adaptive_lambda_of_each_row_by_its_trainable_tokens(reference, alpha):
    batch = make_batch(seed=3)
    advantages, returns = compute_advantages_and_returns(
        batch, estimator="gae_adaptive", critic_lam=1.0, adaptive_alpha=alpha
    )
    for row, mask in enumerate(batch["loss_masks"]):
        arguments = (np.zeros(len(mask)), batch["values"][row], mask, 1.0)
        actor, _ = reference.gae(*arguments, reference.adaptive_lambda(sum(mask), alpha), batch["rewards"][row])
        _, critic = reference.gae(*arguments, 1.0, batch["rewards"][row])
        np.testing.assert_allclose(advantages[row], actor, atol=1e-6)
        np.testing.assert_allclose(returns[row], critic, atol=1e-6)


def test_compute_gae_adaptive_mode_fixed_takes_lambda():
    batch = make_batch()
    fixed = compute_advantages_and_returns(batch, estimator="gae_adaptive", adaptive_mode="fixed", lam=0.7)
    plain = compute_advantages_and_returns(batch, estimator="gae", lam=0.7)
    for a, b in zip(fixed[0] + fixed[1], plain[0] + plain[1], strict=True):
        np.testing.assert_array_equal(a, b)


def compacted(masks, subsequent, total, **more):
    return {
        "rewards": [1.0] * len(masks),
        "values": [np.zeros(len(mask)) for mask in masks],
        "loss_masks": masks,
        "compaction_trajectory_ids": ["t"] * len(masks),
        "compaction_subsequent_active_tokens": subsequent,
        "compaction_trajectory_active_tokens": [total] * len(masks),
        **more,
    }


def test_compute_gae_compaction_known_answers():
    # formulas.md A8: two segments of two tokens at lambda .5; then alpha 1 over segments of one and three (lambda .75)
    batch = compacted([[1, 1], [1, 1]], [2, 0], 4)
    advantages, _ = compute_advantages_and_returns(batch, estimator="gae", lam=0.5)
    np.testing.assert_allclose(np.array(advantages), [[0.125, 0.25], [0.5, 1.0]])
    batch = compacted([[1], [1, 1, 1]], [3, 0], 4)
    advantages, _ = compute_advantages_and_returns(batch, estimator="gae_adaptive", adaptive_alpha=1.0)
    np.testing.assert_allclose(advantages[0], [0.75**3])
    np.testing.assert_allclose(advantages[1], [0.75**2, 0.75, 1.0])


def test_compute_gae_compaction_critic_target_is_corrected_advantage_plus_value(reference):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=2), rng.normal(size=3)]
    batch = compacted([[1, 1], [1, 0, 1]], [2, 0], 4, values=values)
    advantages, returns = compute_advantages_and_returns(batch, estimator="gae", gamma=0.9, lam=0.8, critic_lam=0.5)
    for row, later in enumerate([2, 0]):
        mask = np.array(batch["loss_masks"][row])
        for lam, found, base in ((0.8, advantages, 0.0), (0.5, returns, values[row] * mask)):
            local, _ = reference.gae(np.zeros(len(mask)), values[row], mask, 0.9, lam, 1.0)
            np.testing.assert_allclose(found[row], local * (0.9 * lam) ** later + base, atol=1e-6)


def test_compute_monte_carlo_compaction_equals_one_uncut_trajectory():
    # arXiv 2607.05378, Eq. 15: the reward's weight is gamma to the number of trainable tokens still to come
    cut = compacted([[1, 1], [1, 0, 1]], [2, 0], 4)
    del cut["values"]
    whole = {"rewards": [1.0], "loss_masks": [[1, 1, 1, 0, 1]]}
    (a, b), _ = compute_advantages_and_returns(cut, estimator="monte_carlo", gamma=0.7)
    (c,), _ = compute_advantages_and_returns(whole, estimator="monte_carlo", gamma=0.7)
    np.testing.assert_allclose(np.concatenate([a, b]), c, atol=1e-7)


def test_compute_kl_penalty_with_compaction_refused():
    batch = compacted([[1], [1]], [1, 0], 2, kl=[[0.1], [0.1]])
    with pytest.raises(ValueError, match="kl_coef must be 0 with compaction"):
        compute_advantages_and_returns(batch, estimator="gae", kl_coef=0.1)


def test_compute_compaction_rewards_that_differ_within_a_trajectory_named():
    batch = compacted([[1], [1]], [1, 0], 2, rewards=[1.0, 0.0], group_indices=[0, 0], sample_indices=[40, 41])
    with pytest.raises(ValueError, match=r"row 0 \(sample 40\) and row 1 \(sample 41\) belong to one trajectory"):
        compute_advantages_and_returns(batch, estimator="rloo")


# --- rewards to go


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_compute_monte_carlo_and_reinforce_plus_plus_equal_the_double_loop(reference, gamma, kl_coef):
    batch = make_batch(seed=5)
    expected = [
        reference.reward_to_go(-kl_coef * kl.astype(float), mask, gamma, reward)
        for kl, mask, reward in zip(batch["kl"], batch["loss_masks"], batch["rewards"], strict=True)
    ]
    options = {"gamma": gamma, "kl_coef": kl_coef}
    advantages, returns = compute_advantages_and_returns(batch, estimator="monte_carlo", **options)
    whitened, same = compute_advantages_and_returns(batch, estimator="reinforce_plus_plus", **options)
    for row, white in enumerate(reference.whiten_rows(expected, batch["loss_masks"])):
        np.testing.assert_allclose(returns[row], expected[row], atol=1e-6)
        np.testing.assert_allclose(same[row], expected[row], atol=1e-6)
        values = np.where(batch["loss_masks"][row], batch["values"][row], 0)
        np.testing.assert_allclose(advantages[row], expected[row] - values, atol=1e-6)
        np.testing.assert_allclose(whitened[row], white, atol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "mask", "expected"),
    [(1.0, [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]), (0.5, [1, 0, 1], [0.5, 0, 1])],
)
def test_compute_reinforce_return_is_not_zeroed_at_observations(gamma, mask, expected):
    # faults.md row 2
    batch = {"rewards": [1.0], "loss_masks": [mask]}
    _, returns = compute_advantages_and_returns(batch, estimator="reinforce_plus_plus", gamma=gamma)
    np.testing.assert_allclose(returns[0], expected)


def test_compute_reinforce_plus_plus_baseline_centres_groups_then_whitens(reference):
    batch = make_batch(seed=6)
    groups, rewards = batch["group_indices"], batch["rewards"]
    centred = reference.outcome_advantages("dr_grpo", rewards, groups)
    rows = [
        reference.reward_to_go(-0.1 * kl.astype(float), mask, 0.9, reward)
        for kl, mask, reward in zip(batch["kl"], batch["loss_masks"], centred, strict=True)
    ]
    advantages, _ = compute_advantages_and_returns(
        batch, estimator="reinforce_plus_plus_baseline", gamma=0.9, kl_coef=0.1
    )
    for got, expected in zip(advantages, reference.whiten_rows(rows, batch["loss_masks"]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_compute_reinforce_plus_plus_baseline_lone_trajectory_gets_0_and_moves_no_other():
    # centred tokens .5 .5 .5 -.5: mean .25, variance .1875, deviation .4330; the lone one is not among them
    batch = {"rewards": [1.0, 0.0, 1.0], "group_indices": [0, 0, 1], "loss_masks": [[1, 1, 1], [1], [1]]}
    advantages, returns = compute_advantages_and_returns(batch, estimator="reinforce_plus_plus_baseline")
    np.testing.assert_allclose(np.concatenate(advantages), [0.57735] * 3 + [-1.73205, 0.0], atol=1e-5)
    assert [row.tolist() for row in returns] == [[1.0, 1.0, 1.0], [0.0], [1.0]]


# --- groups


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_compute_group_estimators_any_sizes_in_any_order_equal_the_loop(reference, sizes, seed, estimator):
    if estimator != "rloo" and max(sizes) == 1:
        sizes = [*sizes, 2]
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(rng.permutation(100)[: len(sizes)], sizes)).tolist()
    rewards = rng.choice([0.0, 1.0, 0.3, -2.0], size=len(groups)).tolist()
    masks = [(rng.random(4) < 0.6).astype(int).tolist() for _ in groups]
    batch = {"rewards": rewards, "group_indices": groups, "loss_masks": masks}
    advantages, returns = compute_advantages_and_returns(batch, estimator=estimator)
    expected = reference.outcome_advantages(estimator, rewards, groups)
    for got, to_go, one, mask, reward in zip(advantages, returns, expected, masks, rewards, strict=True):
        np.testing.assert_allclose(got, one * np.array(mask), atol=1e-6)
        np.testing.assert_allclose(to_go, reward * np.array(mask), atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_compute_uneven_groups_each_have_mean_zero(estimator):
    # faults.md row 18
    rewards, groups = [1, 2, 3, 4, 10, 12, 5, 6, 7], [0] * 4 + [1] * 2 + [2] * 3
    got = scalars(rewards, groups, estimator)
    for group in range(3):
        assert sum(a for a, g in zip(got, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-5)
    assert scalars([5.0, 5.0, 5.0, 1.0, 2.0], [0, 0, 0, 1, 1], estimator)[:3] == [0.0, 0.0, 0.0]


def test_compute_grpo_sizes_3_2_3_no_group_is_cut_by_position():
    # faults.md row 20: slices of three would mix groups, and leave a tail of two equal rewards to be blown up
    rewards = [0, 0, 1, 1, 1, 0, 1, 1]
    got = scalars(rewards, [0, 0, 0, 1, 1, 2, 2, 2], "grpo")
    assert got[3:5] == [0.0, 0.0]
    assert got[:3] == pytest.approx([-1 / 3 / 3**-0.5, -1 / 3 / 3**-0.5, 2 / 3 / 3**-0.5], abs=1e-5)
    assert max(map(abs, got)) < 1.2


@pytest.mark.parametrize(("estimator", "expected"), [("grpo", 0.0), ("dr_grpo", 0.0), ("rloo", 3.0)])
def test_compute_lone_trajectory_among_groups(estimator, expected):
    # faults.md row 23 (never NaN); RLOO without a baseline keeps the reward (formulas.md D)
    assert scalars([3.0, 1.0, 2.0], [5, 6, 6], estimator)[0] == expected


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_compute_one_sample_per_prompt_refused_where_nothing_would_be_learned(estimator):
    # faults.md row 14
    with pytest.raises(ValueError, match="every group has one"):
        scalars([1.0, 0.0], [0, 1], estimator)


def test_compute_statistics_are_taken_over_rows_not_columns():
    # faults.md row 14: two prompts of three answers, of three tokens each
    batch = {"rewards": [1, 2, 3, 10, 10, 40], "group_indices": [0, 0, 0, 1, 1, 1], "loss_masks": [[1, 1, 1]] * 6}
    advantages, _ = compute_advantages_and_returns(batch, estimator="dr_grpo")
    np.testing.assert_allclose(np.array(advantages), np.array([[-1], [0], [1], [-10], [-10], [20]]) * np.ones(3))


@pytest.mark.parametrize("estimator", GROUPED)
def test_compute_fan_out_siblings_count_once_in_their_group(estimator):
    # trajectory "b" has three rows; its reward must not weigh three times in the group's mean
    rewards, trajectories = [1.0, 4.0, 4.0, 4.0, 1.0], ["a", "b", "b", "b", "c"]
    batch = {
        "rewards": rewards,
        "group_indices": [0] * 5,
        "trajectory_ids": trajectories,
        "loss_masks": [[1], [1, 1], [1], [0, 1], [1]],
    }
    advantages, _ = compute_advantages_and_returns(batch, estimator=estimator)
    if estimator == "reinforce_plus_plus_baseline":
        tokens = np.array([-1, 2, 2, 2, 2, -1.0])
        white = (tokens - tokens.mean()) / tokens.std()
        np.testing.assert_allclose(np.concatenate(advantages), [*white[:4], 0, *white[4:]], atol=1e-6)
        return
    single = scalars([1.0, 4.0, 1.0], [0, 0, 0], estimator)
    by_row = dict(zip("abc", single, strict=True))
    for got, trajectory, mask in zip(advantages, trajectories, batch["loss_masks"], strict=True):
        np.testing.assert_allclose(got, by_row[trajectory] * np.array(mask), atol=1e-6)


def test_compute_fan_out_siblings_of_two_groups_refused():
    with pytest.raises(ValueError, match="belong to one trajectory, but differ in group"):
        scalars([1.0, 1.0], [0, 1], "rloo", trajectory_ids=["x", "x"])


def test_compute_group_estimators_kl_penalty_of_all_tokens_enters_the_reward():
    # R = reward - kl_coef * sum of kl (arXiv 2402.14740); observations pay nothing
    batch = {
        "rewards": [1.0, 1.0],
        "group_indices": [0, 0],
        "kl": [[1.0, 2.0, 50.0], [1.0, 50.0, 4.0]],
        "loss_masks": [[1, 1, 0], [1, 0, 1]],
    }
    advantages, _ = compute_advantages_and_returns(batch, estimator="dr_grpo", kl_coef=0.1)
    np.testing.assert_allclose(advantages[0], [0.1, 0.1, 0], atol=1e-7)
    np.testing.assert_allclose(advantages[1], [-0.1, 0, -0.1], atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(estimator=st.sampled_from(sorted(ADVANTAGE_ESTIMATORS)), seed=st.integers(0, 1000), normalize=st.booleans())
def test_compute_any_estimator_does_not_depend_on_the_order_of_rows(estimator, seed, normalize):
    batch = make_batch(seed=seed)
    order = np.random.default_rng(seed).permutation(6)
    shuffled = {name: [column[i] for i in order] for name, column in batch.items()}
    options = {"estimator": estimator, "gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "normalize": normalize}
    plain = compute_advantages_and_returns(batch, **options)
    mixed = compute_advantages_and_returns(shuffled, **options)
    for a, b in zip(plain, mixed, strict=True):
        for place, row in enumerate(order):
            np.testing.assert_allclose(b[place], a[row], atol=1e-6)


# --- what is refused


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1.0"])
def test_compute_reward_that_is_no_number_names_the_sample(reward):
    # faults.md row 24
    batch = {"rewards": [1.0, reward], "loss_masks": [[1], [1]], "values": [[0], [0]], "sample_indices": [8, 9]}
    with pytest.raises(ValueError, match=r"rewards of row 1 \(sample 9\) is"):
        compute_advantages_and_returns(batch, estimator="gae")


@pytest.mark.parametrize(
    ("estimator", "column"), [("gae", "values"), ("grpo", "group_indices"), ("monte_carlo", "kl")]
)
def test_compute_missing_column_named(estimator, column):
    batch = make_batch()
    del batch[column]
    with pytest.raises(ValueError, match=f"no column {column}"):
        compute_advantages_and_returns(batch, estimator=estimator, kl_coef=0.1)


def test_compute_non_finite_value_names_the_row():
    batch = make_batch()
    batch["values"][3][0] = np.inf
    with pytest.raises(ValueError, match="values of row 3: not finite"):
        compute_advantages_and_returns(batch, estimator="gae")
    batch["values"][3] = batch["values"][3][:0]
    with pytest.raises(ValueError, match="values of row 3: shape"):
        compute_advantages_and_returns(batch, estimator="gae")


def test_compute_non_finite_value_of_an_observation_is_ignored():
    batch = {"rewards": [1.0], "values": [[0.5, np.nan, 0.5]], "loss_masks": [[1, 0, 1]]}
    advantages, returns = compute_advantages_and_returns(batch, estimator="gae")
    np.testing.assert_allclose(advantages[0], [0.5, 0, 0.5])
    np.testing.assert_allclose(returns[0], [1, 0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, "gamma must lie"),
        ({"lam": -1.0}, "lambda must lie"),
        ({"critic_lam": 2.0}, "critic's lambda must lie"),
        ({"kl_coef": -0.1}, "kl_coef must be"),
        ({"adaptive_mode": "auto"}, "adaptive_mode must be"),
    ],
)
def test_compute_bad_options_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages_and_returns(make_batch(), estimator="gae", **options)


def test_compute_row_without_trainable_token_is_all_zero():
    batch = {"rewards": [1.0, 1.0], "values": [np.ones(2), np.ones(1)], "loss_masks": [[0, 0], [1]]}
    advantages, returns = compute_advantages_and_returns(batch, estimator="gae", normalize=True)
    assert advantages[0].tolist() == returns[0].tolist() == [0.0, 0.0]


# --- one's own


def test_registry_function_of_ones_own_by_name_and_by_itself():
    @register_advantage_estimator("test_only_reward", needs_values=True)
    def reward_itself(batch, options):
        advantages_A = batch.rewards_N[batch.row_A]
        return advantages_A, advantages_A * options.gamma

    try:
        batch = {"rewards": [2.0, 3.0], "loss_masks": [[1, 0], [1, 1]]}
        for estimator in ("test_only_reward", reward_itself):
            assert resolve_advantage_estimator(estimator).needs_values
            advantages, returns = compute_advantages_and_returns(batch, estimator=estimator, gamma=0.5)
            assert [a.tolist() for a in advantages] == [[2, 0], [3, 3]]
            assert [r.tolist() for r in returns] == [[1, 0], [1.5, 1.5]]
        with pytest.raises(ValueError, match="already an advantage estimator"):
            register_advantage_estimator("test_only_reward")(lambda batch, options: (None, None))
    finally:
        del ADVANTAGE_ESTIMATORS["test_only_reward"]


def test_registry_file_of_ones_own_by_path(tmp_path):
    # as --advantage-estimator FILE.py:FUNCTION does: the loader brings the function, the registry what it needs
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from miles.algorithms.advantages import register_advantage_estimator\n"
        "@register_advantage_estimator('longest_first', needs_groups=True)\n"
        "def longest_first(batch, options):\n"
        "    advantages_A = batch.on_tokens(batch.grouped_rewards().centred_M) * batch.counts_N[batch.row_A]\n"
        "    return advantages_A, batch.monte_carlo(batch.rewards_N, options.gamma)\n"
    )
    batch = {"rewards": [1.0, 0.0], "group_indices": [0, 0], "loss_masks": [[1, 1, 0], [1]]}
    try:
        # twice: whoever loads the file again gets a new function under the old name
        for _ in range(2):
            function = load_function(f"{tmp_path / 'mine.py'}:longest_first")
            assert resolve_advantage_estimator(function).needs_groups
        advantages, returns = compute_advantages_and_returns(batch, estimator=function)
        assert [a.tolist() for a in advantages] == [[1, 1, 0], [-0.5]]
        assert [r.tolist() for r in returns] == [[1, 1, 0], [0]]
    finally:
        del ADVANTAGE_ESTIMATORS["longest_first"]


def test_registry_example_of_the_documentation_runs():
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    try:
        exec(text.split("```python\n")[1].split("```")[0], {})
        batch = {"rewards": [1.0, 0.0, 0.5], "group_indices": [0, 0, 0], "loss_masks": [[1, 1], [1], [1]]}
        advantages, returns = compute_advantages_and_returns(batch, estimator="best_of_group")
        assert [a.tolist() for a in advantages] == [[0.5, 0.5], [0], [0]]
        assert [r.tolist() for r in returns] == [[1, 1], [0], [0.5]]
    finally:
        del ADVANTAGE_ESTIMATORS["best_of_group"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda n: np.zeros(n), "must return"),
        (lambda n: (np.zeros(n + 1), np.zeros(n)), "advantages of .* have shape"),
        (lambda n: (np.zeros(n), np.full(n, np.nan)), "returns of .* not finite at row 0"),
    ],
)
def test_registry_bad_result_of_ones_own_named(result, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages_and_returns(make_batch(), estimator=lambda batch, options: result(len(batch.row_A)))


def test_registry_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown advantage estimator 'vtrace', expected FILE.py:FUNCTION.* gae,"):
        compute_advantages_and_returns(make_batch(), estimator="vtrace")


@pytest.mark.parametrize("name", choices.ESTIMATORS)
def test_estimator_follows_the_settings_that_it_reads_and_no_other(name):
    # a setting that an estimator does not read is refused before the run, so it must not change what the run learns
    batch = make_batch(seed=2)
    options = {
        "gamma": ("gamma", 0.9),
        "lambd": ("lam", 0.5),
        "critic_lambd": ("critic_lam", 0.25),
        "kl_coef": ("kl_coef", 0.3),
        "gae_adaptive_alpha": ("adaptive_alpha", 0.4),
        "gae_adaptive_min_length": ("adaptive_min_length", 4),
        "gae_adaptive_mode": ("adaptive_mode", "fixed"),
    }
    assert options.keys() == choices.ESTIMATOR_SETTINGS | {"kl_coef"}
    reads = choices.ESTIMATORS[name].reads | {"kl_coef"}
    plain = compute_advantages_and_returns(batch, estimator=name, lam=0.9)
    for setting, (option, value) in options.items():
        changed = compute_advantages_and_returns(batch, estimator=name, **({"lam": 0.9} | {option: value}))
        columns = list(zip(plain, changed, strict=True))
        # where there is no critic its targets may follow; what the actor learns from may not
        looked_at = columns if setting in reads or setting != "gamma" else columns[:1]
        differs = any(
            not np.array_equal(a, b) for before, after in looked_at for a, b in zip(before, after, strict=True)
        )
        assert differs == (setting in reads), setting


def test_registry_and_the_settings_know_the_same_estimators_and_losses():
    # the settings cannot import torch, so they hold a second list
    assert ADVANTAGE_ESTIMATORS.keys() == choices.ESTIMATORS.keys()
    for name, ours in ADVANTAGE_ESTIMATORS.items():
        theirs = choices.ESTIMATORS[name]
        assert (theirs.critic is True, theirs.groups) == (ours.needs_values, ours.needs_groups), name
    assert set(policy_losses.POLICY_OBJECTIVES) == choices.OBJECTIVES.keys()


def test_public_functions_take_masks_by_name_only():
    # faults.md row 16: advantages passed where the mask was expected
    modules = (advantages_module, aggregation, corrections, gae_module, kl, policy_losses, value_losses, whitening)
    found = 0
    for module in modules:
        scopes = [module, *(owner for _, owner in inspect.getmembers(module, inspect.isclass))]
        for name, function in (pair for scope in scopes for pair in inspect.getmembers(scope, inspect.isfunction)):
            if function.__module__ != module.__name__ or (name.startswith("_") and name != "__call__"):
                continue
            parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
            named = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
            for parameter in parameters:
                if "mask" in parameter.name:
                    found += 1
                    # the only one that has a place cannot change it with another
                    assert parameter in named or len(parameters) - len(named) == 1, (name, parameter.name)
    assert found > 10


# --- whitening


def test_compute_normalized_advantages_are_white_and_returns_stay_raw():
    batch = make_batch(rows=6)
    plain = compute_advantages_and_returns(batch, estimator="gae", lam=0.9)
    white = compute_advantages_and_returns(batch, estimator="gae", lam=0.9, normalize=True)
    pooled = np.concatenate([a[np.array(m, bool)] for a, m in zip(white[0], batch["loss_masks"], strict=True)])
    assert abs(pooled.mean()) < 1e-6
    assert abs(pooled.std() - 1) < 1e-5
    for a, b in zip(plain[1], white[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_whiten_padding_counts_in_neither_mean_nor_variance():
    # faults.md row 12: mean 2, variance 1 over the mask
    torch.testing.assert_close(whiten(tensor(1, 3, 0, 0), mask=tensor(1, 1, 0, 0)), tensor(-1, 1, 0, 0))


def test_whiten_constant_advantages_give_zero_not_nan():
    # faults.md row 23
    assert whiten(tensor(5), mask=tensor(1)).item() == 0.0
    assert whiten(tensor(), mask=tensor()).numel() == 0


def test_whiten_nan_outside_the_mask_ignored_inside_surfaces():
    nan = float("nan")
    torch.testing.assert_close(whiten(tensor(1, nan, 3), mask=tensor(1, 0, 1)), tensor(-1, 0, 1))
    assert torch.isnan(whiten(tensor(1, nan, 3), mask=tensor(1, 1, 1))).all()


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
