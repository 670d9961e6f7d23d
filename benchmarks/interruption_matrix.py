"""Every fault at every stage of a step: does train.py end as if nothing had happened, and how soon does it go on?

    python benchmarks/interruption_matrix.py [--faults kill_driver kill_engine ...] [--folder FOLDER] [--flags ...]

A column is one run of a tiny random Llama on a CPU with PPO: two optimizer steps a rollout, two epochs of the critic,
an adaptive KL penalty in the reward, a filter with over-sampling that leaves sampled groups over, an evaluation and a
save after every rollout. Step 1 has the column's fault at the first stage, step 2 at the second, and so on; the last
step has none. train.py carries the faults out itself (--fault-injection) and goes on by itself, or, where it was the
driver that died, is started again with --resume (before the first save: as it was) as soon as its process is gone.

A cell is `equal` where the steps before, of and after the fault are those of a run without any: every figure of
metrics.jsonl to the last bit (times, requests sent again and the distance of engine and trainer aside), every line
once, and the tokens of every kept sample. Else it is `DIFFERS`, and so is most of what follows it in the column;
`ENDED` where the run came to an end that is not part of the fault, `not run` after one that cannot be gone on from.
Exits with 1 where a cell is not `equal`.

The seconds of a cell go from the fault's line in the log to the end of the next step that metrics.jsonl holds, so what
was left of that step, or had to be done again, is in them; below the table stands what a step takes. A hung engine is
noticed after --sglang-health-timeout-s, here 8 s. No cell is empty for want of sense: whoever a stage does not use is
missed by the next one that does. How many requests are sent again depends on what an engine had answered before it
died, so that is printed and not compared.

Expect about half an hour on two cores, and leave them alone: all that starts again competes with what else runs. With
--folder the runs and their logs stay there, and a later start of this program goes on where an earlier one was ended.
What follows --flags goes to train.py, for example another layout: --flags --actor-num-gpus-per-node 2
--tensor-model-parallel-size 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from miles.config.fault_plan import ACTIONS, STAGES
from miles.ray.progress import progress_bar
from miles.ray.train_state import STATE_FILE
from miles.utils.tracking_utils.tracking import NOT_REPRODUCED

ROOT = Path(__file__).resolve().parents[1]
FAULTS = tuple(action for action in ACTIONS if action != "sleep")
UNINTERRUPTED = "uninterrupted"
FLAGS = f"""
    --device cpu --hf-checkpoint model --prompt-data train.jsonl --custom-rm-path reward.py:score
    --eval-prompt-data heldout.jsonl --eval-interval 1 --num-rollout {len(STAGES) + 1} --save-interval 1
    --rollout-batch-size 8 --n-samples-per-prompt 2 --rollout-max-response-len 16
    --dynamic-sampling-filter-path reward.py:keep --over-sampling-batch-size 16
    --micro-batch-size 4 --num-steps-per-rollout 2 --num-critic-epochs 2 --lr 1e-3 --critic-lr 1e-3 --lambd 0.9
    --kl-coef 0.1 --kl-loss-type k3 --kl-controller adaptive --kl-target 1e-3 --kl-horizon 200
    --max-restarts 99 --sglang-max-restarts 99 --sglang-health-timeout-s 8 --no-tensorboard
"""
POLL_S, PATIENCE_S = 0.05, 300.0
FAULT_LINE = re.compile(r"fault injection: \w+ at stage (\w+) of step \d+\n")
REWARD = """\
def score(sample):
    return float(sample.response[:1].isdigit())

def keep(samples):
    return sum(sum(sample.response_tokens) for sample in samples) % 4 > 0
