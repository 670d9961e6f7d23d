"""Training tokens per second: this Megatron backend against plain transformers, same model, rows and hardware.

    python benchmarks/training_speed.py [--shape tiny wide] [--rounds 3] [--steps 8]

Both train the same random Llama on the log-likelihood of the same rows of uneven length in fp32: forward, backward,
clipping by norm, AdamW. transformers: `LlamaForCausalLM` with scaled-dot-product attention, rows padded to the longest
of their micro-batch, one process with every core. Ours: one rank with every core, and as many data-parallel ranks as
cores with one thread each. They take turns, a fresh process each time; the first two steps of a turn are not counted.
A step's loss must be the same for all (1e-3 relative at the last step), or the comparison ends with an error.
Prints the best turn of each (what the machine can do) and the median, in trained tokens per second.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from miles.backends.megatron.local_group import LocalGroup

Rows = list[list[int]]
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "layers": 4, "heads": 4, "ffn": 448, "vocab": 512, "rows": 256, "longest": 64},
    "wide": {"hidden_size": 576, "layers": 8, "heads": 9, "ffn": 1536, "vocab": 16_384, "rows": 16, "longest": 256},
}
_WARM_UP = 2
_LR, _WEIGHT_DECAY, _CLIP = 1e-4, 0.0, 1.0


def make_model(folder: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["ffn"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["heads"],
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
    ).float().save_pretrained(folder)


def make_rows(shape: dict[str, int]) -> Rows:
    draw = random.Random(0)
    longest = shape["longest"]
    return [
        [draw.randrange(shape["vocab"]) for _ in range(draw.randint(longest // 2, longest))]
        for _ in range(shape["rows"])
    ]


def train_with_transformers(
    rank: int, world_size: int, port: int, *, folder: str, rows: Rows, micro_batch: int, steps: int
) -> dict[str, Any]:
    """A plain loop: seconds of each step, and the loss of the last."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=_WEIGHT_DECAY, fused=True
    )
    trained = sum(len(row) - 1 for row in rows)
    seconds, loss = [], 0.0
    for _ in range(steps):
        started, loss = time.perf_counter(), 0.0
        for first in range(0, len(rows), micro_batch):
            part = rows[first : first + micro_batch]
            width = max(map(len, part))
            tokens = torch.zeros(len(part), width, dtype=torch.long)
            labels = torch.full((len(part), width), -100)
            mask = torch.zeros(len(part), width, dtype=torch.long)
            for place, row in enumerate(part):
                tokens[place, : len(row)] = torch.tensor(row)
                labels[place, 1 : len(row)] = tokens[place, 1 : len(row)]
                mask[place, : len(row)] = 1
            # num_items_in_batch: the sum over the micro-batch over the tokens of the whole batch
            partial = model(
                input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(trained)
            ).loss
            partial.backward()
            loss += float(partial.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "loss": loss}


def train_with_miles(
    rank: int, world_size: int, port: int, *, folder: str, rows: Rows, micro_batch: int, steps: int
) -> dict[str, Any] | None:
    """The same through `MegatronWorker.train_sft`, data parallel over the ranks; None on ranks without the figures."""
    from miles.backends.megatron.worker import MegatronWorker
    from miles.config import Args
    from miles.data.schedule import build_schedule, localize

    args = Args.build(
        hf_checkpoint=folder,
        device="cpu",
        lr=_LR,
        weight_decay=_WEIGHT_DECAY,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        clip_grad=_CLIP,
        lr_decay_style="constant",
    )
    worker = MegatronWorker(args, "sft", rank, world_size, "127.0.0.1", port)
    worker.init()
    schedule = build_schedule(list(map(len, rows)), dp_size=world_size, micro_batch_size=micro_batch)
    own, micro_batches = localize(schedule[worker.parallel.dp_rank])
    shard = {
        "tokens": [rows[row] for row in own],
        "response_lengths": [len(rows[row]) - 1 for row in own],
        "loss_masks": [[1] * (len(rows[row]) - 1) for row in own],
        "sample_indices": own,
        "micro_batches": micro_batches,
        "global_counts": {
            "samples": len(rows),
            "sequences": len(rows),
            "tokens": sum(len(row) - 1 for row in rows),
        },
    }
    seconds, metrics = [], None
    for step in range(1, steps + 1):
        started = time.perf_counter()
        metrics = worker.train_sft(step, shard)
        seconds.append(time.perf_counter() - started)
    worker.close()
    return None if metrics is None else {"seconds": seconds, "loss": metrics["sft_loss"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a turn")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    contestants = {
        "transformers": (train_with_transformers, 1, cores),
        "miles, 1 rank": (train_with_miles, 1, cores),
        f"miles, {cores} ranks": (train_with_miles, cores, 1),
    }
    for name in options.shape:
        shape = SHAPES[name]
        rows = make_rows(shape)
        tokens = sum(len(row) - 1 for row in rows)
        speeds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        losses: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), shape)
            for _ in range(options.rounds):
                for contestant, (task, ranks, threads) in contestants.items():
                    with LocalGroup(ranks, threads=threads) as group:
                        results = group.run(
                            task,
                            world_size=ranks,
                            timeout_s=600.0,
                            folder=folder,
                            rows=rows,
                            micro_batch=shape["rows"] // max(2, cores),
                            steps=options.steps + _WARM_UP,
                        )
                    result = next(result for result in results if result is not None)
                    speeds[contestant].append(tokens / statistics.median(result["seconds"][_WARM_UP:]))
                    losses[contestant] = result["loss"]
        reference = losses["transformers"]
        if any(abs(loss / reference - 1.0) > 1e-3 for loss in losses.values()):
            print(f"{name}: the losses differ, so the work was not the same: {losses}", file=sys.stderr)
            return 1
        print(f"{name}: {tokens} tokens a step, {cores} cores, loss {reference:.5f}")
        base = max(speeds["transformers"])
        for contestant, found in speeds.items():
            best = max(found)
            print(
                f"  {contestant:<18}{best:>10.0f} tokens/s best, {statistics.median(found):>8.0f} median, "
                f"{best / base:5.2f}x",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
