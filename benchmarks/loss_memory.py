"""Peak memory of log-probabilities, entropies and their gradient beside the logits, by vocabulary and chunk.

Usage: python benchmarks/loss_memory.py [--tokens 2048] [--vocabulary 32000 151936] [--dtype bfloat16]
    [--device cpu|cuda] [--chunk 16 256 0]

"plain" is log_softmax of the logits in fp32; "chunk n" this project's function with n tokens at once (own: its
choice), "+reuse" with the gradient written over the logits, as training does. Every case runs in a process of its
own, which makes the logits as a model's output layer would leave them, then runs forward and backward. Numbers are MiB
above what the process held with the logits alone, and seconds. On a CPU the peak is that of the resident set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20


def resident(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def run_case(*, tokens: int, vocabulary: int, dtype: str, device: str, method: str, chunk: int) -> dict[str, float]:
    import torch

    from miles.backends.megatron.vocab_parallel import token_log_probs

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if method == "plain":
            log_p = torch.log_softmax(logits.float(), dim=-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            log_probs = log_p.gather(1, targets[:, None])[:, 0]
        else:
            log_probs, entropy = token_log_probs(
                logits,
                targets,
                vocab_size=logits.shape[1],
                with_entropy=True,
                chunk_tokens=chunk or None,
                reuse_logits=method == "reuse",
            )
        return (log_probs - 0.01 * entropy).sum()

    class Output(torch.autograd.Function):
        """The output layer: gives the logits and takes their gradient, without a copy of either."""

        @staticmethod
        def forward(ctx: object, seed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grads[0][0, :1].float(), None

    seed = torch.zeros(1, device=device, requires_grad=True)
    # what the first pass loads is not the loss's memory
    small = torch.randn(4, 64, device=device).to(getattr(torch, dtype))
    loss_of(Output.apply(seed, small), torch.zeros(4, dtype=torch.long, device=device)).backward()
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=getattr(torch, dtype), device=device).normal_(generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), device=device, generator=generator)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    started = time.perf_counter()
    loss_of(Output.apply(seed, logits), targets).backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    return {"extra": (peak - before) / MIB, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--chunk", type=int, nargs="+", default=[16, 256, 0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run_case(**json.loads(args.case))))
        return
    size = 4 if args.dtype == "float32" else 2
    print(f"{args.tokens} tokens, {args.dtype}, {args.device}; MiB beside the logits")
    print(f"{'vocabulary':>10}{'logits':>9}  {'method':<18}{'extra':>9}{'of logits':>11}{'seconds':>9}")
    cases = [("plain", 0), *((method, chunk) for method in ("chunked", "reuse") for chunk in args.chunk)]
    for vocabulary in args.vocabulary:
        logits = args.tokens * vocabulary * size / MIB
        for method, chunk in cases:
            case = {
                "tokens": args.tokens,
                "vocabulary": vocabulary,
                "dtype": args.dtype,
                "device": args.device,
                "method": method,
                "chunk": chunk,
            }
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            name = "plain" if method == "plain" else f"chunk {chunk or 'own'}{' +reuse' if method == 'reuse' else ''}"
            share = f"{found['extra'] / logits:.2f}x"
            print(
                f"{vocabulary:>10}{logits:>9.0f}  {name:<18}{found['extra']:>9.1f}{share:>11}{found['seconds']:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
