"""Sums with global denominators: the same loss and gradient however the batch is split. Metric sums and extremes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algorithms.aggregation import (
    LOSS_AGGREGATIONS,
    add_metrics,
    aggregate,
    loss_denominator,
    masked_sum,
    sequence_counts,
)
from miles.algorithms.policy_losses import ppo_clip


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    pieces=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_aggregate_any_split_equals_the_formula_over_the_whole_batch(reference, mode, lengths, pieces, seed):
    # faults.md rows 25, 26: ranks and micro-batches of unequal token counts, rows that are masked out whole
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=n) for n in lengths]
    masks = [(rng.random(n) < 0.6).astype(int) for n in lengths]
    masks[0][0] = 1
    tokens, sequences, total = sequence_counts(masks)
    denominator = loss_denominator(mode, num_tokens=total, num_sequences=sequences, constant=7.0)
    found = 0.0
    for rows in np.array_split(rng.permutation(len(lengths)), pieces):
        found += aggregate(
            torch.tensor(np.concatenate([losses[r] for r in rows] or [np.zeros(0)])),
            loss_mask_T=torch.tensor(np.concatenate([masks[r] for r in rows] or [np.zeros(0)])),
            mode=mode,
            row_T=torch.tensor(np.repeat(np.arange(len(rows)), [lengths[r] for r in rows])),
            sequence_tokens_B=torch.tensor([tokens[r] for r in rows]),
        ).item()
    assert found / denominator == pytest.approx(reference.aggregate(mode, losses, masks, 7.0), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12.0),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum", 3.0),
        ("seq-mean-token-sum-norm", 60.0),
    ],
)
def test_loss_denominator_known_answers(mode, expected):
    assert loss_denominator(mode, num_tokens=12, num_sequences=3, constant=20) == expected


def test_sequence_counts_fan_out_siblings_are_one_sequence():
    assert sequence_counts([[1, 0, 1], [1], [0, 0], [1, 1]], trajectory_ids=["a", "a", "b", "c"]) == (
        [3, 3, 0, 2],
        2,
        5,
    )


def test_aggregate_fan_out_siblings_share_one_sequence_mean():
    # rows 0 and 1 are one trajectory of three tokens: (1 + 2 + 3) / 3, and 5: mean 3.5
    loss, mask = tensor(1, 2, 3, 5), tensor(1, 1, 1, 1)
    tokens, sequences, _ = sequence_counts([[1, 1], [1], [1]], trajectory_ids=[0, 0, 1])
    total = aggregate(
        loss,
        loss_mask_T=mask,
        mode="seq-mean-token-mean",
        row_T=torch.tensor([0, 0, 1, 2]),
        sequence_tokens_B=torch.tensor(tokens),
    )
    denominator = loss_denominator("seq-mean-token-mean", num_tokens=4, num_sequences=sequences)
    assert total.item() / denominator == pytest.approx(3.5)


def test_aggregate_multi_turn_mask_counts_its_trainable_tokens():
    # faults.md row 28: mask [1, 0, 1] counts 2
    assert sequence_counts([[1, 0, 1]]) == ([2], 1, 2)


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_aggregate_all_masked_out_gives_zero_with_zero_gradient(mode):
    # faults.md row 29
    loss = tensor(1, float("nan")).requires_grad_()
    total = aggregate(
        loss,
        loss_mask_T=torch.zeros(2),
        mode=mode,
        row_T=torch.tensor([0, 0]),
        sequence_tokens_B=torch.tensor([0]),
    )
    total.backward()
    assert total.item() == 0.0
    assert loss.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aggregate(tensor(1), loss_mask_T=tensor(1), mode="mean"), "unknown loss aggregation"),
        (lambda: aggregate(tensor(1), loss_mask_T=tensor(1), mode="seq-mean-token-mean"), "needs the rows"),
        (lambda: loss_denominator("mean", num_tokens=1, num_sequences=1), "unknown loss aggregation"),
        (lambda: loss_denominator("seq-mean-token-sum-norm", num_tokens=1, num_sequences=1), "constant length"),
        (lambda: loss_denominator("seq-mean-token-sum-norm", num_tokens=1, num_sequences=1, constant=0), "above 0"),
    ],
)
def test_aggregate_bad_arguments_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
        (masked_sum(loss, mask=mask) / tokens).backward()
    return weight.grad


@pytest.mark.parametrize("splits", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[1], [2, 0]]])
def test_masked_sum_over_global_tokens_any_split_into_micro_batches_gives_one_gradient(splits):
    # faults.md rows 25, 26 and 29: unequal token counts per share, accumulation, a share that is masked out whole
    torch.testing.assert_close(gradient_of_split(splits), gradient_of_split([[0, 1, 2]]), rtol=1e-6, atol=1e-7)


def test_masked_sum_counts_trainable_tokens_only():
    # faults.md rows 13 and 28
    assert masked_sum(tensor(2, 100, 4), mask=tensor(1, 0, 1)).item() == 6.0
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
    total = masked_sum(x, mask=torch.zeros(2))
    total.backward()
    assert total.item() == 0.0
    assert x.grad.tolist() == [0.0, 0.0]


def test_add_metrics_sums_and_extremes():
    combined = add_metrics([{"tokens": 2, "ratio_max": 1.5, "ratio_min": 0.5}, {"tokens": 3}, {"ratio_max": 1.2}])
    assert combined == {"tokens": 5, "ratio_max": 1.5, "ratio_min": 0.5}


@pytest.mark.parametrize("order", [(1.0, float("nan")), (float("nan"), 1.0)])
def test_add_metrics_nan_extreme_surfaces(order):
    assert math.isnan(add_metrics([{"ratio_max": value} for value in order])["ratio_max"])
