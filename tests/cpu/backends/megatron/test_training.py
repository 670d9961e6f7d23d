"""One optimizer step on two ranks equals the step of one process, whatever the layout and the split of the batch.

The one-process run of the same code is the reference for layouts; it is itself compared with plain PyTorch on
transformers' model (`test_step_one_process_equals_transformers`), so that the chain ends at an independent
implementation.

Adam's first update is lr * g / (|g| + eps): with eps = 1 and lr = 1 it is nearly the gradient itself, so comparing
weights compares gradients, and no sign of a vanishing gradient is blown up to a whole learning rate.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SMOOTH = {"lr": 1.0, "critic_lr": 1.0, "adam_eps": 1.0, "clip_grad": 0.0}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
    "dp2_distributed_optimizer": {"use_distributed_optimizer": True},
}
OBJECTIVES = {
    "sft": ("actor", "sft", {}),
    "policy": ("actor", "policy", {"entropy_coef": 0.01, "rollout_temperature": 0.7}),
    "value_mse": ("critic", "value", {}),
    "value_classification": ("critic", "value", {"value_loss_type": "classification", "value_num_bins": 11}),
}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One view of all ranks: weights and readings joined, metrics of the first output rank."""
    return {
        "weights": {name: array for r in results for name, array in r["weights"].items()},
        "read": {index: values for r in results for index, values in (r["read"] or {}).items()},
        "metrics": next(r["metrics"] for r in results if r["metrics"][0] is not None),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, atol: float = 1e-5) -> None:
    assert set(found["weights"]) == set(expected["weights"])
    for name, array in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], array, rtol=1e-5, atol=atol, err_msg=name)
    assert set(found["read"]) == set(expected["read"])
    for index, values in expected["read"].items():
        np.testing.assert_allclose(found["read"][index], values, rtol=1e-4, atol=1e-4, err_msg=str(index))
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.fixture(scope="module")
def one_process(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]
) -> Callable[[str], dict[str, Any]]:
    cache: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in cache:
            role, objective, extra = OBJECTIVES[name]
            settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra}
            cache[name] = merged(
                ranks("train", world_size=1, role=role, objective=objective, batch=batch, settings=settings)
            )
        return cache[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_step_two_ranks_equal_one_process(
    name: str, layout: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], one_process: Any
) -> None:
    role, objective, extra = OBJECTIVES[name]
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra, **LAYOUTS[layout]}
    found = ranks("train", world_size=2, role=role, objective=objective, batch=batch, settings=settings)
    assert_same(merged(found), one_process(name))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "micro_batches",
    [
        pytest.param([[0, 1, 2, 3, 4, 5, 6, 7]], id="one"),
        pytest.param([[5], [0, 7, 2], [1, 3, 4, 6]], id="uneven"),
        pytest.param([[0, 1, 2, 3], [], [4, 5, 6, 7], []], id="with_empty"),
    ],
)
def test_step_any_split_into_micro_batches_gives_same_update(
    name: str,
    micro_batches: Any,
    ranks: Any,
    model_folder: Callable[..., str],
    batch: dict[str, Any],
    one_process: Any,
) -> None:
    role, objective, extra = OBJECTIVES[name]
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra}
    found = ranks(
        "train",
        world_size=1,
        role=role,
        objective=objective,
        batch=batch,
        settings=settings,
        micro_batches=micro_batches,
    )
    assert_same(merged(found), one_process(name))


@pytest.mark.parametrize(
    ("layout", "name"), [("tp1", "policy"), ("tp1", "value_classification"), ("tp2_sp", "sft"), ("pp2", "value_mse")]
)
def test_step_padded_equals_packed(
    layout: str, name: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], one_process: Any
) -> None:
    role, objective, extra = OBJECTIVES[name]
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra, **LAYOUTS.get(layout, {})}
    found = ranks(
        "train",
        world_size=1 if layout == "tp1" else 2,
        role=role,
        objective=objective,
        batch=batch,
        settings=settings,
        micro_batch_size=5,
        packed=False,
    )
    assert_same(merged(found), one_process(name))


