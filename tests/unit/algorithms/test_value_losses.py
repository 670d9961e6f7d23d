"""Value head: known answers of the targets, losses against NumPy, explained variance against its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.value_losses import (
    EV_STATS,
    MIN_TARGET_VARIANCE,
    classification_value_loss,
    explained_variance,
    explained_variance_from_stats,
    explained_variance_stats,
    hl_gauss_targets,
    mse_value_loss,
    two_hot_targets,
    value_from_logits,
)
from miles.contracts import value_report

UNIT = [0.0, 1.0]


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


# --- targets


@pytest.mark.parametrize(
    ("mean", "first_bin", "probabilities", "decoded", "entropy"),
    [
        (0.0, 0, [0.662221, 0.307345, 0.029861, 0.000572], 0.007376, 0.744684),
        (0.5, 22, [0.000428, 0.022321, 0.229742, 0.495015, 0.229742, 0.022321, 0.000428], 0.5, 1.200301),
        (0.505, 22, [0.000123, 0.009692, 0.148840, 0.471903, 0.321651, 0.046440, 0.001343], 0.505, 1.200323),
        (0.99, 48, [0.096151, 0.449817, 0.449817], 0.986904, 0.967154),
        (1.0, 47, [0.000572, 0.029861, 0.307345, 0.662221], 0.992624, 0.744684),
    ],
)
def test_hl_gauss_targets_known_answers(mean, first_bin, probabilities, decoded, entropy):
    # formulas.md A7; 22 + 3 = bin 25 is the centre
    target = hl_gauss_targets(returns_T=tensor(mean).double(), num_bins=51, reward_range=UNIT, sigma_ratio=0.75)[0]
    got = target[first_bin : first_bin + len(probabilities)].tolist()
    assert got == pytest.approx(probabilities, abs=2e-6)
    assert target.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert (target * torch.linspace(0, 1, 51)).sum().item() == pytest.approx(decoded, abs=2e-6)
    assert -(target * target.clamp(min=1e-300).log()).sum().item() == pytest.approx(entropy, abs=2e-6)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(-3, 3), num_bins=st.integers(2, 101))
def test_two_hot_targets_mean_is_the_clamped_return(value, num_bins):
    target = two_hot_targets(
        returns_T=torch.tensor([value], dtype=torch.float64), num_bins=num_bins, reward_range=[-1, 2]
    )
    assert (target >= 0).all()
    assert (target > 0).sum() <= 2
    decoded = (target[0] * torch.linspace(-1, 2, num_bins, dtype=torch.float64)).sum().item()
    assert decoded == pytest.approx(min(max(value, -1), 2), abs=1e-9)


def test_two_hot_targets_return_on_a_bin_fills_that_bin():
    target = two_hot_targets(returns_T=tensor(0, 0.25, 1), num_bins=5, reward_range=UNIT)
    torch.testing.assert_close(target, torch.eye(5)[[0, 1, 4]])


@pytest.mark.parametrize("make", [two_hot_targets, hl_gauss_targets])
def test_targets_nan_return_surfaces(make):
    assert torch.isnan(make(returns_T=tensor(float("nan")), num_bins=5, reward_range=UNIT)).any()


# --- values


def test_value_from_logits_classification_is_the_softmax_mean():
    logits = np.random.default_rng(0).normal(size=(3, 51))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    got = value_from_logits(logits_TB=torch.tensor(logits), loss_type="classification", reward_range=[-1.0, 3.0])
    np.testing.assert_allclose(got.numpy(), weights @ np.linspace(-1, 3, 51), atol=1e-6)


def test_value_from_logits_mse_passes_the_head_through_unscaled():
    # faults.md row 9: no temperature anywhere near a value
    got = value_from_logits(logits_TB=tensor(1, 2, 3, 4).unsqueeze(-1), loss_type="mse", reward_range=UNIT)
    assert got.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("width", "loss_type"), [(51, "mse"), (1, "classification")])
def test_value_from_logits_head_of_the_other_loss_refused(width, loss_type):
    with pytest.raises(ValueError, match="needs a head of"):
        value_from_logits(logits_TB=torch.zeros(2, width), loss_type=loss_type, reward_range=UNIT)


# --- losses


def test_mse_value_loss_offline_is_the_square_without_a_half():
    loss, metrics = mse_value_loss(values=tensor(0.5, 2.0), returns=tensor(1.0, 0.0), loss_mask=tensor(1, 1))
    torch.testing.assert_close(loss, tensor(0.25, 4.0))
    assert metrics["value_loss"].item() == pytest.approx(4.25)


def test_mse_value_loss_clipped_takes_the_larger_and_stops_its_gradient():
    # old .5, clip .2. V=.9, R=1: clipped V .7 is worse, no gradient. V=.9, R=0: plain is worse, gradient 2(V-R)
    values = tensor(0.9, 0.9).requires_grad_()
    loss, metrics = mse_value_loss(
        values=values, returns=tensor(1, 0), loss_mask=tensor(1, 1), old_values=tensor(0.5, 0.5), value_clip=0.2
    )
    torch.testing.assert_close(loss, tensor(0.09, 0.81))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, tensor(0, 1.8))
    assert metrics["value_clipped"].item() == 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), clip=st.sampled_from([None, 0.2]))
def test_mse_value_loss_any_tokens_equal_the_scalar_formula(reference, seed, clip):
    values, returns, old = np.random.default_rng(seed).normal(size=(3, 8))
    loss, _ = mse_value_loss(
        values=torch.tensor(values),
        returns=torch.tensor(returns),
        loss_mask=torch.ones(8),
        old_values=None if clip is None else torch.tensor(old),
        value_clip=clip,
    )
    rows = zip(values, returns, old, strict=True)
    expected = [reference.value_mse(v, r, None if clip is None else o, clip) for v, r, o in rows]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), target_type=st.sampled_from(["two_hot", "hl_gauss"]), bins=st.integers(2, 30))
def test_classification_value_loss_any_tokens_equal_the_scalar_formula(reference, seed, target_type, bins):
    rng = np.random.default_rng(seed)
    # beyond the range too: such returns count as its ends
    returns, logits = rng.uniform(-2, 3, size=5), rng.normal(size=(5, bins))
    loss, _ = classification_value_loss(
        logits_TB=torch.tensor(logits),
        returns_T=torch.tensor(returns),
        loss_mask_T=torch.ones(5),
        reward_range=[-1.0, 2.0],
        target_type=target_type,
        sigma_ratio=0.6,
    )
    for found, x, target in zip(loss.tolist(), logits, returns, strict=True):
        goal = (
            reference.two_hot(target, bins, -1, 2)
            if target_type == "two_hot"
            else reference.hl_gauss(target, bins, -1, 2, 0.6)
        )
        assert found == pytest.approx(reference.cross_entropy(x, goal), rel=1e-4, abs=1e-5)


def test_mse_value_loss_half_of_the_clip_arguments_refused():
    with pytest.raises(ValueError, match="belong together"):
        mse_value_loss(values=tensor(1), returns=tensor(1), loss_mask=tensor(1), value_clip=0.2)


def test_classification_value_loss_equals_numpy_cross_entropy():
    rng = np.random.default_rng(1)
    logits, returns, mask = rng.normal(size=(6, 21)), rng.random(6), np.array([1, 1, 0, 1, 0, 1])
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    support, width = np.linspace(0, 1, 21), 0.05
    erf = np.vectorize(math.erf)
    edges = np.append(support - width / 2, 1 + width / 2)
    cdf = erf((edges[None] - returns[:, None]) / (0.75 * width * math.sqrt(2)))
    target = np.diff(cdf, axis=1) / 2
    target /= target.sum(-1, keepdims=True)
    expected = -(target * log_probs).sum(-1) * mask
    loss, metrics = classification_value_loss(
        logits_TB=torch.tensor(logits),
        returns_T=torch.tensor(returns),
        loss_mask_T=torch.tensor(mask),
        reward_range=UNIT,
        target_type="hl_gauss",
        sigma_ratio=0.75,
    )
    np.testing.assert_allclose(loss.numpy(), expected, atol=1e-5)
    hits = (logits.argmax(-1) == target.argmax(-1)) & (mask == 1)
    assert metrics["value_accuracy"].item() == hits.sum()
    assert metrics["value_confidence"].item() == pytest.approx((np.exp(log_probs).max(-1) * mask).sum(), abs=1e-5)
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    assert metrics["value_entropy"].item() == pytest.approx((entropy * mask).sum(), abs=1e-5)


def test_classification_value_loss_gradient_is_softmax_minus_target():
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    returns = tensor(0.0, 0.31, 0.5, 1.0)
    loss, _ = classification_value_loss(
        logits_TB=logits, returns_T=returns, loss_mask_T=torch.ones(4), reward_range=UNIT, target_type="two_hot"
    )
    loss.sum().backward()
    target = two_hot_targets(returns_T=returns, num_bins=11, reward_range=UNIT)
    torch.testing.assert_close(logits.grad, torch.softmax(logits.detach(), -1) - target, rtol=1e-5, atol=1e-6)


def test_value_losses_nan_outside_the_mask_reaches_neither_loss_nor_gradient():
    # faults.md row 10
    nan, mask = float("nan"), tensor(1, 0)
    values = tensor(0.5, nan).requires_grad_()
    loss, metrics = mse_value_loss(
        values=values, returns=tensor(1, nan), loss_mask=mask, old_values=tensor(0.5, nan), value_clip=0.2
    )
    loss.sum().backward()
    assert loss.tolist() == [0.25, 0.0]
    assert values.grad.tolist() == [-1.0, 0.0]
    logits = torch.full((2, 3), nan)
    logits[0] = 0.0
    logits.requires_grad_()
    class_loss, class_metrics = classification_value_loss(
        logits_TB=logits,
        returns_T=tensor(1, nan),
        loss_mask_T=mask,
        reward_range=UNIT,
        target_type="two_hot",
    )
    class_loss.sum().backward()
    assert class_loss.tolist() == pytest.approx([math.log(3), 0.0])
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert all(math.isfinite(v.item()) for v in [*metrics.values(), *class_metrics.values()])


def test_value_losses_nan_inside_the_mask_surfaces():
    nan = float("nan")
    assert torch.isnan(mse_value_loss(values=tensor(nan), returns=tensor(0), loss_mask=tensor(1))[0]).all()
    assert torch.isnan(mse_value_loss(values=tensor(0), returns=tensor(nan), loss_mask=tensor(1))[0]).all()
    loss, _ = classification_value_loss(
        logits_TB=torch.zeros(1, 3),
        returns_T=tensor(nan),
        loss_mask_T=tensor(1),
        reward_range=UNIT,
        target_type="hl_gauss",
    )
    assert torch.isnan(loss).all()


# --- explained variance


def numpy_ev(values: np.ndarray, returns: np.ndarray) -> float:
    return 1 - np.var(returns - values) / np.var(returns)


def test_explained_variance_known_answer():
    # formulas.md A6.1
    arguments = {"values": tensor(0.25, 0.75, 0.5, 0.25), "returns": tensor(0, 1, 1, 0), "loss_mask": torch.ones(4)}
    assert explained_variance(**arguments) == pytest.approx(0.578125)
    assert explained_variance_from_stats(explained_variance_stats(**arguments)) == pytest.approx(0.578125)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31), length=st.integers(3, 60), pieces=st.integers(1, 6), offset=st.sampled_from([0, 50])
)
def test_explained_variance_any_split_sums_to_the_whole(seed, length, pieces, offset):
    # faults.md row 66: statistics are added, ratios are never averaged
    rng = np.random.default_rng(seed)
    returns, values = rng.normal(size=length) + offset, rng.normal(size=length) + offset
    mask = rng.random(length) < 0.8
    mask[:2] = True
    cuts = np.array_split(np.arange(length), pieces)
    total = dict.fromkeys(EV_STATS, 0.0)
    for cut in cuts:
        part = explained_variance_stats(
            values=torch.tensor(values[cut]), returns=torch.tensor(returns[cut]), loss_mask=torch.tensor(mask[cut])
        )
        total = {name: total[name] + part[name].item() for name in EV_STATS}
    expected = numpy_ev(values[mask], returns[mask])
    assert explained_variance_from_stats(total) == pytest.approx(expected, rel=1e-6)
    whole = explained_variance(
        values=torch.tensor(values), returns=torch.tensor(returns), loss_mask=torch.tensor(mask)
    )
    assert whole == pytest.approx(expected, rel=1e-9)


def test_explained_variance_two_constant_halves_have_the_variance_of_the_whole():
    # faults.md row 66: each half alone is undefined
    halves = [
        explained_variance_stats(values=tensor(0.1, 0.2), returns=tensor(0, 0), loss_mask=torch.ones(2)),
        explained_variance_stats(values=tensor(0.9, 0.7), returns=tensor(1, 1), loss_mask=torch.ones(2)),
    ]
    assert [explained_variance_from_stats(half) for half in halves] == [None, None]
    total = {name: halves[0][name] + halves[1][name] for name in EV_STATS}
    expected = numpy_ev(np.array([0.1, 0.2, 0.9, 0.7]), np.array([0, 0, 1, 1]))
    assert explained_variance_from_stats(total) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "returns", "mask"),
    [
        ([0.5, 0.7, 0.2], [1, 1, 1], [1, 1, 1]),
        ([0.5, 0.7], [1000.1, 1000.1], [1, 1]),
        ([0.5, 0.7], [0, 1], [1, 0]),
        ([0.5], [1], [0]),
    ],
    ids=["constant", "constant and large", "one target", "no target"],
)
def test_explained_variance_undefined_is_none_not_a_number(values, returns, mask):
    # faults.md row 67
    arguments = {"values": tensor(*values), "returns": tensor(*returns), "loss_mask": tensor(*mask)}
    assert explained_variance(**arguments) is None
    assert explained_variance_from_stats(explained_variance_stats(**arguments)) is None


def test_explained_variance_is_undefined_where_a_report_says_so():
    # neither room may import the other, so each holds the number
    assert MIN_TARGET_VARIANCE == value_report.MIN_TARGET_VARIANCE


def test_explained_variance_constant_bias_shows_in_the_mean_residual_only():
    # faults.md row 68
    returns = tensor(0, 1, 0, 1)
    arguments = {"values": returns + 10, "returns": returns, "loss_mask": torch.ones(4)}
    stats = explained_variance_stats(**arguments)
    assert explained_variance(**arguments) == pytest.approx(1.0)
    assert (stats["_ev_residual_sum"] / stats["_ev_n"]).item() == -10.0


def test_explained_variance_stats_masked_numbers_never_enter():
    stats = explained_variance_stats(
        values=tensor(0.5, float("nan")), returns=tensor(1, float("inf")), loss_mask=tensor(1, 0)
    )
    assert [stats[name].item() for name in EV_STATS] == [1, 1, 1, 0.5, 0.25]
    assert all(value.dtype == torch.float64 for value in stats.values())
