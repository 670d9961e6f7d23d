"""Importance weights and masks against loops over tokens; what must never enter a weight."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.corrections import Correction, icepop, importance_weights, mean_weight, opsm_keep, tis
from miles.algorithms.policy_losses import PolicyLoss


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def rows_of(seed: int, rows: int = 4, spread: float = 1.0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size=rows)
    old = [-rng.random(n) * 3 for n in lengths]
    rollout = [x + spread * rng.normal(size=len(x)) for x in old]
    masks = [(rng.random(n) < 0.7).astype(int) for n in lengths]
    return old, rollout, masks


def flat(rows) -> torch.Tensor:
    return torch.tensor(np.concatenate(rows))


def row_numbers(rows) -> torch.Tensor:
    return torch.tensor(np.repeat(np.arange(len(rows)), [len(row) for row in rows]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from([None, "truncate", "clip", "mask"]),
    bounds=st.sampled_from([(0.5, 2.0), (0.0, 1.3), (0.9, 1.0001)]),
    reject=st.sampled_from([None, ("token", 0.3, 3.0), ("sequence", 0.5, 2.0), ("geometric", 0.8, 1.25)]),
    veto=st.sampled_from([None, 0.2]),
)
def test_importance_weights_any_rows_equal_the_loop(reference, seed, level, mode, bounds, reject, veto):
    old, rollout, masks = rows_of(seed)
    correction = Correction(
        level=level,
        mode=mode,
        low=bounds[0],
        high=bounds[1],
        reject_level=reject and reject[0],
        **({"reject_low": reject[1], "reject_high": reject[2]} if reject else {}),
        veto=veto,
    )
    weights, metrics = importance_weights(
        correction,
        old_log_probs=flat(old),
        rollout_log_probs=flat(rollout),
        loss_mask=flat(masks),
        row_T=row_numbers(old),
        num_rows=len(old),
    )
    expected = np.concatenate(
        reference.correction_weights(
            old, rollout, masks, level=level, mode=mode, low=bounds[0], high=bounds[1], reject=reject, veto=veto
        )
    )
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-4, atol=1e-6)
    mask = np.concatenate(masks)
    assert metrics["correction_weight"].item() == pytest.approx(expected.sum(), rel=1e-4)
    assert metrics["correction_rejected"].item() == ((expected == 0) & (mask == 1)).sum()


@pytest.mark.parametrize(
    ("correction", "ratio", "weight"),
    [
        (tis(), 3.0, 2.0),
        (tis(), 0.25, 0.25),
        (tis(low=0.5), 0.25, 0.5),
        (icepop(), 0.5, 0.5),
        (icepop(), 5.0, 5.0),
        (icepop(), 0.49, 0.0),
        (icepop(), 5.1, 0.0),
        (Correction(mode="clip"), 0.1, 0.5),
        (Correction(mode="truncate"), 0.1, 0.1),
    ],
)
def test_importance_weights_known_answers(correction, ratio, weight):
    # formulas.md D: TIS clamps to [low, C], IcePop's bounds are inclusive, MIS's lower bound is 1 / upper unless given
    got, _ = importance_weights(
        correction,
        # a float32 log loses the last digit of a bound; the exact double does not
        old_log_probs=torch.tensor([math.log(ratio) * (1 - 1e-7)]),
        rollout_log_probs=tensor(0.0),
        loss_mask=tensor(1),
        row_T=torch.tensor([0]),
        num_rows=1,
    )
    assert got.item() == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("correction", [tis(), icepop(), Correction(level="sequence"), Correction(level="geometric")])
def test_importance_weights_engine_equal_to_old_policy_weigh_exactly_one(correction):
    # faults.md row 32: the current policy has moved far away and must not show in the weight
    policy_loss = PolicyLoss(correction=correction)
    log_probs = tensor(-0.2, -3.0, -1.0)
    columns = {"advantages": tensor(1, -1, 1), "loss_mask": tensor(1, 1, 1), "entropy": torch.zeros(3)}
    columns |= {"old_log_probs": tensor(-1, -1, -1), "rollout_log_probs": tensor(-1, -1, -1)}
    where = {"row_T": torch.tensor([0, 0, 1]), "num_rows": 2}
    corrected, metrics = policy_loss(log_probs=log_probs, **columns, **where)
    plain, _ = PolicyLoss()(log_probs=log_probs, **columns, **where)
    assert torch.equal(corrected, plain)
    assert metrics["correction_weight"].item() == 3.0


def test_importance_weights_are_constants():
    old = tensor(-1.0, -2.0).requires_grad_()
    weights, _ = importance_weights(
        tis(),
        old_log_probs=old,
        rollout_log_probs=tensor(-1.5, -1.5),
        loss_mask=tensor(1, 1),
        row_T=torch.tensor([0, 0]),
        num_rows=1,
    )
    assert not weights.requires_grad


def test_importance_weights_veto_takes_the_whole_sequence_and_no_other():
    weights, metrics = importance_weights(
        Correction(mode="truncate", veto=1e-4),
        old_log_probs=tensor(-12.0, -1.0, -1.0, -12.0),
        rollout_log_probs=tensor(-1.0, -1.0, -1.0, -1.0),
        loss_mask=tensor(1, 1, 1, 0),
        row_T=torch.tensor([0, 0, 1, 1]),
        num_rows=2,
    )
    # a token outside the mask vetoes nothing
    assert weights.tolist() == [0, 0, 1, 0]
    assert metrics["correction_rejected"].item() == 2


def test_importance_weights_batch_normalized_in_parts_have_mean_one_over_the_batch():
    old, rollout, masks = rows_of(7, rows=6)
    correction = Correction(mode="truncate", batch_normalize=True)
    mean = mean_weight(correction, old_log_probs=old, rollout_log_probs=rollout, loss_masks=masks)
    total = 0.0
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        weights, _ = importance_weights(
            correction,
            old_log_probs=flat(old[part]),
            rollout_log_probs=flat(rollout[part]),
            loss_mask=flat(masks[part]),
            row_T=row_numbers(old[part]),
            num_rows=len(old[part]),
            weight_mean=mean,
        )
        total += weights.sum().item()
    assert total / np.concatenate(masks).sum() == pytest.approx(1.0, rel=1e-5)


def test_importance_weights_nan_inside_the_mask_surfaces_and_outside_does_not():
    nan = float("nan")
    for correction in (tis(), icepop(), Correction(level="geometric", reject_level="sequence", veto=1e-4)):
        weights, _ = importance_weights(
            correction,
            old_log_probs=tensor(nan, -1.0, nan),
            rollout_log_probs=tensor(-1.0, -1.0, -1.0),
            loss_mask=tensor(1, 1, 0),
            row_T=torch.tensor([0, 1, 1]),
            num_rows=2,
        )
        assert torch.isnan(weights[0]) and weights[1:].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"level": "word"}, "unknown level"),
        ({"reject_level": "word"}, "unknown level"),
        ({"mode": "drop"}, "unknown mode"),
        ({"low": 3.0, "high": 2.0}, "bounds of weights"),
        ({"low": -1.0}, "bounds of weights"),
        ({"reject_level": "token", "reject_low": 3.0}, "bounds of rejection"),
        ({"veto": 1.5}, "veto"),
    ],
)
def test_correction_bad_settings_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        Correction(**settings_)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), delta=st.sampled_from([1e-4, 0.3]))
def test_opsm_keep_any_rows_equal_the_loop(reference, seed, delta):
    old, log_probs, masks = rows_of(seed)
    advantages = [np.random.default_rng(seed + 1).normal(size=len(row)) for row in old]
    keep, metrics = opsm_keep(
        log_probs=flat(log_probs),
        old_log_probs=flat(old),
        advantages=flat(advantages),
        loss_mask=flat(masks),
        row_T=row_numbers(old),
        num_rows=len(old),
        delta=delta,
    )
    expected = np.concatenate(reference.opsm_kept(log_probs, old, advantages, masks, delta))
    assert keep.tolist() == expected.tolist()
    assert metrics["opsm_dropped"].item() == np.concatenate(masks).sum() - expected.sum()
