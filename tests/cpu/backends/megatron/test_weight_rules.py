"""The QKV interleave, gate/up merge and vocabulary padding, against a layout written out by hand in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.vocab_parallel import token_log_probs
from miles.backends.megatron.weight_rules import Rule, build_rules
from miles.backends.megatron.weights import build_buckets, from_shards, to_shard


def architecture(**changes: Any) -> Architecture:
    settings: dict[str, Any] = {
        "model_type": "qwen2",
        "num_layers": 4,
        "hidden_size": 6,
        "ffn_hidden_size": 8,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "head_dim": 3,
        "vocab_size": 300,
        "max_position_embeddings": 16,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tied_embeddings": False,
    }
    return Architecture(**(settings | changes))


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rules_every_parameter_survives_the_round_trip(size: int) -> None:
    model = architecture()
    for rule in build_rules(model, pipeline_size=2):
        tensors = [numbered(shape, 1000 * i) for i, shape in enumerate(rule.shapes)]
        shards = [to_shard(rule, tensors, architecture=model, rank=rank, size=size) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1, rule.megatron
        for back, tensor in zip(from_shards(rule, shards, architecture=model), tensors, strict=True):
            assert torch.equal(back, tensor), rule.megatron


def test_qkv_shard_holds_each_groups_queries_then_key_then_value() -> None:
    model = architecture()
    rule = next(
        r
        for r in build_rules(model, pipeline_size=1)
        if r.megatron.endswith("layers.0.self_attention.linear_qkv.bias")
    )
    q, k, v = (
        np.array([f"{name}{head}.{i}" for head in range(heads) for i in range(3)])
        for name, heads in (("q", 8), ("k", 4), ("v", 4))
    )
    code = {label: number for number, label in enumerate([*q, *k, *v])}
    tensors = [torch.tensor([code[label] for label in part]) for part in (q, k, v)]
    second = to_shard(rule, tensors, architecture=model, rank=1, size=2).tolist()
    by_hand = []
    for group in (2, 3):
        for name, head in (("q", 2 * group), ("q", 2 * group + 1), ("k", group), ("v", group)):
            by_hand += [code[f"{name}{head}.{i}"] for i in range(3)]
    assert second == by_hand


def test_vocabulary_rows_past_the_end_are_zero_and_stripped() -> None:
    model = architecture()
    rule = build_rules(model, pipeline_size=1)[0]
    assert isinstance(rule, Rule) and rule.kind == "vocab"
    whole = numbered((300, 6), 1)
    shards = [to_shard(rule, [whole], architecture=model, rank=rank, size=4) for rank in range(4)]
    assert [tuple(s.shape) for s in shards] == [(128, 6)] * 4
    assert torch.equal(torch.cat(shards)[:300], whole) and not torch.cat(shards)[300:].any()


def test_rules_name_stage_local_layers_once_each() -> None:
    rules = build_rules(architecture(), pipeline_size=2)
    assert len({(r.stage, r.megatron) for r in rules}) == len(rules)
    owners = {name: r.stage for r in rules for name in r.hf}
    assert owners["model.layers.1.mlp.down_proj.weight"] == 0
    assert owners["model.layers.2.mlp.down_proj.weight"] == 1
    assert (owners["model.embed_tokens.weight"], owners["model.norm.weight"], owners["lm_head.weight"]) == (0, 1, 1)


def test_buckets_hold_every_tensor_in_order_within_the_limit() -> None:
    rules = build_rules(architecture(), pipeline_size=1)
    buckets = build_buckets(rules, dtype=torch.float32, max_bytes=2000)
    assert [rule for bucket in buckets for rule in bucket.rules] == rules
    for bucket in buckets:
        size = sum(int(np.prod(shape)) * 4 for _, _, shape in bucket.metadata())
        assert size <= 2000 or len(bucket.rules) == 1


def test_token_log_probs_and_gradients_equal_log_softmax_without_the_padding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 128, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(0, 100, (7,))
    weight, entropy_weight = torch.randn(7), torch.randn(7)
    found, entropy = token_log_probs(logits, targets, vocab_size=100, with_entropy=True)
    (found * weight + entropy * entropy_weight).sum().backward()
    gradient = logits.grad
    assert gradient is not None

    reference = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(reference[:, :100], dim=-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (expected * weight + expected_entropy * entropy_weight).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), reference.grad, atol=1e-6, rtol=1e-5)
    assert not gradient[:, 100:].any()
