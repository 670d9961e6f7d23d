"""The estimator of a run: chosen by settings, blind to samples without a reward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.algorithms import advantages as registry
from miles.config import Args
from miles.ray.advantages import Advantages, returns_outside


def batch(rewards: list[float], masks: list[list[int]]) -> dict[str, Any]:
    return {
        "rewards": rewards,
        "loss_masks": masks,
        "response_lengths": [len(mask) for mask in masks],
        "group_indices": [0] * len(rewards),
        "sample_indices": list(range(len(rewards))),
    }


def test_sample_without_a_reward_counts_in_no_group() -> None:
    """Rewards 1 and 0 have mean .5 and deviation .7071; a third, masked row must not move them."""
    estimate = Advantages(Args.build(advantage_estimator="grpo", n_samples_per_prompt=3))
    rows = batch([1.0, 0.0, 0.0], [[1, 0], [1], [0, 0]]) | {"failed": [False, False, True]}
    advantages, returns = estimate(rows, kl_coef=0.0)
    assert advantages[0] == pytest.approx([0.5 / (0.5**0.5 + 1e-6), 0.0], rel=1e-5)
    assert advantages[1] == pytest.approx([-0.5 / (0.5**0.5 + 1e-6)], rel=1e-5)
    assert [len(row) for row in returns] == [2, 1, 2]
    assert not advantages[2].any()


def test_sample_whose_tokens_are_masked_out_keeps_its_reward_among_its_siblings() -> None:
    """Rewards 1, 1, 0: mean 2/3, deviation .5774; without the third the two would be equal, and learn nothing."""
    estimate = Advantages(Args.build(advantage_estimator="grpo", n_samples_per_prompt=3))
    advantages, _ = estimate(batch([1.0, 1.0, 0.0], [[1], [1], [0, 0]]), kl_coef=0.0)
    assert [row.tolist() for row in advantages] == [pytest.approx([0.57735], abs=1e-5)] * 2 + [[0.0, 0.0]]


def test_rollout_without_any_trainable_token_is_one_line() -> None:
    estimate = Advantages(Args.build(advantage_estimator="grpo", n_samples_per_prompt=2))
    with pytest.raises(ValueError, match="no sample of the rollout has a trainable token"):
        estimate(batch([0.0, 0.0], [[0], [0]]), kl_coef=0.0)


def test_groups_that_lost_all_but_one_to_late_rewards_are_told_as_such() -> None:
    estimate = Advantages(Args.build(advantage_estimator="grpo", n_samples_per_prompt=2))
    rows = batch([1.0, 0.0, 0.0, 0.0], [[1], [0], [0], [1]]) | {"group_indices": [0, 0, 1, 1]}
    rows["failed"] = [False, True, True, False]
    with pytest.raises(ValueError, match=r"^2 of the rollout's 4 samples have no reward \(late or failed\): grpo"):
        estimate(rows, kl_coef=0.0)


def test_own_estimator_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(batch, options):\n    a = batch.rewards_N[batch.row_A] * 2\n    return a, a\n")
    estimate = Advantages(Args.build(advantage_estimator=f"{file}:mine"))
    advantages, _ = estimate(batch([1.0, 3.0], [[1], [1, 1]]), kl_coef=0.0)
    assert [row.tolist() for row in advantages] == [[2.0], [6.0, 6.0]]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("sys.exit(0)", r"SystemExit: 0 \(line 5 of .*mine\.py\)"),
        ("raise KeyError('oops')", r"KeyError: 'oops' \(line 5 of"),
        ("return batch.values_A, a", r"ValueError: the batch has no column values.* \(line 5 of"),
        ("return a", r"an advantage estimator must return \(advantages, returns\)"),
        ("return ['x'] * len(a), a", "advantages of the advantage estimator are not numbers: could not convert"),
        ("return a, [10**400] * len(a)", "returns of the advantage estimator are not numbers"),
        ("return a, a + 1e300", r"returns of the advantage estimator are not finite at row 0 \(sample 0\)"),
        ("return a + 1j, a", "advantages of the advantage estimator are complex numbers"),
        ("import torch; return a, torch.ones(len(a), requires_grad=True)", "RuntimeError: Can't call numpy"),
        ("return a[:1], a", r"advantages of the advantage estimator have shape \(1,\), expected one number for each"),
    ],
)
def test_own_estimator_that_fails_is_named_with_its_line(tmp_path: Path, body: str, what: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\n\ndef mine(batch, options):\n    a = batch.rewards_N[batch.row_A]\n    {body}\n")
    estimate = Advantages(Args.build(advantage_estimator=f"{file}:mine"))
    with pytest.raises(ValueError, match=what) as refused:
        estimate(batch([1.0, 3.0], [[1], [1, 1]]), kl_coef=0.0)
    assert str(refused.value).startswith(f"--advantage-estimator {file}:mine: ")


def test_own_estimator_that_is_async_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("async def mine(batch, options): pass\n")
    with pytest.raises(ValueError, match=rf"^--advantage-estimator {file}:mine: mine is async"):
        Advantages(Args.build(advantage_estimator=f"{file}:mine"))


def test_own_estimator_that_needs_values_without_a_critic_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests look at all that are registered.
    monkeypatch.setattr(registry, "ADVANTAGE_ESTIMATORS", dict(registry.ADVANTAGE_ESTIMATORS))
    file = tmp_path / "needy.py"
    file.write_text(
        "from miles.algorithms.advantages import register_advantage_estimator\n"
        "@register_advantage_estimator('needy', needs_values=True)\n"
        "def needy(batch, options):\n    return batch.values_A, batch.values_A\n"
    )
    with pytest.raises(ValueError, match="needs a critic: --use-critic"):
        Advantages(Args.build(advantage_estimator=f"{file}:needy"))
    Advantages(Args.build(advantage_estimator=f"{file}:needy", use_critic=True))


def test_penalty_is_the_kl_of_the_old_policy_to_the_reference() -> None:
    """k2 of log-probs -1 and -3 is 2; nothing outside the mask."""
    estimate = Advantages(Args.build(kl_coef=0.1, kl_loss_type="k2"))
    columns = {
        "old_log_probs": [np.array([-1.0, np.nan])],
        "ref_log_probs": [np.array([-3.0, 0.0])],
        "loss_masks": [[1, 0]],
    }
    (row,) = estimate.penalty(columns)
    assert row.tolist() == [2.0, 0.0]


@pytest.mark.filterwarnings("error")
def test_penalty_of_read_only_columns_as_ray_hands_them_out_warns_of_nothing() -> None:
    frozen = np.array([-1.0, -3.0], dtype=np.float32)
    frozen.flags.writeable = False
    columns = {"old_log_probs": [frozen], "ref_log_probs": [frozen], "loss_masks": [[1, 1]]}
    estimate = Advantages(Args.build(kl_coef=0.1, kl_loss_type="k3"))
    torch.set_warn_always(True)
    try:
        (row,) = estimate.penalty(columns)
    finally:
        torch.set_warn_always(False)
    assert row.tolist() == [0.0, 0.0]


def test_explained_variance_is_against_rewards_not_against_the_critics_own_targets() -> None:
    """faults.md row 69: with lambda below 1 a critic that knows nothing explains most of its own targets."""
    draw = np.random.default_rng(0)
    rewards = [float(n % 2) for n in range(16)]
    rows = batch(rewards, [[1] * 256 for _ in rewards])
    rows["values"] = [np.full(256, value, dtype=np.float32) for value in draw.normal(0.5, 0.5, len(rewards))]
    estimate = Advantages(Args.build(advantage_estimator="gae", lambd=0.95))
    _, targets = estimate(rows, kl_coef=0.0)
    own = np.concatenate(targets)
    fooled = 1 - np.var(own - np.concatenate(rows["values"])) / np.var(own)
    assert fooled > 0.7
    found = estimate.explained_variance(rows, kl_coef=0.0)
    returns = np.repeat(rewards, 256)
    expected = 1 - np.var(returns - np.concatenate(rows["values"])) / np.var(returns)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found < 0


def test_returns_outside_counts_trainable_tokens_and_names_the_first() -> None:
    """Of four trainable tokens -.5 and 1.5 lie outside [0, 1]; rounding and what is masked out do not."""
    columns = {
        "sample_indices": [7, 8],
        "loss_masks": [[1, 0], [1, 1, 1]],
        "returns": [np.float32([1.0000001, 9.0]), np.float32([0.0, -0.5, 1.5])],
    }
    assert returns_outside(columns, (0.0, 1.0)) == (0.5, "the return -0.5 of sample 8")
    assert returns_outside(columns, (-0.5, 1.5)) == (0.0, None)


def test_explained_variance_of_equal_returns_is_undefined() -> None:
    rows = batch([1.0, 1.0, 0.0], [[1, 1], [1], [0]])
    rows["values"] = [np.zeros(2, np.float32), np.ones(1, np.float32), np.zeros(1, np.float32)]
    assert Advantages(Args.build(advantage_estimator="gae")).explained_variance(rows, kl_coef=0.0) is None
