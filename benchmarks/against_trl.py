"""Seconds per PPO step, end to end: train.py against TRL's PPOTrainer, same tiny model, data, batch and hardware.

    pip install 'trl==1.12.0' accelerate datasets     # 1.12.0 is the last TRL with a PPO trainer
    python benchmarks/against_trl.py                                           # equally long, and long-tailed
    python benchmarks/against_trl.py --response-length 32 128                  # all responses equally long
    python benchmarks/against_trl.py --mean-length 64 --longest 512            # long-tailed, as in practice

A step of both: sample `samples` responses at temperature 1, score them, values and reference log-probabilities, GAE
with a KL penalty of 0.05 in the reward, one AdamW step of the policy and one of the critic on every row once, fp32,
old log-probabilities as sampled; ours also publishes the new weights to its engines. The model is a random Llama of
about 1M parameters, the reward the share of even token ids. With `--response-length` the model never ends a response;
with `--mean-length` it does so at each token with probability 1 / mean, and the limit cuts off the rest. It never
samples the padding token, which TRL would take for the end.

TRL runs one process with every core, gradient checkpointing off, `stop_token="eos"` where responses end (it masks what
comes after); `--trl-batch` are the rows of its forward passes, by default all at once. Ours runs as users run it: one
actor rank, one critic rank, micro-batches packed up to `--max-tokens`, an SGLang engine for each core.

They take turns, a fresh start each time; the first two steps of a turn are not counted. Both count the response tokens
that are trained on, up to and with the end of sequence: "tokens/s" is those of the counted steps over their seconds,
"a step" the median, both of the best turn; "whole" is the wall time of a turn, start to exit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
_CORES = len(os.sched_getaffinity(0))
VOCAB, PAD, EOS, PROMPT_LENGTH = 512, 0, 511, 16
_WARM_UP, _KL_COEF = 2, 0.05
_LR = 1e-8  # so small that responses stay as long as they were set to be

Steps = list[tuple[float, int]]
"""Seconds and trained response tokens of each step."""


@dataclass(frozen=True)
class Case:
    """Responses of a step and how long they are: `longest` tokens each, or ending at random after `mean` of them."""

    samples: int
    longest: int
    mean: int | None

    def __str__(self) -> str:
        lengths = f"{self.longest} tokens" if self.mean is None else f"mean {self.mean}, at most {self.longest} tokens"
        return f"{self.samples} samples a step, {lengths} a response"


def word(number: int) -> str:
    """Of one width: a special token that begins another word would be cut out of it."""
    return f"w{number:03}"


def make_model(folder: Path, mean_length: int | None) -> None:
    """A random Llama and a tokenizer of words w000, w001, ...

    At every token it ends the response with probability 1 / `mean_length`; None: never.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    ).float()
    with torch.no_grad():
        # Every state has a large first component, and only two rows of the head look at it, and at nothing else.
        model.model.embed_tokens.weight[:, 0] = 1.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[[PAD, EOS]] = 0.0
        head[[PAD, EOS], 0] = -5.0
        if mean_length is not None:
            states = model.model(torch.randint(1, EOS, (16, 64))).last_hidden_state
            others = (states @ head.T).logsumexp(-1)
            head[EOS, 0] = ((others - math.log(mean_length - 1)) / states[..., 0]).mean()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word(number): number for number in range(VOCAB)}, unk_token=word(3)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=word(PAD), bos_token=word(1), eos_token=word(EOS), unk_token=word(3)
    ).save_pretrained(folder)


def make_prompts(path: Path, count: int) -> None:
    draw = random.Random(0)
    with path.open("w") as out:
        for _ in range(count):
            words = " ".join(word(draw.randrange(4, EOS)) for _ in range(PROMPT_LENGTH))
            out.write(json.dumps({"prompt": words, "label": ""}) + "\n")


# -------------------------------------------------------------------- one turn of each


