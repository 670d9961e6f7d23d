"""SGLang's weight checksums, computed from Hugging Face tensors, so that a trainer and an engine can be compared.

SGLang 0.5.23 hashes each parameter of its own model: q, k and v stand in one parameter, gate and up in another, rows
of the vocabulary are padded, and each tensor-parallel rank holds its share. On a CPU the hash is the first 8 bytes of
SHA-256 over the parameter's bytes; on a GPU it is a sum of mixed 32-bit words (`word_hash`).
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

# SGLang pads the vocabulary of embedding and output layer to a multiple of this.
_VOCAB_MULTIPLE = 64
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_MASK = 0xFFFFFFFF


def byte_hash(tensor: torch.Tensor) -> str:
    """SGLang's hash of a tensor on the CPU: 16 hexadecimal digits."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def word_hash(tensor: torch.Tensor) -> str:
    """SGLang's hash of a tensor on a GPU: 16 hexadecimal digits; computed where the tensor lies.

    Words of 32 bits are mixed with their position by two keyed finalisers of MurmurHash3 and summed within tiles of
    8192; tiles are finalised, summed modulo 2**64, and passed through splitmix64.
    """
    seed, tile = 0x243F6A88, 8192
    seeds = (seed, ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if padding := -data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, padding))
    words = data.view(torch.int32)
    length = words.numel()
    if length == 0:
        return f"{0:016x}"
    total = 0
    tiles_at_once = 512
    for start in range(0, length, tile * tiles_at_once):
        chunk = words[start : start + tile * tiles_at_once].to(torch.int64) & _MASK
        position = torch.arange(start, start + chunk.numel(), device=chunk.device) & _MASK
        halves = []
        for key, turn, by in ((0x27D4EB2D, 15, seeds[0]), (0x165667B1, 13, seeds[1])):
            place = ((position * key + by) & _MASK) ^ _rotate_left(position, turn)
            mixed = torch.nn.functional.pad(_mix(chunk ^ place), (0, -chunk.numel() % tile)).view(-1, tile)
            halves.append(_mix((mixed.sum(dim=1) & _MASK) ^ ((length * 4) & _MASK)))
        total += sum((high << 32) | low for high, low in zip(halves[0].tolist(), halves[1].tolist(), strict=True))
    x = total & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return f"{x ^ (x >> 31):016x}"


def _shard(tensor: torch.Tensor, dim: int, tp_rank: int, tp_size: int, *, name: str) -> torch.Tensor:
    if tp_size == 1:
        return tensor
    size = tensor.shape[dim]
    if size % tp_size:
        raise ValueError(f"{name}: dimension {dim} of {size} does not divide over {tp_size} tensor-parallel ranks")
    return tensor.chunk(tp_size, dim=dim)[tp_rank]


def engine_parameters(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    tied: bool = False,
) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of a dense Llama, Qwen2 or Qwen3 -> the parameters that rank `tp_rank` of an engine holds.

    Key-value heads must divide over `tp_size` (replicated heads are not covered). With `tied`, an lm_head is left out,
    as the engine has none.

    Raises:
        ValueError: a fused parameter misses one of its parts, or a size does not divide.
    """
    parameters: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in named_tensors:
        tensor = tensor.detach()
        module, _, kind = name.rpartition(".")
        prefix, _, leaf = module.rpartition(".")
        if leaf in _FUSED:
            fused, place = _FUSED[leaf]
            parts.setdefault(f"{prefix}.{fused}.{kind}", {})[place] = _shard(tensor, 0, tp_rank, tp_size, name=name)
        elif leaf in ("embed_tokens", "lm_head"):
            if tied and leaf == "lm_head":
                continue
            multiple = _VOCAB_MULTIPLE * tp_size if _VOCAB_MULTIPLE % tp_size else _VOCAB_MULTIPLE
            padding = -tensor.shape[0] % multiple
            padded = torch.nn.functional.pad(tensor, (0, 0, 0, padding)) if padding else tensor
            parameters[name] = _shard(padded, 0, tp_rank, tp_size, name=name)
        elif leaf in ("o_proj", "down_proj") and kind == "weight":
            parameters[name] = _shard(tensor, 1, tp_rank, tp_size, name=name)
        else:
            parameters[name] = tensor
    for name, found in parts.items():
        wanted = _PARTS[re.split(r"\.", name)[-2]]
        if sorted(found) != list(range(wanted)):
            raise ValueError(f"{name} is made of {wanted} tensors, got only parts {sorted(found)}")
        parameters[name] = torch.cat([found[place] for place in range(wanted)])
    return parameters


def engine_checksums(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: torch.dtype | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    tied: bool = False,
) -> dict[str, str]:
    """Checksums as `SGLangClient.checksums` gives them for an engine on `device` that holds these weights as `dtype`.

    Args:
        named_tensors: Hugging Face names and full tensors.
        dtype: dtype of the engine's parameters; None where the tensors have it already.
    """
    hashed = byte_hash if device == "cpu" else word_hash
    parameters = engine_parameters(named_tensors, tp_rank=tp_rank, tp_size=tp_size, tied=tied)
    return {name: hashed(tensor if dtype is None else tensor.to(dtype)) for name, tensor in parameters.items()}


def differing_names(ours: Mapping[str, str], engines: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ, or that only one side has, sorted."""
    return sorted(name for name in ours.keys() | engines.keys() if ours.get(name) != engines.get(name))
