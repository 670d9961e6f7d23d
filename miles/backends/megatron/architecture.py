"""What a Hugging Face `config.json` says about a dense decoder, checked field by field. Imports no Megatron."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from miles.config.groups import flag_of
from miles.config.hf_folder import positive_integer, read_json_object

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
VOCAB_MULTIPLE = 128
_DEFAULT_ROPE_THETA = 10000.0
"""transformers' own, where a config.json says nothing."""


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
        config = read_json_object(path)
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ValueError(
                f"{path}: model_type {model_type!r} is not supported; "
                f"expected one of {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        hidden = positive_integer(config, "hidden_size", path)
        heads = positive_integer(config, "num_attention_heads", path)
        # As transformers fills it in; a Qwen without the key is damaged.
        if config.get("num_key_value_heads") is None and (model_type == "llama" or "num_key_value_heads" in config):
            config["num_key_value_heads"] = heads
        groups = positive_integer(config, "num_key_value_heads", path)
        if heads % groups:
            raise ValueError(f"{path}: num_key_value_heads {groups} does not divide num_attention_heads {heads}")
        own_head_dim = model_type == "qwen3" or config.get("head_dim") is not None
        # transformers refuses such a Llama even where head_dim is given.
        if hidden % heads and (model_type == "llama" or not own_head_dim):
            raise ValueError(f"{path}: num_attention_heads {heads} does not divide hidden_size {hidden}")
        head_dim = positive_integer(config, "head_dim", path) if own_head_dim else hidden // heads
        if head_dim % 2:
            raise ValueError(f"{path}: head_dim is {head_dim}, expected an even number, which rotary embeddings need")
        tied = config.get("tie_word_embeddings", False)
        if type(tied) is not bool:
            raise ValueError(f"{path}: tie_word_embeddings is {tied!r}, expected true or false")
        return cls(
            model_type=model_type,
            num_layers=positive_integer(config, "num_hidden_layers", path),
            hidden_size=hidden,
            ffn_hidden_size=positive_integer(config, "intermediate_size", path),
            num_attention_heads=heads,
            num_query_groups=groups,
            head_dim=head_dim,
            vocab_size=positive_integer(config, "vocab_size", path),
            max_position_embeddings=positive_integer(config, "max_position_embeddings", path),
            norm_eps=_positive_number(config, "rms_norm_eps", path),
            rope_theta=_check_features(path, config),
            tied_embeddings=tied,
        )


def _positive_number(config: dict[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or value is True or not 0 < value < math.inf:
        state = f"is {value!r}" if key in config else "is missing"
        raise ValueError(f"{path}: {key} {state}, expected a number above 0")
    return float(value)


def _check_features(path: Path, values: dict[str, Any]) -> float:
    """Refuse what the Megatron model would silently compute differently; return the rotary base."""

    def refuse(field: str, expected: str) -> None:
        raise ValueError(f"{path}: {field} = {values[field]!r} is not supported; expected {expected}")

    if values.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "'silu'")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "attention_dropout", "quantization_config"):
        if values.get(field):
            refuse(field, "it to be off")
    layer_types = values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        refuse("layer_types", "full_attention in every layer")
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(field) or {}, dict):
            refuse(field, "an object")
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"{path}: rope_scaling of rope_type {kind!r} is not supported; expected 'default'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor is not supported; expected 1.0")
    return _positive_number({"rope_theta": _DEFAULT_ROPE_THETA} | values | rope, "rope_theta", path)
