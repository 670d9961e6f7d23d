"""The examples' own recipes at a size that a test can afford: the quickstart, every stage, and SmolLM2's canary."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def small_quickstart(folder: Path) -> Path:
    """The quickstart's own plan with fewer problems, half of them easier, and less of everything that takes time.

    Its online RL is the recipe's canary: one real step with everything that a canary asks after it.
    """
    plan = yaml.safe_load((ROOT / "examples" / "quickstart" / "quickstart.yaml").read_text())
    # Six digits have nearly always 1 as their greatest common divisor: an actor learns that in a few steps, and a
    # critic soon tells these problems from sums, so the gate stays as it is.
    digits = {"min_numbers": 6, "max_numbers": 6, "max_value": 9}
    sums = plan["problems"]["kinds"][1]
    kinds = [{"dataset": "gcd", "config": digits, "share": 0.5}, sums | {"share": 0.5}]
    plan["problems"] |= {"num_train": 300, "num_heldout": 100, "kinds": kinds}
    plan["warm_start"] |= {"target_accuracy": 0.1, "eval_interval": 10}
    plan["warm_start"]["settings"] |= {"actor_num_gpus_per_node": 1}
    plan["rollouts"]["settings"] |= {"num_rollout": 1, "rollout_batch_size": 100}
    plan["value_pretraining"]["settings"] |= {"global_batch_size": 32, "micro_batch_size": 32}
    plan["value_evaluation"]["settings"] |= {
        "value_pretrain_eval_num_batches": 3,
        "global_batch_size": 24,
        "micro_batch_size": 24,
        "critic_num_gpus_per_node": 1,
        "tensor_model_parallel_size": 1,
    }
    plan["online_rl"]["settings"] |= {
        "canary_one_step": True,
        "rollout_batch_size": 16,
        "micro_batch_size": 32,
        "eval_interval": 1,
        "eval_max_prompts": 32,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def check_canary(printed: str) -> None:
    difference = re.search(r"^canary: engine and actor after the update: largest log-prob .* (\S+)$", printed, re.M)
    assert difference is not None and float(difference[1]) < 1e-5, printed
    assert re.search(r"^canary: chain verified, \d+ links hold$", printed, re.M), printed
    assert "canary: resumed from the save: log-probs differ by 0.00e+00, values by 0.00e+00" in printed


def test_quickstart_reduced_runs_every_stage_and_a_second_start_runs_none(
    tmp_path: Path, run: Callable[..., Any], read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    words = ["--plan", small_quickstart(tmp_path), "--out", tmp_path / "out"]
    first, out = run("examples/quickstart/run.py", *words, timeout_s=1000), tmp_path / "out"
    assert first.code == 0, first.out[-2000:] + first.err[-2000:]
    assert re.search(r"^verified: \d+ links hold$", first.out, re.MULTILINE), first.out
    check_canary(first.out)
    lines = read_metrics(out / "run")
    assert [line["step"] for line in lines if line["stage"] == "train"] == [1]
    assert [line["step"] for line in lines if line["stage"] == "eval"] == [0, 1]

    report, contract = out / "value_report.json", out / "critic" / "value_pretrain_contract.json"
    gate = json.loads(report.read_text())
    used = json.loads((out / "run" / "run.json").read_text())["value_pretraining"]
    contract_sha256 = hashlib.sha256(contract.read_bytes()).hexdigest()
    assert gate["passed"] is True
    assert gate["checkpoint"]["contract_sha256"] == used["contract_sha256"] == contract_sha256
    assert used["eval_report_sha256"] == hashlib.sha256(report.read_bytes()).hexdigest()

    page = (out / "run" / "report.html").read_text()
    for title in ("Held-out accuracy", "Calibration of the critic"):
        assert f"<h3>{title}" in page
    outside = re.findall(r"""(?:src|href)=["']?[^"'#].{20}|url\(["']?[^"'#].{20}|@import|<script|<link""", page)
    assert outside == [], "the report must open offline"

    written = (out / "run" / "metrics.jsonl").stat()
    second = run("examples/quickstart/run.py", *words)
    assert second.code == 0, second.err[-2000:]
    stages = re.findall(r"^\[\d/9\] ([^:\n]+)(: done before)?", second.out, re.MULTILINE)
    assert len(stages) == 9
    assert [name for name, before in stages if not before] == ["verification"], "it only looks"
    assert (out / "run" / "metrics.jsonl").stat() == written


def make_chat_model(make_hf_model: Callable[..., Path]) -> Path:
    """A tiny Llama with a chat template that, as SmolLM2 does, pads with the token which ends a turn."""
    from transformers import AutoTokenizer

    model = make_hf_model(max_position_embeddings=1024, pad_token_id=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(model)
    return model


def test_canary_of_smollm2_on_a_tiny_model_passes_its_own_checks(
    tmp_path: Path,
    run: Callable[..., Any],
    make_hf_model: Callable[..., Path],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.quickstart.make_problems import make_problems
    from examples.smollm2.run import HERE, KEYS
    from examples.stages import read_plan, write_settings

    plan = read_plan("smollm2", HERE / "smollm2.yaml", KEYS, out=tmp_path, here=HERE)
    kinds = [{"dataset": kind["dataset"], "config": kind["config"]} for kind in plan["problems"]["kinds"]]
    problems = [problem for kind in kinds for problem in make_problems(**kind, seed=1, count=2)]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe = plan["common"] | plan["online_canary"]["settings"]
    # A character is a token here. There the critic's head is as the contract says, here as the value data would.
    small = {name: value for name, value in plan["value_data"].items() if name.startswith("value_")} | {
        "hf_checkpoint": str(make_chat_model(make_hf_model)),
        "prompt_data": str(data),
        "rollout_max_prompt_len": 900,
        "run_dir": str(tmp_path / "run"),
    }
    done = run("train.py", *write_settings(tmp_path, "online_canary", recipe | small))
    assert done.code == 0, done.out[-2000:] + done.err[-2000:]
    check_canary(done.out)
    lines = read_metrics(tmp_path / "run")
    for stage in ("rollout", "value", "train"):
        assert [line["step"] for line in lines if line["stage"] == stage] == [1], stage
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {name: settings[name] for name in recipe} == {name: (recipe | small)[name] for name in recipe}
