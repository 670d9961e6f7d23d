"""Processes shared by all tests of this folder, and the small models they load."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Ranks import their tasks by name, so the folder that holds them must be on the path they inherit.
sys.path.insert(0, str(Path(__file__).parent))


class Ranks:
    """Runs tasks of megatron_tasks.py; replaces the processes where a task broke them."""

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, task: str, *, world_size: int, **arguments: Any) -> list[Any]:
        import megatron_tasks

        from miles.backends.megatron.local_group import LocalGroup

        if self._group is None:
            # They import torch with their first task, so ranks that no test wants cost nothing.
            self._group = LocalGroup(4, environment={"CUDA_VISIBLE_DEVICES": ""})
        try:
            results = self._group.run(
                getattr(megatron_tasks, task), world_size=world_size, timeout_s=600.0, **arguments
            )
        except RuntimeError:
            self._group = None
            raise
        return results

    def num_threads(self) -> list[int]:
        """Threads of each process."""
        return [len(os.listdir(f"/proc/{process.pid}/task")) for process in self._group._processes]

    def first(self, task: str, *, world_size: int, **arguments: Any) -> Any:
        """The first result that is not None."""
        return next(r for r in self(task, world_size=world_size, **arguments) if r is not None)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


_RANKS = Ranks()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    yield _RANKS
    _RANKS.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other folders' programs want the cores and the memory that idle ranks hold."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _RANKS.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`model_folder("qwen3", tied=True)`: a random model, made once; its norms and biases all matter."""
    made: dict[tuple[str, bool], str] = {}

    def get(kind: str, *, tied: bool) -> str:
        if (kind, tied) not in made:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            settings: dict[str, Any] = {
                "vocab_size": 150,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": tied,
                "initializer_range": 0.1,
            }
            if kind == "qwen3":
                settings["head_dim"] = 16
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).float()
            for name, param in model.named_parameters():
                if param.dim() == 1:
                    torch.nn.init.normal_(param, mean=1.0 if "norm" in name else 0.0, std=0.2)
            folder = tmp_path_factory.mktemp(f"{kind}-{'tied' if tied else 'untied'}")
            model.save_pretrained(folder)
            made[kind, tied] = str(folder)
        return made[kind, tied]

    return get


@pytest.fixture(scope="session")
def batch() -> dict[str, Any]:
    """Eight rows of different lengths, with masked tokens and every column a worker reads.

    Two responses end with token 0, which is also what lines are filled up with (faults.md row 5).
    """
    import numpy as np

    draw = np.random.default_rng(7)
    columns: dict[str, Any] = {name: [] for name in ("tokens", "response_lengths", "loss_masks", "sample_indices")}
    columns |= {"returns": [], "advantages": [], "old_log_probs": [], "values": []}
    for row in range(8):
        length, response = int(draw.integers(8, 25)), int(draw.integers(2, 7))
        mask = [1] * response
        mask[0] = row % 2
        columns["tokens"].append(draw.integers(0, 150, length).tolist())
        if row in (2, 5):
            columns["tokens"][-1][-1] = 0
        columns["response_lengths"].append(response)
        columns["loss_masks"].append(mask)
        columns["sample_indices"].append(100 + row)
        columns["returns"].append([float(row % 2)] * response)
        columns["advantages"].append(draw.normal(size=response).astype(np.float32))
        columns["old_log_probs"].append((draw.normal(size=response) * 0.3 - 5.0).astype(np.float32))
        columns["values"].append((draw.normal(size=response) * 0.2 + 0.4).astype(np.float32))
    return columns


@pytest.fixture(scope="session")
def make_shard() -> Callable[..., dict[str, Any]]:
    """`make_shard(batch)`: a whole batch as the shard of one data-parallel rank, two rows a micro-batch."""

    def make(batch: dict[str, Any]) -> dict[str, Any]:
        from megatron_tasks import make_shard

        return make_shard(batch, dp_rank=0, dp_size=1, micro_batch_size=2)

    return make
