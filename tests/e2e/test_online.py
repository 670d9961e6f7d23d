"""train.py: learn, be killed and go on, the canary on mixed layouts, and what it refuses."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

# Figures that depend on the clock, and one that compares the engine's arithmetic with Megatron's.
NOT_REPRODUCED = ("time", "perf/", "rollout/tokens_per_s", "rollout/log_prob_difference_mean")


def reproducible(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be the same in two runs."""
    kept = [{key: value for key, value in line.items() if not key.startswith(NOT_REPRODUCED)} for line in lines]
    return [line for line in kept if line.keys() - {"step", "stage"}]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "run"


def test_run_to_the_end_saves_and_verifies(
    uninterrupted: Path,
    run: Callable[..., Any],
    online_flags: list[str],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
    assert_no_process_left: Callable[..., None],
) -> None:
    done = run("train.py", *online_flags, "--run-dir", uninterrupted)
    assert done.code == 0, done.err
    assert_no_process_left(done.mark)
    lines = read_metrics(uninterrupted)
    assert [line["step"] for line in lines if line["stage"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["stage"] == "eval"] == [0, 2, 4]
    assert [line["sync/weight_version"] for line in lines if "sync/weight_version" in line] == [2, 3, 4, 5]
    # The engine samples what Megatron trains: the same log-probabilities up to float32 rounding.
    assert max(line.get("rollout/log_prob_difference_mean", 0.0) for line in lines) < 1e-5
    versions = [
        {tuple(json.loads(row)["weight_versions"]) for row in file.read_text().splitlines()}
        for file in sorted((uninterrupted / "rollouts").iterdir())
    ]
    assert versions == [{("1",)}, {("2",)}, {("3",)}, {("4",)}]
    checked = run("miles/cli.py", "verify", uninterrupted)
    assert checked.code == 0, checked.out


def test_driver_killed_in_a_step_resumes_step_for_step(
    uninterrupted: Path,
    tmp_path: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    online_flags: list[str],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    killed = start("train.py", *online_flags, "--run-dir", run_dir)
    wait_for(lambda: metrics.exists() and any(line["step"] == 3 for line in read_metrics(run_dir)), killed)
    killed.kill()
    killed.finish(60)
    assert_no_process_left(killed.mark)

    refused = run("train.py", *online_flags, "--run-dir", run_dir)
    assert refused.code != 0
    assert "--resume" in refused.last_line

    resumed = run("train.py", *online_flags, "--run-dir", run_dir, "--resume")
    assert resumed.code == 0, resumed.err
    assert reproducible(read_metrics(run_dir)) == reproducible(read_metrics(uninterrupted))
    for name in ("rollout_000002.jsonl", "rollout_000003.jsonl"):
        ours, theirs = (
            [json.loads(line)["tokens"] for line in (folder / "rollouts" / name).read_text().splitlines()]
            for folder in (run_dir, uninterrupted)
        )
        assert ours == theirs


def test_engine_killed_in_a_step_ends_with_one_clear_line(
    tmp_path: Path,
    start: Callable[..., Any],
    online_flags: list[str],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    program = start("train.py", *online_flags, "--run-dir", run_dir, "--num-rollout", 200)
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, program)
    schedulers = [
        process
        for process in psutil.Process(program.process.pid).children(recursive=True)
        if any("sglang" in word for word in process.cmdline())
    ]
    assert schedulers, "no SGLang process was found below the driver"
    for process in schedulers:
        os.kill(process.pid, signal.SIGKILL)
    ended = program.finish(120)
    assert ended.code == 1
    assert "engine" in ended.last_line
    assert "Traceback" not in ended.err
    assert_no_process_left(ended.mark)


def test_canary_actor_tp2_critic_pp2_engine_serves_update_and_resume_answers_the_same(
    tmp_path: Path, run: Callable[..., Any], online_flags: list[str]
) -> None:
    layout = {
        "actor-num-gpus-per-node": 2,
        "tensor-model-parallel-size": 2,
        "critic-num-gpus-per-node": 2,
        "critic-tensor-model-parallel-size": 1,
        "critic-pipeline-model-parallel-size": 2,
        "check-weight-sync": "always",
    }
    words = [word for name, value in layout.items() for word in (f"--{name}", str(value))]
    done = run("train.py", *online_flags, *words, "--run-dir", tmp_path / "run", "--canary-one-step")
    assert done.code == 0, done.err
    assert "canary: resumed from the save: log-probs differ by 0.00e+00, values by 0.00e+00" in done.out


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (["--hf-checkpoint", "nowhere"], "nowhere"),
        (["--custom-rm-path", "nowhere.py:score"], "nowhere.py"),
        (["--n-samples-per-prompts", "2"], "did you mean --n-samples-per-prompt"),
        (["--global-batch-size", "15"], "--global-batch-size 15"),
        (["--resume"], "holds no complete save"),
        (["--critic-load", "."], "no"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_mistake_refused_before_ray_starts(
    tmp_path: Path, run: Callable[..., Any], online_flags: list[str], change: list[str], fragment: str
) -> None:
    done = run("train.py", *online_flags, "--run-dir", tmp_path / "run", *change, timeout_s=60)
    assert done.code != 0
    assert fragment in done.err
    assert "Traceback" not in done.err
    assert "Ray" not in done.err


def test_contract_of_another_model_refused_by_field(
    tmp_path: Path, run: Callable[..., Any], online_flags: list[str]
) -> None:
    contract = {
        "schema": "miles.value-pretrain-checkpoint.v1",
        "source_manifest_sha256": "a" * 64,
        "train_dataset_sha256": "b" * 64,
        "objective": {
            "loss_type": "classification",
            "num_bins": 51,
            "reward_range": [0.0, 1.0],
            "target_type": "hl_gauss",
            "hl_gauss_sigma_ratio": 0.75,
        },
        "batch_plan": {"seed": 1, "global_batch_size": 2, "drop_incomplete_batch": True},
        "completed_steps": 6,
        "model_identity": "another-model",
    }
    folder = tmp_path / "critic"
    folder.mkdir()
    text = json.dumps(contract, sort_keys=True, separators=(",", ":")) + "\n"
    (folder / "value_pretrain_contract.json").write_text(text)
    flags = [*online_flags, "--run-dir", tmp_path / "run", "--critic-load", folder]
    refused = run("train.py", *flags)
    assert refused.code != 0
    assert "model_identity" in refused.last_line

    refused = run("train.py", *flags, "--critic-value-pretrain-contract-sha256", "0" * 64)
    assert refused.code != 0
    assert "contract SHA-256 mismatch" in refused.last_line
