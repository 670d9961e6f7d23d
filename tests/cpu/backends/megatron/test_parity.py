"""Megatron's numbers against transformers', and the mapping of weights both ways.

Expected logits come from transformers' own models, one row at a time without padding; exported tensors are compared
bit by bit with the files that were loaded.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
MODELS = [(kind, tied) for kind in ("llama", "qwen2", "qwen3") for tied in (False, True)]


def world_size(layout: dict[str, Any]) -> int:
    return math.prod(size for name, size in layout.items() if name.endswith("_parallel_size"))


@pytest.fixture(scope="module")
def expected_logits(model_folder: Callable[..., str]) -> Callable[[str, bool], tuple[list[list[int]], list[Any]]]:
    draw = random.Random(3)
    rows = [[draw.randrange(150) for _ in range(length)] for length in (17, 5, 30, 9, 2)]
    cache: dict[tuple[str, bool], list[Any]] = {}

    def get(kind: str, tied: bool) -> tuple[list[list[int]], list[Any]]:
        import torch
        from transformers import AutoModelForCausalLM

        if (kind, tied) not in cache:
            model = AutoModelForCausalLM.from_pretrained(
                model_folder(kind, tied=tied), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                cache[kind, tied] = [model(torch.tensor([row])).logits[0, :-1].numpy() for row in rows]
        return rows, cache[kind, tied]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_logits_any_layout_equal_transformers(
    kind: str, tied: bool, layout: str, ranks: Any, model_folder: Callable[..., str], expected_logits: Any
) -> None:
    rows, expected = expected_logits(kind, tied)
    settings = {"hf_checkpoint": model_folder(kind, tied=tied), **LAYOUTS[layout]}
    found = ranks.first("logits", world_size=world_size(settings), rows=rows, settings=settings)
    for form in ("padded", "packed"):
        difference = max(float(np.abs(found[form][i] - expected[i]).max()) for i in range(len(rows)))
        print(f"{kind:6} {'tied' if tied else 'untied':7} {layout:7} {form} {difference:.2e}")
        assert difference <= 1e-5


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_export_untrained_model_equals_loaded_bit_by_bit(
    kind: str, tied: bool, layout: str, ranks: Any, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source, target = model_folder(kind, tied=tied), tmp_path / "export"
    settings = {"hf_checkpoint": source, **LAYOUTS[layout]}
    ranks("export", world_size=world_size(settings), target=str(target), settings=settings)
    loaded, exported = load_file(Path(source) / "model.safetensors"), load_file(target / "model.safetensors")
    assert set(exported) == set(loaded)
    for name, tensor in loaded.items():
        assert exported[name].dtype == tensor.dtype, name
        assert exported[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert (target / "config.json").read_bytes() == (Path(source) / "config.json").read_bytes()


def test_export_bfloat16_shards_trained_in_float32_keeps_dtype_and_bits(
    ranks: Any, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama", tied=False), dtype=torch.bfloat16)
    model.save_pretrained(source, max_shard_size="40KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    target = tmp_path / "export"
    ranks("export", world_size=1, target=str(target), settings={"hf_checkpoint": str(source)})
    exported = load_file(target / "model.safetensors")
    assert set(exported) == set(index)
    for name, file in index.items():
        tensor = load_file(source / file)[name]
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name].view(torch.int16), tensor.view(torch.int16)), name


def test_weights_sent_in_buckets_arrive_under_their_hugging_face_names(
    ranks: Any, model_folder: Callable[..., str]
) -> None:
    from safetensors.numpy import load_file

    from miles.backends.megatron.local_group import free_port

    source = model_folder("qwen2", tied=False)
    buckets, received = ranks(
        "send_weights",
        world_size=2,
        settings={"hf_checkpoint": source},
        group_port=free_port(),
        max_bytes=20_000,
    )
    assert len(buckets) == len(received) > 1
    expected = load_file(Path(source) / "model.safetensors")
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(expected)
    for bucket, data in zip(buckets, received, strict=True):
        assert data == b"".join(expected[name].tobytes() for name in bucket.names)
        assert bucket.nbytes == len(data)
        assert bucket.shapes == tuple(expected[name].shape for name in bucket.names)
