"""One GPU does what the CPU does: the same training step, the same checkpoints; and how fast.

The CPU side runs in a process of its own that sees no GPU, the GPU side in another; TF32 is off, so that fp32 means
fp32.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

SMOOTH = {"lr": 1.0, "critic_lr": 1.0, "adam_eps": 1.0, "clip_grad": 0.0}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Any]]:
    from miles.backends.megatron.local_group import LocalGroup

    hidden, exact = (
        {"CUDA_VISIBLE_DEVICES": ""},
        {"NVIDIA_TF32_OVERRIDE": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    )
    with LocalGroup(1, environment=hidden, threads=8) as cpu, LocalGroup(1, environment=exact) as cuda:
        yield {"cpu": cpu, "cuda": cuda}


def train(processes: dict[str, Any], device: str, *, settings: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    import megatron_tasks

    arguments["settings"] = settings | {"device": device}
    (result,) = processes[device].run(megatron_tasks.train_to_host, world_size=1, timeout_s=240.0, **arguments)
    return result


@pytest.mark.parametrize(
    ("role", "objective", "extra"),
    [
        pytest.param("actor", "sft", {}, id="sft"),
        pytest.param("actor", "policy", {"entropy_coef": 0.01}, id="policy"),
        pytest.param("critic", "value", {}, id="value_mse"),
        pytest.param("critic", "value", {"value_loss_type": "classification", "value_num_bins": 11}, id="value_bins"),
    ],
)
def test_step_on_gpu_equals_step_on_cpu(
    role: str,
    objective: str,
    extra: dict[str, Any],
    processes: dict[str, Any],
    model_folder: Callable[..., str],
    batch: dict[str, Any],
) -> None:
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra}
    cpu, cuda = (
        train(processes, device, role=role, objective=objective, batch=batch, settings=settings)
        for device in ("cpu", "cuda")
    )
    for name, value in cpu["metrics"][0].items():
        assert cuda["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, array in cpu["weights"].items():
        np.testing.assert_allclose(cuda["weights"][name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_checkpoint_cpu_to_gpu_to_cpu_continues_the_run(
    processes: dict[str, Any], model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"hf_checkpoint": model_folder("llama", tied=True), "lr": 1e-2, "adam_eps": 1e-3, "save": str(tmp_path)}
    common = {"role": "actor", "objective": "sft", "batch": batch}
    whole = train(processes, "cpu", settings=settings | {"save": str(tmp_path / "w")}, steps=3, **common)
    train(processes, "cpu", settings=settings, steps=1, save_at=(1,), **common)
    settings["load"] = str(tmp_path)
    on_gpu = train(processes, "cuda", settings=settings, steps=1, save_at=(2,), **common)
    back = train(processes, "cpu", settings=settings, steps=1, **common)
    assert (on_gpu["start"], back["start"]) == (1, 2)
    for name, array in whole["weights"].items():
        np.testing.assert_allclose(back["weights"][name], array, atol=1e-4, err_msg=name)


def test_gpu_tokens_per_second_are_reported(processes: dict[str, Any], tmp_path: Path) -> None:
    import megatron_tasks
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    model.save_pretrained(tmp_path)
    started = time.monotonic()
    (figures,) = processes["cuda"].run(
        megatron_tasks.speed,
        world_size=1,
        timeout_s=240.0,
        settings={"hf_checkpoint": str(tmp_path), "device": "cuda", "bf16": True, "lr": 1e-5},
        rows=16,
        length=1024,
        micro_batch_size=8,
        vocab_size=32000,
    )
    print(f"\nGPU bf16, {figures['parameters'] / 1e6:.0f}M parameters, 16 x 1024 tokens a step: {figures}")
    print(f"whole test {time.monotonic() - started:.0f} s")
    assert figures["tokens_per_s"] > 0
