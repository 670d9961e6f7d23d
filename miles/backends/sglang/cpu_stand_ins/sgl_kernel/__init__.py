"""Stand-in for sgl-kernel in the process tree of an SGLang server on a CPU.

The published wheel holds CUDA kernels only. Every name exists here and raises when called, but for the one operator
that SGLang's PyTorch paths want on a CPU: `murmur_hash32_cpu`, which turns a sampling seed into noise.
"""

import sys

import torch

_MASK = 0xFFFFFFFF


def _refusal(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{name} needs a GPU: this server runs on a CPU without sgl-kernel")

    return refuse


def __getattr__(name: str):
    # A probe for a submodule must fail as an import does.
    if name.startswith("__"):
        raise AttributeError(name)
    return _refusal(f"sgl_kernel.{name}")


def _multiply(a: torch.Tensor, b: int) -> torch.Tensor:
    # a * b modulo 2**32; int64 wraps modulo 2**64, of which the low 32 bits are exact.
    return (a * b) & _MASK


def _rotate_left(a: torch.Tensor, bits: int) -> torch.Tensor:
    return ((a << bits) | (a >> (32 - bits))) & _MASK


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = _multiply(_rotate_left(_multiply(k, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate_left(h ^ k, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of the blocks [seed low, seed high, position, column].

    seed: (n,) uint64; positions: (n,) integers; col_indices: (m,) integers. Returns (n, m) uint32.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    low, high = seed & _MASK, (seed >> 32) & _MASK
    rows = torch.zeros_like(low)
    for block in (low, high, positions.to(torch.int64) & _MASK):
        rows = _mix(rows, block)
    h = _mix(rows[:, None], (col_indices.to(torch.int64) & _MASK)[None, :])
    h = h ^ 16  # length of the four blocks in bytes
    h = _multiply(h ^ (h >> 16), 0x85EBCA6B)
    h = _multiply(h ^ (h >> 13), 0xC2B2AE35)
    return (h ^ (h >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
sys.modules[__name__].__dict__["murmur_hash32_cpu"] = torch.ops.sgl_kernel.murmur_hash32_cpu
