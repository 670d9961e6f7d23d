"""The training step of one process against plain PyTorch on transformers' model; schedules, freezing, precision.

test_layouts.py compares every other layout with one process.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

OBJECTIVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("actor", "likelihood", {}),
    "policy": ("actor", "policy", {"entropy_coef": 0.01, "rollout_temperature": 0.7}),
    "value_mse": ("critic", "value", {}),
    "value_hl_gauss": ("critic", "value", {"value_loss_type": "classification", "value_num_bins": 11}),
}


def reference_loss(model: Any, batch: dict[str, Any], name: str, head: Any) -> Any:
    """Loss with plain PyTorch on transformers' model, row by row, no padding."""
    import torch

    total = sum(map(sum, batch["loss_masks"]))
    loss = torch.zeros(())
    for row, tokens in enumerate(batch["tokens"]):
        response = batch["response_lengths"][row]
        mask = torch.tensor(batch["loss_masks"][row])
        before = slice(-response - 1, -1)
        if name.startswith("value"):
            states = model.model(torch.tensor([tokens])).last_hidden_state[0, before]
            outputs = states @ head["weight"].T + head["bias"]
            target = torch.tensor(batch["returns"][row])
            if name == "value_mse":
                values, old = outputs[:, 0], torch.from_numpy(batch["values"][row])
                clipped = old + (values - old).clamp(-0.2, 0.2)
                per_token = torch.maximum((values - target) ** 2, (clipped - target) ** 2)
            else:
                # a Gaussian of .75 bin widths around the return, integrated over bins centred on 0, .1, ..., 1
                edges = torch.arange(12) / 10 - 0.05
                below = 0.5 * (1 + torch.erf((edges - target[:, None]) / (0.075 * math.sqrt(2))))
                mass = below[:, 1:] - below[:, :-1]
                per_token = -(mass / mass.sum(-1, keepdim=True) * torch.log_softmax(outputs, dim=-1)).sum(-1)
        else:
            logits = model(torch.tensor([tokens])).logits[0, before]
            log_p = torch.log_softmax(logits / (0.7 if name == "policy" else 1.0), dim=-1)
            picked = log_p.gather(1, torch.tensor(tokens[-response:])[:, None])[:, 0]
            per_token = -picked
            if name == "policy":
                advantage = torch.from_numpy(batch["advantages"][row])
                ratio = (picked - torch.from_numpy(batch["old_log_probs"][row])).exp()
                per_token = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
                per_token = per_token + 0.01 * (log_p.exp() * log_p).sum(-1)
        loss = loss + (per_token * mask).sum() / total
    return loss


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_one_process_equals_transformers(
    name: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], make_shard: Callable[..., Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    role, objective, extra = OBJECTIVES[name]
    folder = model_folder("qwen3", tied=True)
    settings = {"hf_checkpoint": folder, **extra}
    run = {"objective": objective, "shards": [make_shard(batch)], "packed": True}
    (found,) = ranks("gradients", world_size=1, role=role, settings=settings, runs={"run": run})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    head = {}
    if role == "critic":
        (start,) = ranks("load", world_size=1, role=role, settings=settings, forward_only=True)
        head = {key: torch.tensor(start["weights"][f"head.{key}"], requires_grad=True) for key in ("weight", "bias")}
    loss = reference_loss(model, batch, name, head)
    loss.backward()
    assert found["run"]["metrics"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    params = dict(model.named_parameters()) | {f"head.{key}": param for key, param in head.items()}
    expected = {key: param.grad for key, param in params.items() if param.grad is not None}
    assert set(found["run"]["gradient"]) == set(expected)
    for key, gradient in expected.items():
        np.testing.assert_allclose(found["run"]["gradient"][key], gradient.numpy(), rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_logits_of_a_training_step_are_made_once_and_their_gradient_takes_their_place(
    packed: bool, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]
) -> None:
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True)}
    assert ranks("logits_made", world_size=1, packed=packed, batch=batch, settings=settings) == [1]


