"""Fused log-probabilities and entropies against torch's own softmax in float64, and the memory they may not take."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from miles.backends.megatron.vocab_parallel import token_log_probs


def reference(logits, targets, *, vocab_size, temperature, log_prob_grad, entropy_grad):
    """log-probabilities, entropies and the gradient of their weighted sum, float64, whole vocabulary at once."""
    leaf = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(leaf[:, :vocab_size] / temperature, dim=-1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (chosen * log_prob_grad + entropy * entropy_grad).sum().backward()
    return chosen.detach(), entropy.detach(), leaf.grad


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    columns=st.integers(2, 40),
    padding=st.integers(0, 5),
    chunk=st.sampled_from([1, 2, 3, 100]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    seed=st.integers(0, 1000),
    reuse=st.booleans(),
    select=st.booleans(),
)
def test_token_log_probs_any_chunk_equals_log_softmax(
    tokens, columns, padding, chunk, temperature, seed, reuse, select
):
    torch.manual_seed(seed)
    rows = tokens + 3 if select else tokens
    leaf = (torch.randn(rows, columns + padding) * 5).requires_grad_()
    positions = torch.randperm(rows)[:tokens] if select else None
    targets = torch.randint(0, columns, (tokens,))
    log_prob_grad, entropy_grad = torch.randn(tokens), torch.randn(tokens)
    found, entropy = token_log_probs(
        leaf * 1.0,
        targets,
        vocab_size=columns,
        with_entropy=True,
        temperature=temperature,
        positions_T=positions,
        chunk_tokens=chunk,
        reuse_logits=reuse,
    )
    (found * log_prob_grad + entropy * entropy_grad).sum().backward()
    chosen_rows = torch.arange(rows) if positions is None else positions
    expected, expected_entropy, gradient = reference(
        leaf[chosen_rows],
        targets,
        vocab_size=columns,
        temperature=temperature,
        log_prob_grad=log_prob_grad,
        entropy_grad=entropy_grad,
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=5e-6, rtol=1e-5)
    whole = torch.zeros(rows, columns + padding, dtype=torch.float64)
    whole[chosen_rows] = gradient
    torch.testing.assert_close(leaf.grad.double(), whole, atol=1e-5, rtol=1e-4)


def test_token_log_probs_float64_gradcheck():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2])

    def both(x):
        return token_log_probs(x, targets, vocab_size=6, with_entropy=True, temperature=0.8, chunk_tokens=3)

    assert torch.autograd.gradcheck(both, (logits,))


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_token_log_probs_gradient_of_one_output_alone(which):
    torch.manual_seed(1)
    logits = torch.randn(5, 11, requires_grad=True)
    targets = torch.randint(0, 11, (5,))
    log_probs, entropy = token_log_probs(logits, targets, vocab_size=11, with_entropy=True)
    (log_probs if which == "log_probs" else entropy).sum().backward()
    weights = (1.0, 0.0) if which == "log_probs" else (0.0, 1.0)
    *_, gradient = reference(
        logits, targets, vocab_size=11, temperature=1.0, log_prob_grad=weights[0], entropy_grad=weights[1]
    )
    torch.testing.assert_close(logits.grad.double(), gradient, atol=1e-6, rtol=1e-5)


def test_token_log_probs_bf16_logits_keep_fp32_accuracy():
    torch.manual_seed(2)
    leaf = (torch.randn(64, 3000) * 6).bfloat16().requires_grad_()
    targets = torch.randint(0, 3000, (64,))
    found, entropy = token_log_probs(leaf, targets, vocab_size=3000, with_entropy=True, chunk_tokens=7)
    found.sum().backward()
    expected, expected_entropy, gradient = reference(
        leaf, targets, vocab_size=3000, temperature=1.0, log_prob_grad=1.0, entropy_grad=0.0
    )
    # what bf16 arithmetic would lose is 2 ** -8 of a log-probability of about 20
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad.double(), gradient, atol=1e-6, rtol=2**-8)


def test_token_log_probs_forbidden_token_has_no_probability_and_no_nan():
    logits = torch.tensor([[0.0, -math.inf, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([0]), vocab_size=3, with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, 0.0, -0.5]]))


def test_token_log_probs_nan_logit_surfaces():
    log_probs, entropy = token_log_probs(
        torch.tensor([[0.0, math.nan]]), torch.tensor([0]), vocab_size=2, with_entropy=True
    )
    assert torch.isnan(log_probs).all()
    assert torch.isnan(entropy).all()


def test_token_log_probs_no_token_gives_nothing_and_zero_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.long)
    log_probs, entropy = token_log_probs(logits, nothing, vocab_size=4, with_entropy=True, positions_T=nothing)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert not logits.grad.any()


def test_token_log_probs_reuse_logits_leaf_and_second_backward_refused():
    leaf = torch.randn(2, 3, requires_grad=True)
    targets = torch.tensor([0, 1])
    with pytest.raises(AssertionError, match="leaf"):
        token_log_probs(leaf, targets, vocab_size=3, reuse_logits=True)
    log_probs, _ = token_log_probs(leaf * 2, targets, vocab_size=3, reuse_logits=True)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="no second backward"):
        log_probs.sum().backward()


class LargestTensor(TorchDispatchMode):
    """The largest storage that any operation brings into being beside those known before, in bytes."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reuse", [True, False])
def test_token_log_probs_never_makes_a_second_copy_of_the_logits(dtype, reuse):
    tokens, columns, chunk = 512, 1000, 16
    leaf = torch.randn(tokens + 5, columns + 24).to(dtype).requires_grad_()
    logits = leaf * 1.0
    targets, positions = torch.randint(0, columns, (tokens,)), torch.arange(5, tokens + 5)
    with LargestTensor(leaf, logits) as memory:
        log_probs, entropy = token_log_probs(
            logits,
            targets,
            vocab_size=columns,
            with_entropy=True,
            temperature=0.5,
            positions_T=positions,
            chunk_tokens=chunk,
            reuse_logits=reuse,
        )
        forward = memory.largest
        (gradient,) = torch.autograd.grad((log_probs + entropy).sum(), logits)
    one_chunk = chunk * columns * 4
    assert forward <= one_chunk
    # without reuse the one further tensor is the gradient, in the logits' dtype
    assert memory.largest == (max(one_chunk, 512 * 8) if reuse else logits.untyped_storage().nbytes())
    assert gradient.dtype == dtype
    assert (gradient.data_ptr() == logits.data_ptr()) == reuse
