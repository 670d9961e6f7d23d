"""A model folder that transformers wrote."""

from pathlib import Path
from typing import Any

from miles.config.hf_folder import inspect_hf_folder


def test_folder_written_by_transformers_is_accepted(tiny_hf_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_hf_model)
    assert inspect_hf_folder(tiny_hf_model).num_parameters == sum(p.numel() for p in model.parameters())
