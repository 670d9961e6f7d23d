"""Every policy loss against a formula for one token, its gradient by hand, its behaviour around masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.aggregation import (
    LOSS_AGGREGATIONS,
    aggregate,
    loss_denominator,
    masked_sum,
    sequence_counts,
)
from miles.algorithms.corrections import Correction, tis
from miles.algorithms.policy_losses import (
    POLICY_OBJECTIVES,
    PolicyLoss,
    cispo,
    effective_sample_size,
    gspo,
    policy_metrics,
    ppo_clip,
    sao_dis,
)


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


TOKENS = st.lists(
    st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01), st.floats(-3, 3), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=80, deadline=None)
@given(
    tokens=TOKENS,
    low=st.sampled_from([0.1, 0.2, 0.8]),
    high=st.sampled_from([None, 0.28, 3.0]),
    dual=st.sampled_from([None, 1.5, 3.0]),
)
def test_ppo_clip_any_tokens_equal_the_scalar_formula(reference, tokens, low, high, dual):
    log_probs, old, advantages, mask = zip(*tokens, strict=True)
    loss, metrics = ppo_clip(
        log_probs=tensor(*log_probs),
        old_log_probs=tensor(*old),
        advantages=tensor(*advantages),
        loss_mask=torch.tensor(mask),
        eps_clip=low,
        eps_clip_high=high,
        dual_clip=dual,
    )
    upper = low if high is None else high
    expected = [reference.clipped(math.exp(p - o), a, low, upper, dual) if m else 0.0 for p, o, a, m in tokens]
    torch.testing.assert_close(loss, tensor(*expected), rtol=1e-4, atol=1e-5)
    ratios = [math.exp(t[0] - t[1]) for t in tokens if t[3]]
    assert metrics["tokens"].item() == len(ratios)
    if ratios:
        assert metrics["ratio_max"].item() == pytest.approx(max(ratios), rel=1e-4)
        assert metrics["ratio_min"].item() == pytest.approx(min(ratios), rel=1e-4)
        assert metrics["approx_kl"].item() == pytest.approx(
            sum(r - 1 - math.log(r) for r in ratios), rel=1e-3, abs=1e-4
        )
    else:
        assert "ratio_max" not in metrics


def test_ppo_clip_four_corners_clip_only_against_the_advantage():
    # ratio 2 or .5, advantage + or -: only (2, +) and (.5, -) are clipped, and only those lose their gradient
    log_probs = tensor(math.log(2), math.log(2), math.log(0.5), math.log(0.5)).requires_grad_()
    loss, metrics = ppo_clip(
        log_probs=log_probs,
        old_log_probs=torch.zeros(4),
        advantages=tensor(1, -1, 1, -1),
        loss_mask=torch.ones(4),
        eps_clip=0.2,
        eps_clip_high=0.28,
    )
    torch.testing.assert_close(loss, tensor(-1.28, 2.0, -0.5, 0.8))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, tensor(0, 2.0, -0.5, 0))
    assert metrics["clipped"].item() == 2


def test_ppo_clip_on_policy_gradient_is_minus_advantage():
    log_probs = tensor(-1.0, -2.0).requires_grad_()
    loss, _ = ppo_clip(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=tensor(0.7, -0.4),
        loss_mask=torch.ones(2),
        eps_clip=0.2,
    )
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, tensor(-0.7, 0.4))


@pytest.mark.parametrize("column", ["log_probs", "old_log_probs", "advantages"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_ppo_clip_non_finite_outside_the_mask_reaches_neither_loss_nor_gradient(column, poison):
    # faults.md row 10
    columns = {"log_probs": [0.0, 0.0], "old_log_probs": [0.0, 0.0], "advantages": [1.0, 1.0]}
    columns[column][1] = poison
    tensors = {name: tensor(*numbers) for name, numbers in columns.items()}
    tensors["log_probs"].requires_grad_()
    loss, metrics = ppo_clip(**tensors, loss_mask=tensor(1, 0), eps_clip=0.2)
    masked_sum(loss, mask=tensor(1, 0)).backward()
    assert loss.tolist() == [-1.0, 0.0]
    assert tensors["log_probs"].grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize("column", ["log_probs", "old_log_probs", "advantages"])
def test_ppo_clip_nan_inside_the_mask_surfaces(column):
    columns = {"log_probs": [0.0, 0.0], "old_log_probs": [0.0, 0.0], "advantages": [1.0, 1.0]}
    columns[column][0] = float("nan")
    loss, _ = ppo_clip(**{k: tensor(*v) for k, v in columns.items()}, loss_mask=tensor(1, 0), eps_clip=0.2)
    assert torch.isnan(loss.sum())


def test_ppo_clip_huge_log_ratio_stays_finite():
    loss, metrics = ppo_clip(
        log_probs=tensor(0.0), old_log_probs=tensor(-500.0), advantages=tensor(-1.0), loss_mask=tensor(1), eps_clip=0.2
    )
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert math.isfinite(metrics["ratio_max"].item())


def test_ppo_clip_advantages_and_mask_cannot_be_swapped_by_position():
    # faults.md row 16
    with pytest.raises(TypeError):
        ppo_clip(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2), 0.2)  # type: ignore[misc]


@pytest.mark.parametrize("constant", [1.0, 0.5])
def test_ppo_clip_dual_constant_not_above_one_refused(constant):
    with pytest.raises(ValueError, match="must be above 1"):
        ppo_clip(
            log_probs=tensor(0),
            old_log_probs=tensor(0),
            advantages=tensor(1),
            loss_mask=tensor(1),
            eps_clip=0.2,
            dual_clip=constant,
        )


def test_ppo_clip_dual_bounds_the_loss_of_bad_tokens_and_stops_their_gradient():
    # ratio 10: A < 0 is bounded at 3, A > 0 is clipped at 1.2 as ever
    log_probs = tensor(math.log(10), math.log(10), math.log(2)).requires_grad_()
    loss, metrics = ppo_clip(
        log_probs=log_probs,
        old_log_probs=torch.zeros(3),
        advantages=tensor(-1, 1, -1),
        loss_mask=torch.ones(3),
        eps_clip=0.2,
        dual_clip=3.0,
    )
    torch.testing.assert_close(loss, tensor(3.0, -1.2, 2.0))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, tensor(0, 0, 2.0))
    assert metrics["dual_clipped"].item() == 1


# --- GSPO


@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, rows=st.integers(1, 4), seed=st.integers(0, 100))
def test_gspo_value_equals_the_clip_of_the_sequence_ratio(reference, tokens, rows, seed):
    log_probs, old, advantages, mask = zip(*tokens, strict=True)
    row = sorted(int(r) for r in torch.randint(0, rows, (len(tokens),), generator=torch.Generator().manual_seed(seed)))
    loss, _ = gspo(
        log_probs=tensor(*log_probs),
        old_log_probs=tensor(*old),
        advantages=tensor(*advantages),
        loss_mask=torch.tensor(mask),
        row_T=torch.tensor(row),
        num_rows=rows,
        eps_clip=0.2,
        eps_clip_high=0.4,
    )
    expected = []
    for t in range(len(tokens)):
        own = [i for i in range(len(tokens)) if row[i] == row[t]]
        ratio = reference.sequence_ratio(*[[column[i] for i in own] for column in (log_probs, old, mask)])
        expected.append(reference.clipped(ratio, advantages[t], 0.2, 0.4) if mask[t] else 0.0)
    torch.testing.assert_close(loss, tensor(*expected), rtol=1e-4, atol=1e-5)


def test_gspo_gradient_is_that_of_the_sequence_objective():
    # d/d(theta) of mean over sequences of -min(s A, clip(s) A), by finite differences on the definition
    torch.manual_seed(0)
    rows, mask = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1, 0, 1, 1, 1, 1])
    old = -torch.rand(6, dtype=torch.float64) - 0.5
    advantage_B = [0.7, -1.3, 2.0]

    def objective(log_probs):
        total = 0.0
        for b, advantage in enumerate(advantage_B):
            own = (rows == b) & mask.bool()
            s = math.exp((log_probs - old)[own].mean().item())
            total += max(-s * advantage, -min(max(s, 0.8), 1.3) * advantage)
        return total / 3

    point = old + 0.1 * torch.randn(6, dtype=torch.float64)
    point[5] = old[5] + 1.0  # the third sequence is clipped
    numeric = torch.zeros(6)
    for t in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[t] = 1e-6
        numeric[t] = (objective(point + step) - objective(point - step)) / 2e-6
    log_probs = point.clone().requires_grad_()
    loss, metrics = gspo(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.tensor(advantage_B)[rows],
        loss_mask=mask,
        row_T=rows,
        num_rows=3,
        eps_clip=0.2,
        eps_clip_high=0.3,
    )
    lengths = torch.tensor([2.0, 2.0, 1.0])
    (loss / lengths[rows] / 3).sum().backward()
    torch.testing.assert_close(log_probs.grad.float(), numeric, rtol=1e-3, atol=1e-5)
    assert numeric[5] == 0 and numeric[1] == 0
    assert metrics["clipped"].item() == 1


@pytest.mark.parametrize(("log_s", "clipped"), [(2.998e-4, 0), (3.002e-4, 2000)])
def test_gspo_sequence_beside_the_bound_is_clipped_whole_or_not_at_all(log_s, clipped):
    # float32 numbers of about -20 are 2e-6 apart, ten times the distance of log s from the bound 3e-4
    log_probs = torch.linspace(-20.0, -0.5, 2000, dtype=torch.float64)
    leaf = log_probs.clone().requires_grad_()
    loss, metrics = gspo(
        log_probs=leaf,
        old_log_probs=log_probs - log_s,
        advantages=torch.ones(2000),
        loss_mask=torch.ones(2000),
        row_T=torch.zeros(2000, dtype=torch.long),
        num_rows=1,
        eps_clip=3e-4,
        eps_clip_high=math.expm1(3e-4),
    )
    loss.sum().backward()
    assert metrics["clipped"].item() == clipped
    assert torch.unique(loss.detach()).numel() == 1
    assert int((leaf.grad == 0).sum()) == clipped


def test_gspo_huge_sequence_ratio_stays_finite():
    loss, _ = gspo(
        log_probs=tensor(0.0),
        old_log_probs=tensor(-300.0),
        advantages=tensor(-1.0),
        loss_mask=tensor(1),
        row_T=torch.tensor([0]),
        num_rows=1,
        eps_clip=3e-4,
    )
    assert loss.item() == pytest.approx(math.exp(10), rel=1e-5)


# --- CISPO


@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, low=st.sampled_from([0.2, 1.0]), high=st.sampled_from([0.28, 4.0]))
def test_cispo_any_tokens_equal_the_scalar_formula_and_all_have_a_gradient(reference, tokens, low, high):
    log_probs, old, advantages, mask = zip(*tokens, strict=True)
    leaf = tensor(*log_probs).requires_grad_()
    loss, _ = cispo(
        log_probs=leaf,
        old_log_probs=tensor(*old),
        advantages=tensor(*advantages),
        loss_mask=torch.tensor(mask),
        eps_clip=low,
        eps_clip_high=high,
    )
    expected = [reference.cispo(p, o, a, low, high) if m else 0.0 for p, o, a, m in tokens]
    torch.testing.assert_close(loss, tensor(*expected), rtol=1e-4, atol=1e-5)
    loss.sum().backward()
    # the weight is a constant: the gradient is the loss over log pi, clipped or not
    gradient = [reference.cispo(p, o, a, low, high) / p if m else 0.0 for p, o, a, m in tokens]
    torch.testing.assert_close(leaf.grad, tensor(*gradient), rtol=1e-4, atol=1e-5)


# --- DIS


@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, band=st.sampled_from([(0.8, 3.0), (0.3, 5.0), (0.0, 0.5)]))
def test_sao_dis_any_tokens_equal_the_scalar_formula(reference, tokens, band):
    log_probs, rollout, advantages, mask = zip(*tokens, strict=True)
    loss, metrics = sao_dis(
        log_probs=tensor(*log_probs),
        rollout_log_probs=tensor(*rollout),
        advantages=tensor(*advantages),
        loss_mask=torch.tensor(mask),
        eps_clip=band[0],
        eps_clip_high=band[1],
    )
    # float32 cannot tell a ratio from a bound 1e-6 away
    near = [
        any(abs(math.exp(p - o) / bound - 1) < 1e-5 for bound in (1 - band[0], 1 + band[1])) for p, o, *_ in tokens
    ]
    expected = [reference.dis(p, o, a, *band) if m else 0.0 for p, o, a, m in tokens]
    for got, want, skip in zip(loss.tolist(), expected, near, strict=True):
        assert skip or got == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert metrics["tokens"].item() == sum(mask)


@pytest.mark.parametrize(
    ("band", "ratio", "outcome"),
    [
        ((0.3, 5.0), 0.69, "low"),
        ((0.3, 5.0), 0.8, "kept"),
        ((0.3, 5.0), 5.9, "kept"),
        ((0.3, 5.0), 6.1, "high"),
        ((0.8, 3.0), 0.21, "kept"),
        ((0.8, 3.0), 0.19, "low"),
        ((0.0, 1.0), 1.0, "low"),
        ((0.5, 0.0), 1.0, "high"),
    ],
)
def test_sao_dis_known_answers_bounds_are_strict(band, ratio, outcome):
    # formulas.md A9
    log_probs = tensor(-1.0).requires_grad_()
    loss, metrics = sao_dis(
        log_probs=log_probs,
        rollout_log_probs=tensor(-1.0 - math.log(ratio)),
        advantages=tensor(2.0),
        loss_mask=tensor(1),
        eps_clip=band[0],
        eps_clip_high=band[1],
    )
    loss.sum().backward()
    kept = outcome == "kept"
    assert loss.item() == pytest.approx(ratio * 2.0 if kept else 0.0, rel=1e-5)
    assert log_probs.grad.item() == pytest.approx(-ratio * 2.0 if kept else 0.0, rel=1e-5)
    assert metrics["tokens"].item() == 1
    got = [metrics[name].item() for name in ("rejected", "rejected_low", "rejected_high")]
    assert got == [not kept, outcome == "low", outcome == "high"]


@pytest.mark.parametrize("ratio_grad", ["detached", "in_graph"])
@pytest.mark.parametrize("probability", [0.2, 0.3, 0.4, 0.9])
def test_sao_dis_gradient_in_graph_is_reversed_under_one_over_e(probability, ratio_grad):
    # formulas.md A0.1: -r A detached, -r A (1 + log pi) with the ratio in the graph
    log_probs = tensor(math.log(probability)).requires_grad_()
    loss, _ = sao_dis(
        log_probs=log_probs,
        rollout_log_probs=tensor(math.log(probability) - 0.1),
        advantages=tensor(1.0),
        loss_mask=tensor(1),
        eps_clip=0.8,
        eps_clip_high=3.0,
        ratio_grad=ratio_grad,
    )
    loss.sum().backward()
    ratio = math.exp(0.1)
    factor = 1.0 if ratio_grad == "detached" else 1 + math.log(probability)
    assert log_probs.grad.item() == pytest.approx(-ratio * factor, rel=1e-5)
    assert (log_probs.grad.item() > 0) == (ratio_grad == "in_graph" and probability < math.exp(-1))


@pytest.mark.parametrize("ratio_grad", ["detached", "in_graph"])
def test_sao_dis_far_outside_the_band_leaves_neither_inf_nor_nan(ratio_grad):
    log_probs = tensor(-0.1, -900.0, -1.0).requires_grad_()
    loss, metrics = sao_dis(
        log_probs=log_probs,
        rollout_log_probs=tensor(-800.0, -0.1, float("nan")),
        advantages=tensor(1, 1, 1),
        loss_mask=tensor(1, 1, 0),
        eps_clip=0.3,
        eps_clip_high=5.0,
        ratio_grad=ratio_grad,
    )
    loss.sum().backward()
    assert loss.tolist() == log_probs.grad.tolist() == [0, 0, 0]
    assert metrics["rejected"].item() == 2
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps_clip": 1.0}, "lower band"),
        ({"eps_clip": -0.1}, "lower band"),
        ({"eps_clip_high": -0.1}, "upper band"),
        ({"eps_clip_high": float("inf")}, "upper band"),
        ({"ratio_grad": "both"}, "ratio_grad"),
    ],
)
def test_sao_dis_bad_settings_refused(change, message):
    arguments = {
        "log_probs": tensor(0),
        "rollout_log_probs": tensor(0),
        "advantages": tensor(0),
        "loss_mask": tensor(1),
        "eps_clip": 0.3,
        "eps_clip_high": 5.0,
    }
    with pytest.raises(ValueError, match=message):
        sao_dis(**(arguments | change))


# --- metrics


def test_effective_sample_size_per_row():
    # equal weights 1; one of two weights 0 gives 1/2; a row without tokens does not count
    got = effective_sample_size(
        tensor(3, 3, 1, 0, 9), loss_mask=tensor(1, 1, 1, 1, 0), row_T=torch.tensor([0, 0, 1, 1, 2]), num_rows=3
    )
    assert [got["ess"].item(), got["ess_rows"].item()] == [1.5, 2.0]


def test_policy_metrics_are_means_over_tokens_and_extremes():
    sums = {
        "tokens": 4.0,
        "clipped": 1.0,
        "approx_kl": 0.2,
        "ratio": 5.0,
        "ratio_max": 2.0,
        "ess": 1.5,
        "ess_rows": 2.0,
    }
    assert policy_metrics(sums) == {
        "clip_fraction": 0.25,
        "approx_kl": 0.05,
        "ratio_mean": 1.25,
        "ratio_max": 2.0,
        "ess": 0.75,
    }


# --- the parts together

ROWS = torch.tensor([0, 0, 0, 1, 1, 2])


def whole_batch(**changes):
    torch.manual_seed(3)
    batch = {
        name: -torch.rand(6) - 0.1 for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    batch |= {"entropy": torch.rand(6), "advantages": torch.randn(6), "loss_mask": tensor(1, 0, 1, 1, 1, 1)}
    return batch | {"row_T": ROWS, "num_rows": 3} | changes


ALL_SETTINGS = [
    *({"objective": name, "eps_clip_high": 0.28} for name in POLICY_OBJECTIVES),
    {"dual_clip": 3.0, "entropy_coef": 0.01, "opsm_delta": 1e-4},
    {"correction": tis(high=1.1), "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
    {"correction": Correction(level="geometric", mode="mask", reject_level="token", veto=1e-4)},
    {"objective": "gspo", "kl_loss_coef": 0.1, "kl_loss_type": "unbiased", "entropy_coef": 0.02},
]


@pytest.mark.parametrize("settings_", ALL_SETTINGS)
def test_policy_loss_reads_and_reports_what_it_says(settings_):
    policy_loss = PolicyLoss(**settings_)
    batch = whole_batch()
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
        if name not in policy_loss.columns:
            del batch[name]
    loss, metrics = policy_loss(**batch)
    assert loss.shape == (6,) and loss[1] == 0
    assert set(metrics) <= set(policy_loss.metric_names)
    extremes = {name for name in policy_loss.metric_names if name.endswith(("_max", "_min"))}
    assert set(policy_loss.metric_names) - set(metrics) <= extremes


@pytest.mark.parametrize("settings_", ALL_SETTINGS)
def test_policy_loss_nan_outside_the_mask_reaches_neither_loss_nor_gradient(settings_):
    # faults.md row 10
    batch = whole_batch()
    for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "advantages"):
        batch[name][1] = float("nan")
    batch["log_probs"].requires_grad_()
    loss, metrics = PolicyLoss(**settings_)(**batch)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(batch["log_probs"].grad).all() and batch["log_probs"].grad[1] == 0
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize("settings_", ALL_SETTINGS)
@pytest.mark.parametrize("column", ["log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages"])
def test_policy_loss_nan_inside_the_mask_surfaces(settings_, column):
    policy_loss = PolicyLoss(**settings_)
    if column not in ("log_probs", *policy_loss.columns):
        return
    batch = whole_batch()
    batch[column][3] = float("nan")
    assert torch.isnan(policy_loss(**batch)[0][3])


@pytest.mark.parametrize("settings_", ALL_SETTINGS)
def test_policy_loss_micro_batch_without_a_trainable_token_is_zero(settings_):
    # faults.md row 29
    batch = whole_batch(loss_mask=torch.zeros(6))
    batch["log_probs"].requires_grad_()
    loss, metrics = PolicyLoss(**settings_)(**batch)
    loss.sum().backward()
    assert not loss.any() and not batch["log_probs"].grad.any()
    assert metrics["tokens"].item() == 0


@pytest.mark.parametrize("settings_", ALL_SETTINGS)
def test_policy_loss_of_rows_does_not_depend_on_their_company(settings_):
    # whole rows in any micro-batches, in any order, empty micro-batches included
    policy_loss, batch = PolicyLoss(**settings_), whole_batch()
    together, metrics = policy_loss(**batch)
    apart, parts = torch.zeros(6), []
    for chosen in ([2], [], [1, 0]):
        places = torch.cat(
            [torch.nonzero(row == ROWS).flatten() for row in chosen] or [torch.zeros(0, dtype=torch.long)]
        )
        part = {k: v[places] for k, v in batch.items() if isinstance(v, torch.Tensor)}
        part["row_T"] = torch.cat([torch.full(((row == ROWS).sum(),), i) for i, row in enumerate(chosen)] or [places])
        loss, figures = policy_loss(**part, num_rows=len(chosen))
        apart[places] = loss
        parts.append(figures)
    torch.testing.assert_close(apart, together)
    for name, value in metrics.items():
        values = [part[name].item() for part in parts if name in part]
        combined = max(values) if name.endswith("_max") else min(values) if name.endswith("_min") else sum(values)
        assert combined == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name


def gradient(policy_loss, mode, parts):
    """Of the batch's loss with respect to a linear model, when micro-batches hold the given rows."""
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 1, 9, 4, 2]
    weights = torch.randn(2, 6, generator=generator).requires_grad_()
    features = [torch.randn(n, 6, generator=generator) for n in lengths]
    names = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    columns = [
        {name: torch.randn(n, generator=generator) - (0.0 if name == "advantages" else 1.0) for name in names}
        for n in lengths
    ]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    masks[3][:] = False  # a row, and in some splits a micro-batch, without a trainable token
    tokens, sequences, total = sequence_counts([mask.tolist() for mask in masks])
    denominator = loss_denominator(mode, num_tokens=total, num_sequences=sequences, constant=9.0)
    for part in parts:
        outputs = torch.cat([features[row] for row in part] or [torch.zeros(0, 6)]) @ weights.T
        lengths_of_part = torch.tensor([lengths[row] for row in part], dtype=torch.long)
        mask = torch.cat([masks[row] for row in part] or [torch.zeros(0)])
        row_T = torch.repeat_interleave(torch.arange(len(part)), lengths_of_part)
        loss_T, _ = policy_loss(
            log_probs=-torch.nn.functional.softplus(outputs[:, 0]),
            entropy=outputs[:, 1].square(),
            loss_mask=mask,
            row_T=row_T,
            num_rows=len(part),
            **{
                name: torch.cat([columns[row][name] for row in part] or [torch.zeros(0)])
                for name in names
                if name in policy_loss.columns
            },
        )
        loss = aggregate(
            loss_T,
            loss_mask_T=mask,
            mode=mode,
            row_T=row_T,
            sequence_tokens_B=torch.tensor([tokens[row] for row in part]),
        )
        (loss / denominator).backward()
    return weights.grad


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize("settings_", ALL_SETTINGS)
def test_policy_loss_gradient_is_one_for_every_split_and_order(settings_, mode):
    # faults.md rows 25, 26 and 29: ranks and micro-batches are nothing but parts of the batch
    policy_loss = PolicyLoss(**settings_)
    whole = gradient(policy_loss, mode, [[0, 1, 2, 3, 4]])
    assert whole.abs().max() > 1e-3
    for parts in ([[0], [1], [2], [3], [4]], [[4, 2], [], [3], [1, 0]], [[2, 3, 0], [4, 1]]):
        torch.testing.assert_close(gradient(policy_loss, mode, parts), whole, rtol=2e-5, atol=1e-6)


