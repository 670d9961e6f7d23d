"""KL estimators: exact expectations over a three-way softmax, so nothing is sampled."""

import pytest
import torch

from miles.algorithms.kl import kl_estimate

LOGITS = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
REF = torch.log_softmax(torch.tensor([-0.4, 0.5, 0.2], dtype=torch.float64), dim=0).float()


def expectation(kind: str) -> tuple[float, torch.Tensor]:
    """Exact E[estimate] and the expected gradient of the estimate used as a loss, samples from the policy itself."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    estimate = kl_estimate(log_probs=log_probs.float(), ref_log_probs=REF, loss_mask=torch.ones(3), kind=kind)
    weighted = (log_probs.exp().detach() * estimate).sum()
    weighted.backward()
    return weighted.item(), logits.grad


def test_kl_estimate_k1_and_k3_are_unbiased_values():
    log_probs = torch.log_softmax(LOGITS, dim=0)
    exact = (log_probs.exp() * (log_probs - REF)).sum().item()
    assert expectation("k1")[0] == pytest.approx(exact, abs=1e-6)
    assert expectation("k3")[0] == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [
        ("k1", [0.0, 0.0, 0.0]),
        ("k2", [0.2557, -0.1950, -0.0607]),
        ("k3", [0.2230, -0.2156, -0.0074]),
    ],
)
def test_kl_estimate_expected_gradient_as_a_loss(kind, gradient):
    # faults.md row 31: only k2 has the gradient of the KL, [.2557, -.1950, -.0607]
    torch.testing.assert_close(expectation(kind)[1], torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=6e-5)


def test_kl_estimate_nan_outside_the_mask_is_zero_inside_surfaces():
    nan = torch.tensor([float("nan"), -1.0])
    for kind in ("k1", "k2", "k3"):
        outside = kl_estimate(
            log_probs=nan, ref_log_probs=torch.full((2,), -1.0), loss_mask=torch.tensor([0, 1]), kind=kind
        )
        assert outside.tolist() == [0.0, 0.0]
        inside = kl_estimate(
            log_probs=nan, ref_log_probs=torch.full((2,), -1.0), loss_mask=torch.tensor([1, 1]), kind=kind
        )
        assert torch.isnan(inside[0])


def test_kl_estimate_far_apart_stays_finite():
    far = kl_estimate(
        log_probs=torch.tensor([-900.0]), ref_log_probs=torch.tensor([0.0]), loss_mask=torch.ones(1), kind="k3"
    )
    assert torch.isfinite(far).all()


def test_kl_estimate_unknown_kind_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(log_probs=REF, ref_log_probs=REF, loss_mask=torch.ones(3), kind="k4")
