"""The stand-ins: names exist, nothing computes silently, and the one real operator is MurmurHash3."""

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import miles.backends.sglang.server as server_module

STAND_INS = Path(server_module.__file__).with_name("cpu_stand_ins")


def load_stand_in(path: str):
    spec = importlib.util.spec_from_file_location(f"stand_in_{Path(path).parts[0]}", STAND_INS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sgl_kernel():
    return load_stand_in("sgl_kernel/__init__.py")


@pytest.fixture(scope="module")
def batched_decode():
    return load_stand_in("batched_decode.py")


def murmur3_x86_32(data: bytes, seed: int = 0) -> int:
    """Written from the published algorithm; whole blocks only."""

    def rotl(x, r):
        return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

    h = seed
    for (k,) in struct.iter_unpack("<I", data):
        k = rotl(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def test_reference_hash_gives_a_published_test_vector():
    # Published vectors of MurmurHash3_x86_32: "test" and "aaaa" with their seeds.
    assert murmur3_x86_32(b"test") == 0xBA6BD213
    assert murmur3_x86_32(b"aaaa", seed=0x9747B28C) == 0x5A97808A


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**63 - 1, 2**64 - 1, 0xDEADBEEF12345678])
def test_murmur_operator_equals_the_reference(sgl_kernel, seed):
    positions, columns = [0, 5, 4095], [0, 1, 127, 151_935]
    seeds = torch.tensor([seed] * 3, dtype=torch.uint64)
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(seeds, torch.tensor(positions), torch.tensor(columns))
    assert found.dtype == torch.uint32
    expected = [[murmur3_x86_32(struct.pack("<QII", seed, p, c)) for c in columns] for p in positions]
    assert found.tolist() == expected


def test_other_kernels_exist_and_refuse(sgl_kernel):
    with pytest.raises(NotImplementedError, match=r"sgl_kernel.silu_and_mul needs a GPU"):
        sgl_kernel.silu_and_mul(1)


def run_with_stand_ins(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_kernels_can_be_defined_and_not_launched():
    out = run_with_stand_ins("""
import triton, triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"B": 1}, num_warps=2)], key=["n"])
@triton.jit
def kernel(x, n: tl.constexpr, out: tl.pointer_type = None) -> tl.uint32:
    return tl.load(x)

@triton.jit(do_not_specialize=["n"])
def other(n): ...

WIDTH: tl.constexpr = tl.constexpr(8)
assert WIDTH == 8 and triton.cdiv(7, 2) == 4 and [triton.next_power_of_2(n) for n in (1, 5, 8)] == [1, 8, 8]
for launch in (lambda: kernel[(1,)](1, 2), lambda: other(3), lambda: tl.load(1), lambda: libdevice.exp(1)):
    try:
        launch()
    except NotImplementedError as error:
        print(error)
try:
    import triton.knobs
except ImportError:
    print("no knobs")
""")
    lines = out.splitlines()
    assert lines[0] == "Triton kernel kernel was launched, but this server runs on a CPU"
    assert len(lines) == 5 and lines[-1] == "no knobs"


def test_torchvision_has_real_modes_and_refusing_transforms():
    out = run_with_stand_ins("""
from torchvision.transforms import InterpolationMode, functional as F
from torchvision.transforms.v2 import functional as F2
from torchvision.io import ImageReadMode, decode_image
print(InterpolationMode.NEAREST_EXACT.value)
for f in (F.resize, F2.resize, decode_image):
    try:
        f(1)
    except NotImplementedError:
        print("refused")
""")
    assert out.split() == ["nearest-exact", "refused", "refused", "refused"]


def test_hidden_sitecustomize_of_the_environment_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    environment = {**os.environ, "PYTHONPATH": f"{STAND_INS}{os.pathsep}{tmp_path}"}
    out = subprocess.run([sys.executable, "-c", "print('end')"], env=environment, capture_output=True, text=True)
    assert out.stdout.split() == ["mine", "end"]


def test_nothing_of_the_stand_ins_is_importable_here():
    assert (
        importlib.util.find_spec("sgl_kernel") is None
        or STAND_INS
        not in Path(
            importlib.util.find_spec("sgl_kernel").origin or ""  # pyright: ignore[reportOptionalMemberAccess]
        ).parents
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (4, 1)])
@pytest.mark.parametrize("padded_tokens", [1, 64, 16_384])
def test_batched_decode_any_lengths_equals_attention_request_by_request(
    batched_decode, monkeypatch, heads, kv_heads, padded_tokens
):
    monkeypatch.setattr(batched_decode, "_PADDED_TOKENS", padded_tokens)
    draw = torch.Generator().manual_seed(heads * kv_heads)
    size, lengths = 8, torch.tensor([5, 1, 37, 12, 1, 64, 13])
    k_cache, v_cache = (torch.randn(400, kv_heads, size, generator=draw) for _ in range(2))
    query = torch.randn(len(lengths), heads, size, generator=draw)
    table = torch.randperm(400, generator=draw)[: 5 * 80].view(5, 80).repeat(2, 1).to(torch.int32)
    rows = torch.randperm(10, generator=draw)[: len(lengths)]

    found = batched_decode.attend(
        query, torch.empty_like(query), k_cache, v_cache, table, rows, lengths, scaling=size**-0.5
    )
    for request, length in enumerate(lengths.tolist()):
        slots = table[rows[request], :length].long()
        for head in range(heads):
            keys, values = (cache[slots, head * kv_heads // heads].double() for cache in (k_cache, v_cache))
            weights = torch.softmax(keys @ query[request, head].double() * size**-0.5, dim=0)
            torch.testing.assert_close(found[request, head].double(), weights @ values, rtol=0, atol=2e-6)


def test_batched_decode_with_a_window_or_an_encoder_is_left_to_sglang(batched_decode):
    class Backend:
        def _run_sdpa_forward_decode(self, *tensors, **options):
            return options

    batched_decode.install(Backend)
    tensors = [None] * 7
    for encoder_lens, options in (
        (None, {"sliding_window_size": 3, "is_cross_attn": False}),
        (None, {"sliding_window_size": None, "is_cross_attn": True}),
        (torch.tensor([2]), {"sliding_window_size": None, "is_cross_attn": False}),
    ):
        given = {"scaling": 0.5, "enable_gqa": True, "causal": False, **options}
        assert Backend()._run_sdpa_forward_decode(*tensors, encoder_lens, **given) == given
