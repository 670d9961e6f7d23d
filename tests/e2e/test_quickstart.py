"""The quickstart itself, every stage, at a size that a test can afford."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
STAGES = 9


def small_plan(folder: Path) -> Path:
    """The quickstart's own plan with smaller numbers, and a hard kind of problem that stays out of reach."""
    plan = yaml.safe_load((ROOT / "examples" / "quickstart" / "quickstart.yaml").read_text())
    plan["problems"] |= {"num_train": 600, "num_heldout": 128}
    plan["problems"]["kinds"][0]["share"] = plan["problems"]["kinds"][1]["share"] = 0.5
    plan["problems"]["kinds"][1]["config"] = {"min_terms": 3, "max_terms": 3, "min_digits": 3, "max_digits": 3}
    plan["warm_start"] |= {"target_accuracy": 0.12, "max_steps": 400}
    plan["rollouts"]["settings"] |= {"num_rollout": 2, "rollout_batch_size": 150}
    plan["value_pretraining"]["settings"] |= {
        "value_pretrain_epochs": 4,
        "global_batch_size": 96,
        "micro_batch_size": 96,
    }
    plan["value_evaluation"]["settings"] |= {
        "value_pretrain_eval_num_batches": 2,
        "global_batch_size": 96,
        "micro_batch_size": 96,
    }
    plan["online_rl"]["settings"] |= {
        "num_rollout": 4,
        "rollout_batch_size": 32,
        "micro_batch_size": 64,
        "eval_interval": 2,
        "save_interval": 2,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


@pytest.mark.timeout(900)
def test_quickstart_reduced_runs_every_stage_and_a_second_start_runs_none(tmp_path: Path) -> None:
    plan, out = small_plan(tmp_path), tmp_path / "out"
    command = [
        sys.executable,
        str(ROOT / "examples" / "quickstart" / "run.py"),
        "--plan",
        str(plan),
        "--out",
        str(out),
    ]
    first = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert "all links hold" in first.stdout or "links hold" in first.stdout
    assert "held-out accuracy before RL" in first.stdout

    gate = json.loads((out / "value_report.json").read_text())
    assert gate["passed"] is True
    record = json.loads((out / "run" / "run.json").read_text())
    assert record["value_pretraining"]["contract_sha256"] == gate["checkpoint"]["contract_sha256"]
    page = (out / "run" / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script src" not in page

    second = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stdout.count("done before") == STAGES - 1
