"""Log-probabilities and entropies over real tensor-parallel ranks, one of which holds nothing but padding."""

from typing import Any

import numpy as np
import torch


def test_token_log_probs_vocabulary_over_four_ranks_equals_one_softmax(ranks: Any) -> None:
    torch.manual_seed(0)
    tokens, vocab_size, temperature = 7, 9, 0.7
    # rank 3 holds columns 9 to 11, which are padding; large logits there must not matter
    logits = torch.randn(tokens, 12) * 8
    logits[:, vocab_size:] = 1e4
    # the largest logits of the rows lie on different ranks, and one row is far from the others
    logits[2] += 300.0
    targets = [0, 8, 3, 2, 5, 8, 6]
    results = ranks(
        "split_log_probs",
        world_size=4,
        logits=logits.numpy(),
        targets=targets,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=2,
    )
    leaf = logits.double().requires_grad_()
    log_p = torch.log_softmax(leaf[:, :vocab_size] / temperature, dim=-1)
    expected = log_p[torch.arange(tokens), torch.tensor(targets)]
    entropy = -(log_p.exp() * log_p).sum(-1)
    weight = torch.arange(1, tokens + 1)
    (expected * weight - 0.5 * entropy * weight).sum().backward()
    assert leaf.grad is not None
    for result in results:
        np.testing.assert_allclose(result["log_probs"], expected.detach().numpy(), atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(result["entropy"], entropy.detach().numpy(), atol=2e-5, rtol=1e-5)
        np.testing.assert_array_equal(result["log_probs"], results[0]["log_probs"])
    gradient = np.concatenate([result["gradient"] for result in results], axis=1)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=5e-5, rtol=1e-4)
    assert not gradient[:, vocab_size:].any()
