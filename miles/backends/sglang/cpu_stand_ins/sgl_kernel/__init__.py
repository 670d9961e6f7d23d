"""Stand-in for sgl-kernel in the process tree of an SGLang server on a CPU.

The published wheel holds CUDA kernels only. Every name exists here and raises when called, but for the one operator
that SGLang's PyTorch paths want on a CPU: `murmur_hash32_cpu`, which turns a sampling seed into noise.
"""

import sys

import torch


def _refusal(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{name} needs a GPU: this server runs on a CPU without sgl-kernel")

    return refuse


def __getattr__(name: str):
    # A probe for a submodule must fail as an import does.
    if name.startswith("__"):
        raise AttributeError(name)
    return _refusal(f"sgl_kernel.{name}")


def _as_int32(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits


def _multiply(h: torch.Tensor, factor: int) -> torch.Tensor:
    return h.mul_(_as_int32(factor))


def _shift_right(h: torch.Tensor, bits: int) -> torch.Tensor:
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotate_left(h: torch.Tensor, bits: int) -> torch.Tensor:
    low = _shift_right(h, 32 - bits)
    return h.bitwise_left_shift_(bits).bitwise_or_(low)


def _scramble(block: torch.Tensor) -> torch.Tensor:
    return _multiply(_rotate_left(_multiply(block, 0xCC9E2D51), 15), 0x1B873593)


def _absorb(h: torch.Tensor) -> torch.Tensor:
    return _rotate_left(h, 13).mul_(5).add_(_as_int32(0xE6546B64))


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of the blocks [seed low, seed high, position, column].

    seed: (n,) uint64; positions: (n,) integers; col_indices: (m,) integers. Returns (n, m) uint32.

    Computed in int32, which wraps as the hash wants it to, in place: the matrix has a column for each token of the
    vocabulary, and int64 takes several times as long.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    rows = torch.zeros_like(seed, dtype=torch.int32)
    # A conversion to int32 keeps the low 32 bits.
    for block in (seed.to(torch.int32), (seed >> 32).to(torch.int32), positions.to(torch.int32, copy=True)):
        rows = _absorb(rows.bitwise_xor_(_scramble(block)))
    h = _absorb(rows[:, None] ^ _scramble(col_indices.to(torch.int32, copy=True)))
    h.bitwise_xor_(16)  # length of the four blocks in bytes
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = _multiply(h.bitwise_xor_(_shift_right(h, bits)), factor)
    return h.bitwise_xor_(_shift_right(h, 16)).view(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
sys.modules[__name__].__dict__["murmur_hash32_cpu"] = torch.ops.sgl_kernel.murmur_hash32_cpu