"""


@dataclasses.dataclass
class Column:
    """When the fault of each stage struck, in seconds since 1970; how a start ended that went wrong after it."""

    struck: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    complete: bool = False

    @classmethod
    def read(cls, folder: Path, name: str) -> Column:
        path = folder / f"{name}.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, folder: Path, name: str) -> None:
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(self)))


def make_inputs(folder: Path) -> None:
    """A random Llama with a tokenizer of characters, prompts, and a file with a reward and a filter."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"0123456789+-*/= abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).float().save_pretrained(folder / "model")
    draw = random.Random(0)
    for name, count in (("train", 24), ("heldout", 8)):
        rows = [{"prompt": f"{draw.randrange(100)} + {number} =", "label": ""} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


# -------------------------------------------------------------------- runs


def run_column(folder: Path, name: str, flags: list[str], advance: Callable[[str], None]) -> None:
    """The run of one column (`UNINTERRUPTED`: without faults), started again as often as it takes."""
    run_dir, log, column = folder / name, folder / f"{name}.log", Column.read(folder, name)
    if column.complete:
        return
    if name == UNINTERRUPTED:
        shutil.rmtree(run_dir, ignore_errors=True)
    log.unlink(missing_ok=True)
    # A fault that this program's own end came after strikes again.
    logged = max((line["time"] for line in steps_of(run_dir)), default=0.0)
    column.struck = {stage: at for stage, at in column.struck.items() if at < logged}
    faults = {} if name == UNINTERRUPTED else {stage: f"{stage}@{at}={name}" for at, stage in enumerate(STAGES, 1)}
    left = {stage: fault for stage, fault in faults.items() if stage not in column.struck}
    while not column.complete:
        words = [sys.executable, str(ROOT / "train.py"), *FLAGS.split(), *flags, "--run-dir", str(run_dir)]
        words += ["--fault-injection", *left.values()] if left else []
        words += ["--resume"] if (run_dir / STATE_FILE).exists() else []
        before = len(column.struck)
        with log.open("a") as out, subprocess.Popen(words, cwd=folder, stdout=out, stderr=out) as process:
            running = True
            while running:
                # Looked at before the log: what a process says last is read too.
                running = process.poll() is None
                for stage in FAULT_LINE.findall(log.read_text(errors="replace")):
                    if stage in left:
                        column.struck[stage] = time.time()
                        del left[stage]
                        column.write(folder, name)
                        advance(f"{name} at {stage}")
                if running and time.time() - log.stat().st_mtime > PATIENCE_S:
                    out.write(f"\nno line for {PATIENCE_S:g} s\n")
                    process.kill()
                time.sleep(POLL_S)
        new = len(column.struck) > before
        if process.returncode and not (new and name == "kill_driver" and process.returncode == -signal.SIGKILL):
            last = log.read_text(errors="replace").strip().splitlines()[-1]
            if name == UNINTERRUPTED:
                raise SystemExit(f"train.py failed without a fault: {last}")
            column.ended[next(reversed(column.struck), STAGES[0])] = f"exit code {process.returncode}: {last}"
        column.complete = process.returncode == 0 or not new
        column.write(folder, name)


# -------------------------------------------------------------------- what came of them


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines that are written at the end of each step's work, before its evaluation and its save."""
    return [line for line in lines_of(run_dir) if "time/step_s" in line]


def facts_of(run_dir: Path) -> dict[int, list[tuple[str, Any]]]:
    """By step: all that must be the same in two runs, in order."""
    facts: dict[int, list[tuple[str, Any]]] = defaultdict(list)
    for line in lines_of(run_dir):
        facts[line["step"]] += [item for item in line.items() if not item[0].startswith(NOT_REPRODUCED)]
    for path in sorted((run_dir / "rollouts").glob("rollout_*.jsonl")):
        step = int(path.stem.rpartition("_")[2]) + 1
        rows = map(json.loads, path.read_text().splitlines())
        facts[step] += [(f"tokens of sample {row['index']}", row["tokens"]) for row in rows]
    return facts


def differences(run_dir: Path, reference: Path) -> dict[int, str]:
    """By step, where there is one: the first difference in words."""
    ours, theirs = facts_of(run_dir), facts_of(reference)
    found: dict[int, str] = {}
    for step in sorted(ours.keys() | theirs.keys()):
        for our, their in zip_longest(ours.get(step, []), theirs.get(step, []), fillvalue=("nothing", "more")):
            if our != their:
                found[step] = f"step {step}: {our[0]} {our[1]}, uninterrupted {their[0]} {their[1]}"
                break
    return found


def judge(column: Column, stage: str, ends: list[float], differing: dict[int, str]) -> tuple[str, float]:
    """The word of a cell, and its seconds; infinite where no step follows."""
    if stage in column.ended or stage not in column.struck:
        return ("ENDED" if stage in column.ended else "not run"), math.inf
    struck, step = column.struck[stage], STAGES.index(stage) + 1
    word = "equal" if differing.keys().isdisjoint(range(step - 1, step + 2)) else "DIFFERS"
    return word, min((end for end in ends if end > struck), default=math.inf) - struck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of train.py; comes last")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            make_inputs(folder)
        done = sum(len(Column.read(folder, fault).struck) for fault in options.faults)
        with progress_bar("interruption matrix", total=len(STAGES) * len(options.faults), done=done) as advance:
            for name in (UNINTERRUPTED, *options.faults):
                run_column(folder, name, options.flags, advance)
        return print_matrix(folder, options.faults)


def print_matrix(folder: Path, faults: list[str]) -> int:
    """Print the table and what there is to say about it; the exit code."""
    table: dict[str, dict[str, tuple[str, float]]] = {}
    notes: list[str] = []
    for fault in faults:
        column, differing = Column.read(folder, fault), differences(folder / fault, folder / UNINTERRUPTED)
        ends = [line["time"] for line in steps_of(folder / fault)]
        table[fault] = {stage: judge(column, stage, ends, differing) for stage in STAGES}
        notes += [f"{fault} at {stage}: {line}" for stage, line in column.ended.items()]
        notes += [f"{fault}: first difference at {text}" for text in list(differing.values())[:1]]
        lines = [line for line in lines_of(folder / fault) if "rollout/requests_resent" in line]
        counts = ", ".join(f"{line['rollout/requests_resent']:.0f} in step {line['step']}" for line in lines)
        notes += [f"{fault}: requests sent again: {counts}"] if lines else []
    print(f"{'step':>4}  {'stage':<12}" + "".join(f"{fault:>18}" for fault in faults))
    for step, stage in enumerate(STAGES, 1):
        cells = (table[fault][stage] for fault in faults)
        texts = (word if seconds == math.inf else f"{word} {seconds:.1f} s" for word, seconds in cells)
        print(f"{step:>4}  {stage:<12}" + "".join(f"{text:>18}" for text in texts))
    medians = (statistics.median(seconds for _, seconds in table[fault].values()) for fault in faults)
    print(f"{'':>4}  {'median':<12}" + "".join(f"{seconds:>16.1f} s" for seconds in medians))
    steps = [line["time/step_s"] for line in steps_of(folder / UNINTERRUPTED)]
    print(f"a step of the uninterrupted run: {statistics.median(steps):.1f} s", *notes, sep="\n")
    return 0 if all(word == "equal" for cells in table.values() for word, _ in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
