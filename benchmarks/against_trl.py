"""Seconds per PPO step, end to end: train.py against TRL's PPOTrainer, same tiny model, data, batch and hardware.

    pip install 'trl==1.12.0' accelerate datasets     # 1.12.0 is the last TRL with a PPO trainer
    python benchmarks/against_trl.py [--samples 256] [--response-length 32 128] [--rounds 3] [--steps 8]

A step of both: sample `samples` responses of `response-length` tokens each at temperature 1, score them, values and
reference log-probabilities, GAE with a KL penalty of 0.05 in the reward, one AdamW step of the policy and one of the
critic on every row once, fp32; ours also publishes the new weights to its engine. The model, a random Llama of about
1M parameters, never ends a response by itself, so that both sample the same number of tokens; the reward is the share
of even token ids. TRL runs one process with every core, its forward batches as large as the whole batch, gradient
checkpointing off. Ours runs as users run it: one actor rank, one critic rank, one SGLang engine.

They take turns, a fresh start each time. "a step" is the median over the turn's steps without the first two, best turn
of each; "whole" is the wall time of a turn, start to exit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
VOCAB, EOS, PROMPT_LENGTH = 512, 511, 16
_WARM_UP, _LR, _KL_COEF = 2, 1e-5, 0.05


def make_model(folder: Path) -> None:
    """A random Llama that gives no probability to the end of sequence, with a tokenizer of words w0, w1, ..."""
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
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    ).float()
    with torch.no_grad():
        # Every state has a large first component, and only the end of sequence's row looks at it.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[EOS, 0] = -5.0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token=f"w{EOS}", unk_token="w3"
    ).save_pretrained(folder)


def make_prompts(path: Path, count: int) -> None:
    draw = random.Random(0)
    with path.open("w") as out:
        for _ in range(count):
            words = " ".join(f"w{draw.randrange(4, EOS)}" for _ in range(PROMPT_LENGTH))
            out.write(json.dumps({"prompt": words, "label": ""}) + "\n")


# -------------------------------------------------------------------- one turn of each


def run_trl(folder: Path, *, samples: int, response_length: int, steps: int) -> list[float]:
    """Seconds of each step of `PPOTrainer`, in this process."""
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
            def forward(self, input_ids: torch.Tensor, **_: object) -> object:
                even = (input_ids[:, PROMPT_LENGTH:] % 2 == 0).float().mean(dim=1)
                states = even[:, None, None].expand(-1, input_ids.shape[1], 1)
                return type("Output", (), {"hidden_states": (states,)})()

        def score(self, states: torch.Tensor) -> torch.Tensor:
            return states

    class Clock(TrainerCallback):
        times: ClassVar[list[float]] = []

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.times.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            self.times.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = PPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=samples,
        num_ppo_epochs=1,
        num_mini_batches=1,
        total_episodes=samples * steps,
        response_length=response_length,
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
        train_dataset=[{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts],
        eval_dataset=[{"input_ids": tokenizer(prompts[0])["input_ids"]}],
        callbacks=[Clock()],
    )
    trainer.train()
    return [after - before for before, after in zip(Clock.times, Clock.times[1:], strict=False)]


def run_miles(folder: Path, run_dir: Path, *, samples: int, response_length: int, steps: int) -> list[float]:
    """Seconds of each step of train.py, from the run's metrics."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *("--device", "cpu", "--hf-checkpoint", str(folder), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--custom-rm-path", f"{folder / 'reward.py'}:score", "--run-dir", str(run_dir)),
        *("--num-rollout", str(steps), "--rollout-batch-size", str(samples), "--n-samples-per-prompt", "1"),
        *("--rollout-max-response-len", str(response_length), "--rollout-temperature", "1.0"),
        *("--micro-batch-size", str(samples), "--num-steps-per-rollout", "1", "--lr", str(_LR)),
        *("--critic-lr", str(_LR), "--advantage-estimator", "gae", "--lambd", "0.95", "--gamma", "1.0"),
        *("--kl-coef", str(_KL_COEF), "--kl-loss-type", "k1", "--save-interval", str(steps)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train.py failed:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lengths = {line["rollout/response_length_mean"] for line in lines if line["stage"] == "rollout"}
    assert lengths == {float(response_length)}, f"responses ended early: {lengths}"
    return [line["time/step_s"] for line in lines if "time/step_s" in line]


def turn(name: str, folder: Path, number: int, options: argparse.Namespace, length: int) -> tuple[float, float]:
    """Seconds of a step and of the whole turn."""
    started = time.perf_counter()
    if name == "miles":
        seconds = run_miles(
            folder,
            folder / f"run-{length}-{number}",
            samples=options.samples,
            response_length=length,
            steps=options.steps,
        )
    else:
        case = json.dumps({"samples": options.samples, "response_length": length, "steps": options.steps})
        command = [sys.executable, __file__, "--trl-turn", str(folder), "--case", case]
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
        seconds = json.loads(done.stdout.splitlines()[-1])
    whole = time.perf_counter() - started
    assert len(seconds) == options.steps, f"{name} did {len(seconds)} steps"
    return statistics.median(seconds[_WARM_UP:]), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256, help="responses of a step")
    parser.add_argument("--response-length", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--trl-turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_turn is not None:
        print(json.dumps(run_trl(options.trl_turn, **options.case)))
        return
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: pip install 'trl==1.12.0' accelerate datasets")
    if options.steps <= _WARM_UP:
        parser.error(f"--steps must be more than the {_WARM_UP} that are not counted")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder)
        make_prompts(folder / "prompts.jsonl", options.samples * 4)
        (folder / "reward.py").write_text(
            "def score(sample):\n"
            "    tokens = sample.response_tokens\n"
            "    return sum(token % 2 == 0 for token in tokens) / len(tokens)\n"
        )
        for length in options.response_length:
            found: dict[str, list[tuple[float, float]]] = {"TRL": [], "miles": []}
            for number in range(options.rounds):
                for name, turns in found.items():
                    turns.append(turn(name, folder, number, options, length))
                    print(f"  turn of {name}: {turns[-1][0]:.2f} s a step, {turns[-1][1]:.0f} s in all", flush=True)
            print(f"{options.samples} samples a step, {length} tokens a response, {options.rounds} turns each")
            best = {name: min(step for step, _ in turns) for name, turns in found.items()}
            for name, turns in found.items():
                whole = statistics.median(seconds for _, seconds in turns)
                print(
                    f"  {name:<6}{best[name]:8.2f} s a step (turns: {', '.join(f'{step:.2f}' for step, _ in turns)}), "
                    f"{options.samples * length / best[name]:8.0f} sampled tokens/s, whole {whole:6.1f} s",
                    flush=True,
                )
            print(f"  miles is {best['TRL'] / best['miles']:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