def run_trl(folder: Path, case: Case, *, steps: int, batch: int) -> Steps:
    """The steps of `PPOTrainer`, in this process."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

    class ShareOfEvenTokens(torch.nn.Module):
        """In the place of a reward model: costs next to nothing."""

        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.States()

        class States(torch.nn.Module):
            def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object) -> object:
                response = attention_mask[:, PROMPT_LENGTH:]
                Clock.tokens += int(response.sum())
                even = ((input_ids[:, PROMPT_LENGTH:] % 2 == 0) & response).sum(dim=1) / response.sum(dim=1)
                states = even[:, None, None].expand(-1, input_ids.shape[1], 1)
                return type("Output", (), {"hidden_states": (states,)})()

        def score(self, states: torch.Tensor) -> torch.Tensor:
            return states

    class Clock(TrainerCallback):
        steps: ClassVar[Steps] = []
        tokens: ClassVar[int] = 0
        last: ClassVar[float] = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            Clock.last = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            now = time.perf_counter()
            self.steps.append((now - Clock.last, Clock.tokens))
            Clock.last, Clock.tokens = now, 0

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    rows = [{"input_ids": tokenizer(json.loads(line)["prompt"])["input_ids"]} for line in lines]
    assert {len(row["input_ids"]) for row in rows} == {PROMPT_LENGTH}
    config = PPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.samples,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=batch,
        num_ppo_epochs=1,
        num_mini_batches=1,
        total_episodes=case.samples * steps,
        response_length=case.longest,
        stop_token=None if case.mean is None else "eos",
        temperature=1.0,
        learning_rate=_LR,
        kl_coef=_KL_COEF,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        num_sample_generations=0,
        logging_steps=1,
    )
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa") for _ in range(2)
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=ShareOfEvenTokens(),
        value_model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32),
        # It asks a data set for its length and its rows only.
        train_dataset=rows,
        eval_dataset=rows[:1],
        callbacks=[Clock()],
    )
    trainer.train()
    return Clock.steps


def run_miles(folder: Path, run_dir: Path, case: Case, *, steps: int, engines: int, max_tokens: int) -> Steps:
    """The steps of train.py, from the run's metrics."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *("--device", "cpu", "--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--custom-rm-path", f"{folder / 'reward.py'}:score", "--run-dir", str(run_dir)),
        *("--num-rollout", str(steps), "--rollout-batch-size", str(case.samples), "--n-samples-per-prompt", "1"),
        *("--rollout-max-response-len", str(case.longest), "--rollout-temperature", "1.0"),
        *("--rollout-num-gpus", str(engines), "--use-rollout-logprobs"),
        # Room for all responses at once.
        *("--sglang-max-total-tokens", str(max(32_768, case.samples * (PROMPT_LENGTH + case.longest)))),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(max(max_tokens, PROMPT_LENGTH + case.longest))),
        *("--num-steps-per-rollout", "1", "--lr", str(_LR)),
        *("--critic-lr", str(_LR), "--advantage-estimator", "gae", "--lambd", "0.95", "--gamma", "1.0"),
        # TRL always does.
        "--normalize-advantages",
        *("--kl-coef", str(_KL_COEF), "--kl-loss-type", "k1", "--save-interval", str(steps)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train.py failed:\n{done.stderr[-3000:]}")
    steps_of: dict[str, list[dict[str, float]]] = {"rollout": [], "time": []}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if line["stage"] == "rollout" or "time/step_s" in line:
            steps_of[line["stage"]].append(line)
    tokens = [round(line["rollout/response_length_mean"] * line["rollout/count"]) for line in steps_of["rollout"]]
    ends = [line["time"] for line in steps_of["time"]]
    # From the end of one to the end of the next, as TRL's: nothing in between goes uncounted.
    seconds = [after - before for before, after in pairwise([ends[0] - steps_of["time"][0]["time/step_s"], *ends])]
    return list(zip(seconds, tokens, strict=True))


@dataclass(frozen=True)
class Turn:
    """A contestant's steps, and the seconds of the whole turn."""

    steps: Steps
    whole: float

    @property
    def counted(self) -> Steps:
        return self.steps[_WARM_UP:]

    @property
    def step(self) -> float:
        return statistics.median(seconds for seconds, _ in self.counted)

    @property
    def speed(self) -> float:
        return sum(tokens for _, tokens in self.counted) / sum(seconds for seconds, _ in self.counted)

    @property
    def tokens(self) -> float:
        """Trained in a step, on average."""
        return statistics.mean(tokens for _, tokens in self.counted)


def turn(name: str, folder: Path, run_dir: Path, case: Case, options: argparse.Namespace) -> Turn:
    """A fresh start of one of both."""
    started = time.perf_counter()
    if name == "miles":
        settings = {"steps": options.steps, "engines": options.engines, "max_tokens": options.max_tokens}
        steps = run_miles(folder, run_dir, case, **settings)
    else:
        told = {"case": asdict(case), "steps": options.steps, "batch": options.trl_batch or case.samples}
        command = [sys.executable, __file__, "--trl-turn", str(folder), "--told", json.dumps(told)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(_CORES), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
        steps = [(seconds, tokens) for seconds, tokens in json.loads(done.stdout.splitlines()[-1])]
    found = Turn(steps, time.perf_counter() - started)
    assert len(steps) == options.steps, f"{name} did {len(steps)} steps"
    if case.mean is None:
        assert {tokens for _, tokens in steps} == {case.samples * case.longest}, f"{name}: responses ended early"
    return found


def compare(case: Case, options: argparse.Namespace) -> None:
    """Let both take their turns and print what they did."""
    found: dict[str, list[Turn]] = {"TRL": [], "miles": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder, case.mean)
        make_prompts(folder / "prompts.jsonl", case.samples * 4)
        (folder / "reward.py").write_text(
            "def score(sample):\n"
            "    tokens = sample.response_tokens\n"
            "    return sum(token % 2 == 0 for token in tokens) / len(tokens)\n"
        )
        for number in range(options.rounds):
            for name, turns in found.items():
                one = turn(name, folder, folder / f"run-{number}", case, options)
                turns.append(one)
                print(
                    f"  turn of {name}: {one.step:.2f} s and {one.tokens / case.samples:.1f} tokens a response, "
                    f"{one.speed:.0f} tokens/s, {one.whole:.0f} s in all",
                    flush=True,
                )
    print(f"{case}, {options.rounds} turns each")
    best = {name: max(turns, key=lambda one: one.speed) for name, turns in found.items()}
    for name, turns in found.items():
        speeds = ", ".join(f"{one.speed:.0f}" for one in turns)
        whole = statistics.median(one.whole for one in turns)
        print(
            f"  {name:<6}{best[name].step:8.2f} s a step, {best[name].speed:8.0f} trained tokens/s (turns: {speeds}), "
            f"whole {whole:6.1f} s"
        )
    by_tokens = best["miles"].speed / best["TRL"].speed
    by_steps = best["TRL"].step / best["miles"].step
    print(f"  miles is {by_tokens:.2f} times as fast in tokens/s, {by_steps:.2f} in seconds a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128, help="responses of a step")
    parser.add_argument("--response-length", type=int, nargs="+", help="tokens of every response")
    parser.add_argument("--mean-length", type=int, nargs="+", help="mean tokens of responses that end by themselves")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a response at most, with --mean-length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--engines", type=int, default=_CORES, help="rollout engines of miles")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a micro-batch of miles")
    parser.add_argument("--trl-batch", type=int, help="rows of TRL's forward passes in the rollout (default: all)")
    parser.add_argument("--trl-turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_turn is not None:
        told = options.told
        steps = run_trl(options.trl_turn, Case(**told["case"]), steps=told["steps"], batch=told["batch"])
        print(json.dumps(steps))
        return
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: pip install 'trl==1.12.0' accelerate datasets")
    if options.steps <= _WARM_UP:
        parser.error(f"--steps must be more than the {_WARM_UP} that are not counted")
    means = options.mean_length or []
    if any(not 1 < mean < options.longest for mean in means):
        parser.error(f"--mean-length must be between 1 and --longest {options.longest}")
    lengths = options.response_length or []
    if not means and not lengths:
        means, lengths = [32], [32]
    cases = [Case(options.samples, length, None) for length in lengths]
    for case in [*cases, *(Case(options.samples, options.longest, mean) for mean in means)]:
        compare(case, options)


if __name__ == "__main__":
    main()
