"""Checksums against independent computations; that they are SGLang's own is shown on a live server in tests/cpu."""

import hashlib

import numpy as np
import pytest
import torch

from miles.backends.weight_checksums import byte_hash, differing_names, engine_checksums, engine_parameters, word_hash


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYER = {
    "model.embed_tokens.weight": rand(100, 8),
    "model.layers.0.self_attn.q_proj.weight": rand(16, 8),
    "model.layers.0.self_attn.q_proj.bias": rand(16),
    "model.layers.0.self_attn.k_proj.weight": rand(4, 8),
    "model.layers.0.self_attn.k_proj.bias": rand(4),
    "model.layers.0.self_attn.v_proj.weight": rand(4, 8) + 1,
    "model.layers.0.self_attn.v_proj.bias": rand(4) + 1,
    "model.layers.0.self_attn.o_proj.weight": rand(8, 16),
    "model.layers.0.mlp.gate_proj.weight": rand(12, 8),
    "model.layers.0.mlp.up_proj.weight": rand(12, 8) + 1,
    "model.layers.0.mlp.down_proj.weight": rand(8, 12),
    "model.norm.weight": rand(8),
    "lm_head.weight": rand(100, 8) + 1,
}


def test_byte_hash_is_the_start_of_sha256_over_the_bytes():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = hashlib.sha256(values.T.copy().tobytes()).hexdigest()[:16]
    assert byte_hash(torch.from_numpy(values).T) == expected
    assert byte_hash(torch.ones(2, dtype=torch.bfloat16)) == hashlib.sha256(b"\x80\x3f" * 2).hexdigest()[:16]


def slow_word_hash(data: bytes) -> str:
    """The same sums word by word, in Python integers."""
    m32, m64 = 2**32 - 1, 2**64 - 1

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & m32
        x = (x ^ x >> 13) * 0xC2B2AE35 & m32
        return x ^ x >> 16

    def rotl(x, r):
        return (x << r | x >> (32 - r)) & m32

    data += bytes(-len(data) % 4)
    words = np.frombuffer(data, dtype="<u4").tolist()
    s1, s2 = 0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & m32
    total = 0
    for tile in range(0, len(words), 8192):
        h1 = h2 = 0
        for i, v in enumerate(words[tile : tile + 8192], start=tile):
            h1 = (h1 + mix(v ^ ((i * 0x27D4EB2D + s1) & m32) ^ rotl(i, 15))) & m32
            h2 = (h2 + mix(v ^ ((i * 0x165667B1 + s2) & m32) ^ rotl(i, 13))) & m32
        total += mix(h1 ^ len(words) * 4) << 32 | mix(h2 ^ len(words) * 4)
    x = total & m64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & m64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & m64
    return f"{x ^ x >> 31:016x}"


@pytest.mark.parametrize("shape", [(1,), (3, 5), (8192,), (8193,), (100, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_word_hash_equals_the_word_by_word_sum(shape, dtype):
    tensor = rand(*shape).to(dtype)
    assert word_hash(tensor) == slow_word_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_word_hash_of_nothing_is_zero():
    assert word_hash(torch.empty(0)) == "0" * 16


def test_engine_parameters_fuse_pad_and_keep():
    found = engine_parameters(LAYER.items())
    assert set(found) == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    attention = "model.layers.0.self_attn."
    parts = [LAYER[f"{attention}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found[attention + "qkv_proj.weight"], torch.cat(parts))
    # The vocabulary of 100 is padded to a multiple of 64 by zero rows.
    assert found["lm_head.weight"].shape == (128, 8) and not found["lm_head.weight"][100:].any()


def test_engine_parameters_of_two_ranks_hold_every_row_once():
    ranks = [engine_parameters(LAYER.items(), tp_rank=rank, tp_size=2) for rank in range(2)]
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    q = torch.cat([rank[qkv][:8] for rank in ranks])
    v = torch.cat([rank[qkv][10:] for rank in ranks])
    assert torch.equal(q, LAYER["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(v, LAYER["model.layers.0.self_attn.v_proj.weight"])
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(torch.cat([rank[down] for rank in ranks], dim=1), LAYER[down])
    assert torch.equal(ranks[1]["model.norm.weight"], LAYER["model.norm.weight"])


def test_tied_model_has_no_output_layer():
    assert "lm_head.weight" not in engine_parameters(LAYER.items(), tied=True)


def test_missing_part_of_a_fused_parameter_is_named():
    some = {name: tensor for name, tensor in LAYER.items() if "up_proj" not in name}
    with pytest.raises(ValueError, match=r"mlp.gate_up_proj.weight is made of 2 tensors, got only parts \[0\]"):
        engine_parameters(some.items())


def test_size_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"q_proj.weight: dimension 0 of 16 does not divide over 3"):
        engine_parameters(LAYER.items(), tp_rank=0, tp_size=3)


def test_one_changed_bit_names_its_parameter():
    before = engine_checksums(LAYER.items())
    changed = dict(LAYER)
    name = "model.layers.0.mlp.up_proj.weight"
    changed[name] = LAYER[name].clone()
    changed[name].view(torch.int32)[3, 3] ^= 1
    assert differing_names(before, engine_checksums(changed.items())) == ["model.layers.0.mlp.gate_up_proj.weight"]
    assert differing_names({"a": "1"}, {"b": "1"}) == ["a", "b"]