def test_policy_loss_is_the_sum_of_its_parts(reference):
    settings_ = {"correction": tis(high=1.2), "entropy_coef": 0.3, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}
    batch = whole_batch()
    loss, metrics = PolicyLoss(**settings_)(**batch)
    expected = []
    for t in range(6):
        p, o, b, r, a, h = (
            batch[name][t].item()
            for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
        )
        weighted = min(math.exp(o - b), 1.2) * reference.clipped(math.exp(p - o), a, 0.2, 0.2)
        expected.append((weighted - 0.3 * h + 0.5 * reference.kl("k2", p, r)) * batch["loss_mask"][t].item())
    torch.testing.assert_close(loss, tensor(*expected), rtol=1e-5, atol=1e-6)
    assert metrics["entropy"].item() == pytest.approx((batch["entropy"] * batch["loss_mask"]).sum().item(), rel=1e-6)


def test_policy_loss_decoupled_ppo_weight_is_old_over_behaviour_and_constant():
    # arXiv 2110.00641: pi_old / pi_b times PPO's surrogate to pi_old; no gradient through the weight
    batch = whole_batch()
    plain = PolicyLoss(objective="ppo")(**batch)[0]
    weight = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp()
    torch.testing.assert_close(PolicyLoss(objective="decoupled_ppo")(**batch)[0], weight * plain)
    batch["rollout_log_probs"] = batch["old_log_probs"]
    torch.testing.assert_close(PolicyLoss(objective="decoupled_ppo")(**batch)[0], plain)
    old = batch["old_log_probs"].clone().requires_grad_()
    loss, _ = PolicyLoss(objective="decoupled_ppo")(**(batch | {"old_log_probs": old}))
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"objective": "trpo"}, "unknown policy objective"),
        ({"kl_loss_type": "k4"}, "unknown KL estimator"),
        ({"objective": "sao_dis", "correction": tis()}, "corrects for the engine itself"),
        ({"objective": "sao_dis", "opsm_delta": 1e-4}, "corrects for the engine itself"),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual clipping belongs"),
    ],
)
def test_policy_loss_bad_settings_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**settings_)
