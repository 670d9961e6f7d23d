"""PPO's clipped loss against a scalar formula, its gradient in the four corners, its behaviour around masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.aggregation import add_metrics, masked_sum
from miles.algorithms.policy_losses import ppo_clip


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def scalar_loss(log_prob, old, advantage, low, high):
    """max(-rA, -clip(r)A) for one token."""
    ratio = math.exp(log_prob - old)
    return max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3), st.booleans()), min_size=1, max_size=12
    ),
    low=st.sampled_from([0.1, 0.2, 0.8]),
    high=st.sampled_from([None, 0.28, 3.0]),
)
def test_ppo_clip_any_tokens_equal_the_scalar_formula(tokens, low, high):
    log_probs, old, advantages, mask = zip(*tokens, strict=True)
    loss, metrics = ppo_clip(
        log_probs=tensor(*log_probs),
        old_log_probs=tensor(*old),
        advantages=tensor(*advantages),
        loss_mask=torch.tensor(mask),
        eps_clip=low,
        eps_clip_high=high,
    )
    upper = low if high is None else high
    expected = [scalar_loss(*t[:3], low, upper) if t[3] else 0.0 for t in tokens]
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
    masked_sum(loss, tensor(1, 0)).backward()
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


# --- aggregation


def gradient_of_split(splits: list[list[int]]) -> torch.Tensor:
    """Gradient of the token mean over three samples when micro-batches hold the given samples."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 9, 4]
    weight = torch.randn(6, generator=generator).requires_grad_()
    rows = [torch.randn(n, 6, generator=generator) for n in lengths]
    advantages = [torch.randn(n, generator=generator) for n in lengths]
    masks = [torch.ones(1), torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1]), torch.zeros(4)]
    tokens = int(sum(mask.sum() for mask in masks))
    for split in splits:
        features = torch.cat([rows[i] for i in split])
        mask = torch.cat([masks[i] for i in split])
        log_probs = -torch.nn.functional.softplus(features @ weight)
        loss, _ = ppo_clip(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() - 0.1,
            advantages=torch.cat([advantages[i] for i in split]),
            loss_mask=mask,
            eps_clip=0.2,
        )
        (masked_sum(loss, mask) / tokens).backward()
    return weight.grad


@pytest.mark.parametrize("splits", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[1], [2, 0]]])
def test_masked_sum_over_global_tokens_any_split_into_micro_batches_gives_one_gradient(splits):
    # faults.md rows 25, 26 and 29: unequal token counts per share, accumulation, a share that is masked out whole
    torch.testing.assert_close(gradient_of_split(splits), gradient_of_split([[0, 1, 2]]), rtol=1e-6, atol=1e-7)


def test_masked_sum_counts_trainable_tokens_only():
    # faults.md rows 13 and 28
    assert masked_sum(tensor(2, 100, 4), tensor(1, 0, 1)).item() == 6.0
    loss, metrics = ppo_clip(
        log_probs=torch.zeros(4),
        old_log_probs=torch.zeros(4),
        advantages=tensor(1, 1, 10, 10),
        loss_mask=tensor(1, 1, 0, 0),
        eps_clip=0.2,
    )
    assert loss.sum().item() / metrics["tokens"].item() == -1.0


def test_masked_sum_empty_mask_gives_zero_with_zero_gradient():
    # faults.md row 29
    x = tensor(1, float("nan")).requires_grad_()
    total = masked_sum(x, torch.zeros(2))
    total.backward()
    assert total.item() == 0.0
    assert x.grad.tolist() == [0.0, 0.0]


def test_add_metrics_sums_and_extremes():
    combined = add_metrics([{"tokens": 2, "ratio_max": 1.5, "ratio_min": 0.5}, {"tokens": 3}, {"ratio_max": 1.2}])
    assert combined == {"tokens": 5, "ratio_max": 1.5, "ratio_min": 0.5}


@pytest.mark.parametrize("order", [(1.0, float("nan")), (float("nan"), 1.0)])
def test_add_metrics_nan_extreme_surfaces(order):
    assert math.isnan(add_metrics([{"ratio_max": value} for value in order])["ratio_max"])