def reference_step(folder: str, batch: dict[str, Any], name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and weights after one AdamW step with plain PyTorch on transformers' model, row by row, no padding."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total = sum(map(sum, batch["loss_masks"]))
    loss = torch.zeros(())
    for row, tokens in enumerate(batch["tokens"]):
        response = batch["response_lengths"][row]
        logits = model(torch.tensor([tokens])).logits[0, -response - 1 : -1]
        log_p = torch.log_softmax(logits / (0.7 if name == "policy" else 1.0), dim=-1)
        picked = log_p.gather(1, torch.tensor(tokens[-response:])[:, None])[:, 0]
        mask = torch.tensor(batch["loss_masks"][row])
        if name == "sft":
            per_token = -picked
        else:
            advantage = torch.from_numpy(batch["advantages"][row])
            ratio = (picked - torch.from_numpy(batch["old_log_probs"][row])).exp()
            per_token = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            per_token = per_token + 0.01 * (log_p.exp() * log_p).sum(-1)
        loss = loss + (per_token * mask).sum() / total
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    loss.backward()
    optimizer.step()
    return float(loss.detach()), {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["sft", "policy"])
def test_step_one_process_equals_transformers(
    name: str, model_folder: Callable[..., str], batch: dict[str, Any], one_process: Any
) -> None:
    found = one_process(name)
    loss, expected = reference_step(model_folder("qwen3", tied=True), batch, name)
    assert found["metrics"][0]["loss"] == pytest.approx(loss, rel=1e-5)
    for weight, array in expected.items():
        np.testing.assert_allclose(found["weights"][weight], array, rtol=1e-5, atol=1e-5, err_msg=weight)


def test_values_one_process_read_from_the_state_before_the_token(
    model_folder: Callable[..., str], batch: dict[str, Any], ranks: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = model_folder("llama", tied=False)
    # A learning rate of 0 leaves the head as it was drawn.
    settings = {"hf_checkpoint": folder, **SMOOTH, "critic_lr": 0.0}
    (found,) = ranks("train", world_size=1, role="critic", objective="value", batch=batch, settings=settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = torch.from_numpy(found["weights"]["head.weight"])[0]
    squared_error, count = 0.0, 0
    for row, tokens in enumerate(batch["tokens"]):
        response = batch["response_lengths"][row]
        with torch.no_grad():
            states = model.model(torch.tensor([tokens])).last_hidden_state[0]
        values = (states[-response - 1 : -1] @ head).numpy()
        np.testing.assert_allclose(found["read"][100 + row], values, atol=1e-5)
        old, target = batch["values"][row], np.asarray(batch["returns"][row])
        clipped = np.clip(values, old - 0.2, old + 0.2)
        per_token = np.maximum((values - target) ** 2, (clipped - target) ** 2)
        squared_error += float((per_token * batch["loss_masks"][row]).sum())
        count += sum(batch["loss_masks"][row])
    assert found["metrics"][0]["value_loss"] == pytest.approx(squared_error / count, rel=1e-4)


def test_step_learning_rate_follows_warmup_then_cosine(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]
) -> None:
    settings = {
        "hf_checkpoint": model_folder("llama", tied=True),
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_iters": 2,
        "lr_decay_iters": 6,
        "lr_decay_style": "cosine",
    }
    (found,) = ranks("train", world_size=1, role="actor", objective="sft", batch=batch, settings=settings, steps=6)
    cosine = [1e-4 + 9e-4 * (1 + np.cos(np.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert [m["lr"] for m in found["metrics"]] == pytest.approx([5e-4, 1e-3, *cosine])


def test_step_frozen_attention_trains_everything_else(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any]
) -> None:
    from safetensors.numpy import load_file

    folder = model_folder("qwen3", tied=True)
    settings = {"hf_checkpoint": folder, **SMOOTH, "critic_freeze_attention": True}
    (found,) = ranks("train", world_size=1, role="critic", objective="value", batch=batch, settings=settings)
    before = load_file(f"{folder}/model.safetensors")
    changed = {name for name, array in before.items() if not np.array_equal(array, found["weights"][name])}
    assert changed == {name for name in before if "self_attn" not in name}


def test_step_nan_in_masked_column_does_not_leak(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], one_process: Any
) -> None:
    poisoned = dict(batch)
    poisoned["old_log_probs"] = [
        np.where(np.asarray(mask) == 1, column, np.nan).astype(np.float32)
        for mask, column in zip(batch["loss_masks"], batch["old_log_probs"], strict=True)
    ]
    role, objective, extra = OBJECTIVES["policy"]
    settings = {"hf_checkpoint": model_folder("qwen3", tied=True), **SMOOTH, **extra}
    found = ranks("train", world_size=1, role=role, objective=objective, batch=poisoned, settings=settings)
    assert_same(merged(found), one_process("policy"))
