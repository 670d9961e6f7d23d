"""Skips this folder where there is no GPU, and shares the tasks and models of the CPU tests of Megatron."""

import importlib.util
import sys
from pathlib import Path

import pytest

_CPU_TESTS = Path(__file__).parents[1] / "cpu" / "backends" / "megatron"
sys.path.insert(0, str(_CPU_TESTS))
_spec = importlib.util.spec_from_file_location("megatron_cpu_conftest", _CPU_TESTS / "conftest.py")
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
batch, model_folder = _shared.batch, _shared.model_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is false"))
