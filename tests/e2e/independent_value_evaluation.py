"""A critic's explained variance once more, in plain PyTorch and NumPy, float64: no Megatron, nothing of ours.

    python independent_value_evaluation.py REPORT.json HF_MODEL_FOLDER

Takes from the report which rows each batch holds and where critic and data lie; computes every figure itself, from the
tensors of the checkpoint and the rows of the data file, and prints it as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Model tensors of a distributed checkpoint by name, layers stacked in front; float64."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.double() for name, tensor in tensors.items()}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, head_dim], the halves of each head paired."""
    tokens, _, dim = x.shape
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def hidden_states(tokens: list[int], w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Llama's final hidden states [tokens, hidden] of one sequence."""
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    eps, theta, per_group = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], heads // groups
    x = w["embedding.word_embeddings.weight"][tokens]
    hidden = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)
    for layer in range(config["num_hidden_layers"]):

        def of(name: str, layer: int = layer) -> torch.Tensor:
            return w[f"decoder.layers.{name}"][layer]

        normed = rms_norm(x, of("self_attention.linear_qkv.layer_norm_weight"), eps)
        # Each group's rows: its queries, its key, its value.
        qkv = (normed @ of("self_attention.linear_qkv.weight").T).view(len(tokens), groups, per_group + 2, dim)
        q = rotate(qkv[:, :, :per_group].reshape(len(tokens), heads, dim), theta)
        k = rotate(qkv[:, :, per_group], theta).repeat_interleave(per_group, dim=1)
        v = qkv[:, :, per_group + 1].repeat_interleave(per_group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5 + hidden
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(tokens), heads * dim)
        x = x + attended @ of("self_attention.linear_proj.weight").T
        normed = rms_norm(x, of("mlp.linear_fc1.layer_norm_weight"), eps)
        gate, up = (normed @ of("mlp.linear_fc1.weight").T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ of("mlp.linear_fc2.weight").T
    return rms_norm(x, w["decoder.final_layernorm.weight"], eps)


def token_values(
    row: dict[str, Any], w: dict[str, torch.Tensor], config: dict[str, Any], low: float, high: float
) -> Any:
    """Value of each response token, read from the token before it."""
    states = hidden_states(row["tokens"], w, config)[len(row["tokens"]) - row["response_length"] - 1 : -1]
    logits = states @ w["output_layer.weight"].T + w["output_layer.bias"]
    if logits.shape[-1] == 1:
        return logits[:, 0].numpy()
    support = torch.linspace(low, high, logits.shape[-1], dtype=torch.float64)
    return (logits.softmax(-1) @ support).numpy()


def explained_variance(returns: Any, values: Any) -> float:
    return float(1.0 - np.var(returns - values) / np.var(returns))


def figures(pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    """EV, R^2 and mean residual over (returns, values) pairs."""
    returns = np.concatenate([np.asarray(r, dtype=np.float64) for r, _ in pairs])
    values = np.concatenate([np.asarray(v, dtype=np.float64) for _, v in pairs])
    return {
        "explained_variance": explained_variance(returns, values),
        "r_squared": float(1.0 - np.mean((returns - values) ** 2) / np.var(returns)),
        "mean_residual": float(np.mean(returns - values)),
    }


def evaluate(report: dict[str, Any], model_folder: Path) -> dict[str, Any]:
    """The figures of every batch and of all together, in both weightings."""
    config = json.loads((model_folder / "config.json").read_text())
    manifest = json.loads(Path(report["manifest"]["path"]).read_text())
    low, high = manifest["objective"].get("reward_range", [0.0, 1.0])
    checkpoint = Path(report["checkpoint"]["path"]) / f"iter_{report['checkpoint']['loaded_iteration']:07d}"
    tensors = read_tensors(checkpoint)
    rows = [json.loads(line) for line in Path(report["manifest"]["dataset_path"]).read_text().splitlines()]
    by_token: list[list[tuple[Any, Any]]] = []
    by_row: list[list[tuple[Any, Any]]] = []
    for batch in report["batches"]:
        by_token.append([])
        by_row.append([])
        for index in batch["sample_indices"]:
            row = rows[index]
            active = np.array(row.get("loss_mask", [1] * row["response_length"]), dtype=bool)
            values = token_values(row, tensors, config, low, high)[active]
            returns = np.array(row["returns"])[active]
            by_token[-1].append((returns, values))
            by_row[-1].append((returns[:1], [values.mean()]))
    weightings = {"token_weighted": by_token, "trajectory_weighted": by_row}
    return {
        name: {
            "batches": [figures(pairs) for pairs in batches],
            "aggregate": figures([pair for pairs in batches for pair in pairs]),
        }
        for name, batches in weightings.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(evaluate(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])), indent=2))