def test_values_one_process_read_from_the_state_before_the_token(
    model_folder: Callable[..., str], batch: dict[str, Any], ranks: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_folder("llama", tied=False)
    # A learning rate of 0 leaves the head as it was drawn; a temperature is none of a critic's business (row 9).
    settings = {"hf_checkpoint": folder, "critic_lr": 0.0, "rollout_temperature": 0.5}
    (found,) = ranks("train", world_size=1, role="critic", objective="value", batch=batch, settings=settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = torch.from_numpy(found["weights"]["head.weight"])[0]
    for row, tokens in enumerate(batch["tokens"]):
        response = batch["response_lengths"][row]
        with torch.no_grad():
            states = model.model(torch.tensor([tokens])).last_hidden_state[0]
        values = (states[-response - 1 : -1] @ head).numpy()
        np.testing.assert_allclose(found["read"][100 + row], values, atol=1e-5)


def learning_rate(step: int, *, peak: float, low: float, warmup: int, length: int, style: str) -> float:
    """Rate of optimizer step 1, 2, ...: linear from 0 to the peak, then down to `low` at step `length`."""
    if step <= warmup:
        return peak * step / warmup
    left = 1 - min((step - warmup) / (length - warmup), 1.0)
    shape = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[style]
    return low + (peak - low) * shape if style != "constant" else peak


def test_closed_worker_leaves_no_thread_of_its_groups(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]
) -> None:
    """A gloo group's threads wake a hundred times a second for as long as anything holds the group."""
    settings = {"hf_checkpoint": model_folder("llama", tied=True), "use_distributed_optimizer": True}
    counts = []
    for _ in range(3):
        ranks("train", world_size=2, role="critic", objective="value", batch=batch, settings=settings)
        counts.append(ranks.num_threads()[:2])
    assert counts[1] == counts[2] == pytest.approx(counts[0], abs=2)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_learning_rate_follows_its_formula_across_a_resume(
    style: str, role: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Any
) -> None:
    # faults.md row 41: one advance per optimizer step, 3 rollouts of 2 (critic epochs, or steps), resumed in between
    settings: dict[str, Any] = {
        "hf_checkpoint": model_folder("llama", tied=True),
        "num_rollout": 3,
        "lr_decay_style": style,
    }
    settings |= {} if style == "constant" else {"min_lr": 1e-4}
    prefix, objective = ("critic_", "value") if role == "critic" else ("", "policy")
    settings |= {"num_critic_epochs": 2} if role == "critic" else {"num_steps_per_rollout": 2}
    settings |= {f"{prefix}lr": 1e-3, f"{prefix}lr_warmup_iters": 2, f"{prefix}save": str(tmp_path)}
    arguments = {"world_size": 1, "role": role, "objective": objective, "batch": batch}
    (first,) = ranks("train", **arguments, settings=settings, steps=3, save_at=(3,))
    (second,) = ranks("train", **arguments, settings=settings | {f"{prefix}load": str(tmp_path)}, steps=4)
    expected = [learning_rate(step, peak=1e-3, low=1e-4, warmup=2, length=6, style=style) for step in range(1, 8)]
    assert [m["lr"] for m in first["metrics"] + second["metrics"]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("role", "objective", "layout"),
    [
        pytest.param("actor", "policy", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="tp2_sp"),
        pytest.param("critic", "value", {"use_distributed_optimizer": True}, id="dp2_sharded"),
    ],
)
def test_step_bfloat16_comes_near_float32_and_keeps_the_head_exact(
    role: str, objective: str, layout: dict[str, Any], ranks: Any, model_folder: Callable[..., str], batch: Any
) -> None:
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), "lr": 1e-3, "critic_lr": 1e-3, "adam_eps": 1e-3}
    arguments = {"role": role, "objective": objective, "batch": batch, "steps": 2}
    (exact,) = ranks("train", world_size=1, settings=settings, **arguments)
    rounded = ranks("train", world_size=2, settings=settings | layout | {"bf16": True}, **arguments)
    metrics = next(r["metrics"] for r in rounded if r["metrics"][0] is not None)
    for ours, theirs in zip(metrics, exact["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=3e-2, abs=3e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    weights = {name: array for r in rounded for name, array in r["weights"].items()}
    for name, array in exact["weights"].items():
        # bfloat16 has 8 bits: a weight is off by up to 2^-9 of itself.
        np.testing.assert_allclose(weights[name], array, rtol=5e-3, atol=5e-3, err_msg=name)
    if role == "critic":
        head = weights["head.weight"]
        assert (head.view(np.int32) & 0xFFFF).any(), "the head was rounded to bfloat16"


def test_loss_nan_inside_the_mask_stops_the_run_outside_it_changes_nothing(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], make_shard: Callable[..., Any]
) -> None:
    # faults.md row 10
    def poisoned(where: int) -> list[np.ndarray]:
        return [
            np.where(np.asarray(mask) == where, np.nan, column).astype(np.float32)
            for mask, column in zip(batch["loss_masks"], batch["old_log_probs"], strict=True)
        ]

    runs = {
        name: {"objective": "policy", "shards": [make_shard(batch | changes)], "packed": True}
        for name, changes in (
            ("clean", {}),
            ("outside", {"old_log_probs": poisoned(0)}),
            ("inside", {"old_log_probs": poisoned(1)}),
        )
    }
    settings = {"hf_checkpoint": model_folder("llama", tied=True)}
    (found,) = ranks("gradients", world_size=1, role="actor", settings=settings, runs=runs)
    assert found["outside"]["metrics"] == found["clean"]["metrics"]
    for name, array in found["clean"]["gradient"].items():
        np.testing.assert_array_equal(found["outside"]["gradient"][name], array, err_msg=name)
    assert "actor loss is nan at iteration 1; nothing was updated" in found["inside"]["error"]


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (("self_attn", "mlp"), {"self_attn"}),
        (("cross_attention", "Attention", "attn"), {"cross_attention", "Attention", "attn"}),
        (("my_attention_block", "mlp"), set()),
    ],
)
def test_freeze_attention_matches_whole_components_of_module_paths(names: tuple[str, ...], frozen: set[str]) -> None:
    import torch

    from miles.backends.megatron.device import Device

    Device("cpu").activate()
    from miles.backends.megatron.model import freeze_attention

    shared = torch.nn.Linear(3, 3)
    model = torch.nn.ModuleDict({name: torch.nn.Sequential(torch.nn.Linear(2, 2), shared) for name in names})
    if not frozen:
        with pytest.raises(RuntimeError, match="critic attention freeze matched no parameters"):
            freeze_attention(model)
        return
    # Each block has a matrix and a bias of its own; the shared pair counts once.
    count = len(frozen)
    assert freeze_attention(model) == {"tensors": 2 * count + 2, "elements": 6 * count + 12}
    for name in names:
        assert model[name][0].weight.requires_grad == (name not in frozen)  # type: ignore[index]
