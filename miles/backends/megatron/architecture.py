"""What a Hugging Face `config.json` says about a dense decoder, checked field by field. Imports no Megatron."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from miles.config.groups import flag_of

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of a Llama, Qwen2 or Qwen3 dense decoder; enough to build it and to name each of its weights."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Number of key/value heads."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding as Hugging Face stores it, without padding."""
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Vocabulary rows in Megatron: the next multiple of 128 x the tensor parallel size."""
        multiple = VOCAB_MULTIPLE * tensor_size
        return math.ceil(self.vocab_size / multiple) * multiple

    def untied(self) -> Architecture:
        """The same decoder with an output layer of its own, which is how a critic is built."""
        return replace(self, tied_embeddings=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_layout(
        self, *, tensor_size: int, pipeline_size: int, role: Literal["actor", "critic"] = "actor"
    ) -> None:
        """Raise ValueError, naming the role's flag and the field, where the model cannot be split this way."""
        for field in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            if getattr(self, field) % tensor_size:
                raise ValueError(
                    f"{flag_of('tensor_model_parallel_size', role)} {tensor_size} does not divide "
                    f"the model's {field} {getattr(self, field)}"
                )
        if self.num_layers % pipeline_size:
            raise ValueError(
                f"{flag_of('pipeline_model_parallel_size', role)} {pipeline_size} does not divide "
                f"the model's num_layers {self.num_layers}"
            )

    @classmethod
    def from_hf(cls, folder: str | Path) -> Architecture:
        """Read `config.json` of a Hugging Face model folder.

        Raises:
            ValueError: The folder or file is missing or unreadable, or a field holds something this backend cannot
                run; the message names the file and the field.
        """
        path = Path(folder) / "config.json"
        if not Path(folder).is_dir():
            raise ValueError(f"model folder {folder} does not exist")
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"model folder {folder} has no config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: expected a JSON object")
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ValueError(
                f"{path}: model_type {model_type!r} is not supported; "
                f"expected one of {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        values = raw if _states_all(raw) else _filled_in(Path(folder))
        rope_theta = _check_features(path, values)
        heads = values["num_attention_heads"]
        return cls(
            model_type=model_type,
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_position_embeddings"],
            norm_eps=float(values["rms_norm_eps"]),
            rope_theta=rope_theta,
            tied_embeddings=bool(values["tie_word_embeddings"]),
        )


_INTEGERS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)


def _states_all(raw: dict[str, Any]) -> bool:
    """Whether a config.json itself holds all that is read here, each of its type."""
    rope = raw.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else raw.get("rope_theta")
    return (
        all(type(raw.get(name)) is int and raw[name] > 0 for name in _INTEGERS)
        and type(raw.get("rms_norm_eps")) is float
        and type(raw.get("tie_word_embeddings")) is bool
        and isinstance(raw.get("hidden_act"), str)
        and type(theta) in (int, float)
    )


def _filled_in(folder: Path) -> dict[str, Any]:
    """All fields of a config.json that leaves out what equals transformers' defaults; costs seconds of imports."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True).to_dict()
    except Exception as error:
        raise ValueError(f"{folder / 'config.json'}: transformers refuses it: {error}") from None


def _check_features(path: Path, values: dict[str, Any]) -> float:
    """Refuse what the Megatron model would silently compute differently; return the rotary base."""

    def refuse(field: str, expected: str) -> None:
        raise ValueError(f"{path}: {field} = {values[field]!r} is not supported; expected {expected}")

    if values["hidden_act"] != "silu":
        refuse("hidden_act", "'silu'")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "attention_dropout", "quantization_config"):
        if values.get(field):
            refuse(field, "it to be off")
    if any(kind != "full_attention" for kind in values.get("layer_types") or ()):
        refuse("layer_types", "full_attention in every layer")
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"{path}: rope_scaling of rope_type {kind!r} is not supported; expected 'default'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor is not supported; expected 1.0")
    theta = rope.get("rope_theta") or values.get("rope_theta")
    if theta is None:
        raise ValueError(f"{path}: rope_theta is missing")
    return float(theta)
