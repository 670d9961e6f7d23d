"""The quickstart itself, every stage, at a size that a test can afford."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
STAGES = 9


def small_plan(folder: Path) -> Path:
    """The quickstart's own plan with fewer of everything that takes time."""
    plan = yaml.safe_load((ROOT / "examples" / "quickstart" / "quickstart.yaml").read_text())
    plan["warm_start"]["target_accuracy"] = 0.2
    plan["rollouts"]["settings"] |= {"num_rollout": 2, "rollout_batch_size": 300}
    plan["value_pretraining"]["settings"] |= {"global_batch_size": 128, "micro_batch_size": 128}
    plan["value_evaluation"]["settings"] |= {
        "value_pretrain_eval_num_batches": 3,
        "global_batch_size": 128,
        "micro_batch_size": 128,
    }
    plan["online_rl"]["settings"] |= {
        "num_rollout": 4,
        "eval_interval": 4,
        "save_interval": 2,
        "eval_max_prompts": 100,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


@pytest.mark.timeout(900)
def test_quickstart_reduced_runs_every_stage_and_a_second_start_runs_none(tmp_path: Path) -> None:
    plan, out = small_plan(tmp_path), tmp_path / "out"
    program = ROOT / "examples" / "quickstart" / "run.py"
    command = [sys.executable, str(program), "--plan", str(plan), "--out", str(out)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert re.search(r"^verified: \d+ links hold$", first.stdout, re.MULTILINE), first.stdout
    assert "held-out accuracy before RL" in first.stdout

    gate = json.loads((out / "value_report.json").read_text())
    contract = hashlib.sha256((out / "critic" / "value_pretrain_contract.json").read_bytes()).hexdigest()
    consumed = json.loads((out / "run" / "run.json").read_text())["value_pretraining"]
    assert gate["passed"] is True
    assert gate["checkpoint"]["contract_sha256"] == consumed["contract_sha256"] == contract
    page = (out / "run" / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page), "the report must open offline"

    second = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stdout.count("done before") == STAGES - 1
