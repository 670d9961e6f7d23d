"""Largest difference between Megatron's logits and transformers', per architecture and parallel layout, in fp32.

Usage: python benchmarks/logit_parity.py [--model FOLDER ...] [--limit 1e-5]

Without --model, tiny random Llama, Qwen2 and Qwen3 models (tied and untied) are made. Exits with 1 where a difference
exceeds the limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from miles.backends.megatron.local_group import LocalGroup

LAYOUTS = {"TP1": (1, 1, False), "TP2": (2, 1, False), "TP2+SP": (2, 1, True), "PP2": (1, 2, False)}


def make_model(folder: Path, kind: str, *, tied: bool) -> None:
    """Write a random model whose norms and biases are not trivial, so that each one matters to the logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    if kind == "qwen3":
        settings["head_dim"] = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).float()
    for name, param in model.named_parameters():
        if param.dim() == 1:
            torch.nn.init.normal_(param, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)


def random_rows(vocab_size: int, *, count: int = 6, longest: int = 48) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(draw.randint(5, longest))] for _ in range(count)]


def transformers_logits(folder: str, rows: list[list[int]]) -> list[Any]:
    """Logits of all but the last position of each row, one row at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0, :-1].numpy() for row in rows]


def megatron_logits(
    rank: int, world_size: int, port: int, *, folder: str, rows: list[list[int]], tp: int, pp: int, sp: bool
) -> dict[int, Any] | None:
    """A rank's task: the same logits through Megatron."""
    from miles.backends.megatron.worker import MegatronWorker
    from miles.config import Args

    args = Args.build(
        hf_checkpoint=folder,
        device="cpu",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sp,
    )
    worker = MegatronWorker(args, "actor", rank, world_size, "127.0.0.1", port)
    worker.init(forward_only=True)
    shard = {
        "tokens": rows,
        "response_lengths": [len(row) - 1 for row in rows],
        "loss_masks": [[1] * (len(row) - 1) for row in rows],
        "sample_indices": list(range(len(rows))),
        "micro_batches": [list(range(0, len(rows), 2)), list(range(1, len(rows), 2))],
    }
    logits = worker.compute_logits(shard)
    worker.close()
    return logits


def largest_difference(
    group: LocalGroup, folder: str, rows: list[list[int]], layout: str, expected: list[Any]
) -> float:
    tp, pp, sp = LAYOUTS[layout]
    results = group.run(megatron_logits, world_size=tp * pp, folder=folder, rows=rows, tp=tp, pp=pp, sp=sp)
    logits = next(result for result in results if result is not None)
    return max(float(abs(logits[i] - expected[i]).max()) for i in range(len(rows)))


def main() -> int:
    from miles.backends.megatron.architecture import Architecture

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="Hugging Face folders to compare on")
    parser.add_argument("--limit", type=float, default=1e-5)
    options = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch, LocalGroup(2) as group:
        folders = list(options.model)
        if not folders:
            for kind in ("llama", "qwen2", "qwen3"):
                for tied in (False, True):
                    folder = Path(scratch) / f"{kind}-{'tied' if tied else 'untied'}"
                    make_model(folder, kind, tied=tied)
                    folders.append(str(folder))
        print(f"{'largest |difference| of logits':32}" + "".join(f"{name:>12}" for name in [*LAYOUTS, "max logit"]))
        for folder in folders:
            rows = random_rows(Architecture.from_hf(folder).vocab_size)
            expected = transformers_logits(folder, rows)
            differences = [largest_difference(group, folder, rows, layout, expected) for layout in LAYOUTS]
            scale = max(float(abs(logits).max()) for logits in expected)
            print(
                f"{Path(folder).name:32}" + "".join(f"{d:12.2e}" for d in differences) + f"{scale:12.2f}", flush=True
            )
            worst = max(worst, *differences)
    print(f"largest of all {worst:.2e}, limit {options.limit:.0e}: {'ok' if worst <= options.limit else 'TOO LARGE'}")
    return 0 if worst <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
