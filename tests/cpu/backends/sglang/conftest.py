"""Log-probabilities by transformers, and the processes of a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch


@pytest.fixture(scope="session")
def reference_log_probs() -> Callable[..., list[float]]:
    """`(model, prompt, response, temperature=1.0)` -> transformers' log-probability of each response token."""

    @torch.no_grad()
    def log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.double() / temperature, dim=-1)
        return rows[torch.arange(len(response)), torch.tensor(response)].tolist()

    return log_probs


@pytest.fixture
def llama(tiny_llama: Path) -> Any:
    """The tests' model in transformers, fp32; a fresh copy for each test."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.fixture(scope="session")
def processes_of() -> Callable[[int], list[psutil.Process]]:
    """All living processes below a pid."""

    def processes(pid: int) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    return processes
