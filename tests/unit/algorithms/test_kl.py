"""KL estimators: exact expectations over a three-way softmax, so nothing is sampled."""

import pytest
import torch

from miles.algorithms.kl import KL_KINDS, AdaptiveKLController, kl_estimate

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


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [
        ("k1", [0.2557, -0.1950, -0.0607]),
        ("k2", [0.0534, 0.0050, -0.0584]),
        ("k3", [0.0327, 0.0206, -0.0533]),
        ("low_var_kl", [0.0327, 0.0206, -0.0533]),
    ],
)
def test_kl_estimate_expected_gradient_as_a_penalty_in_the_reward(kind, gradient):
    # E[k grad log pi], exactly: pi_i (k_i - E k) by logit; only k1 has that of the KL, [.2557, -.1950, -.0607]
    logits = LOGITS.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    penalty = kl_estimate(log_probs=log_probs.float(), ref_log_probs=REF, loss_mask=torch.ones(3), kind=kind).detach()
    (log_probs.exp().detach() * penalty * log_probs).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=6e-5)


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


def test_kl_estimate_every_kind_equals_the_scalar_formula(reference):
    torch.manual_seed(0)
    log_probs, ref, behaviour = -3 * torch.rand(50), -3 * torch.rand(50), -3 * torch.rand(50)
    for kind in KL_KINDS:
        found = kl_estimate(
            log_probs=log_probs,
            ref_log_probs=ref,
            loss_mask=torch.ones(50),
            kind=kind,
            behaviour_log_probs=behaviour,
        )
        expected = [
            reference.kl(kind, p.item(), r.item(), b.item()) for p, r, b in zip(log_probs, ref, behaviour, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_kl_estimate_unbiased_has_the_gradient_of_the_kl_on_samples_of_another_policy():
    # exact expectation over what pi_b samples: sum of pi_b times the gradient, against that of the KL by autograd
    behaviour = torch.log_softmax(torch.tensor([0.9, -0.3, -1.0], dtype=torch.float64), dim=0)
    logits = LOGITS.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    estimate = kl_estimate(
        log_probs=log_probs.float(),
        ref_log_probs=REF,
        loss_mask=torch.ones(3),
        kind="unbiased",
        behaviour_log_probs=behaviour.float(),
    )
    (behaviour.exp() * estimate).sum().backward()
    torch.testing.assert_close(
        logits.grad, torch.tensor([0.2557, -0.1950, -0.0607], dtype=torch.float64), rtol=0, atol=6e-5
    )


def test_kl_estimate_unbiased_without_the_sampling_policy_refused():
    with pytest.raises(ValueError, match="needs the log-probabilities of the policy that sampled"):
        kl_estimate(log_probs=REF, ref_log_probs=REF, loss_mask=torch.ones(3), kind="unbiased")


def test_kl_estimate_low_variance_is_bounded_at_ten():
    far = kl_estimate(
        log_probs=torch.tensor([-15.0]), ref_log_probs=torch.tensor([0.0]), loss_mask=torch.ones(1), kind="low_var_kl"
    )
    assert far.item() == 10.0


def test_kl_k3_gradient_is_that_of_the_reversed_kl():
    # gradient of KL(ref || pi) = pi - ref, for a softmax
    expected = torch.softmax(LOGITS, 0) - REF.double().exp()
    torch.testing.assert_close(expectation("k3")[1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kl", "num_samples", "coef"),
    [(0.1, 100, 0.2), (0.11, 100, 0.2 * 1.001), (10.0, 100, 0.2 * 1.002), (0.0, 100, 0.2 * 0.998), (0.0, 5000, 0.18)],
)
def test_adaptive_kl_controller_known_steps(kl, num_samples, coef):
    # arXiv 1909.08593: coef (1 + clip(kl / target - 1, +-.2) n / horizon)
    controller = AdaptiveKLController(coef=0.2, target=0.1, horizon=10_000)
    assert controller.update(kl=kl, num_samples=num_samples) == pytest.approx(coef, rel=1e-12)


def test_adaptive_kl_controller_without_target_stays():
    controller = AdaptiveKLController(coef=0.2)
    assert controller.update(kl=5.0, num_samples=10**9) == 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -1.0}, "coefficient"),
        ({"coef": 1.0, "target": 0.0}, "target"),
        ({"coef": 1.0, "target": 1.0, "horizon": 0.0}, "horizon"),
    ],
)
def test_adaptive_kl_controller_bad_settings_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveKLController(**arguments)


def test_adaptive_kl_controller_kl_that_is_no_number_refused():
    with pytest.raises(ValueError, match="the adaptive coefficient follows is nan"):
        AdaptiveKLController(coef=0.1, target=0.1).update(kl=float("nan"), num_samples=1)
