"""train.py: learn, be killed and go on, the canary on mixed layouts, and what it refuses."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest


def documented_names() -> set[str]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    return set(re.findall(r"`([a-z_]+/[a-z_0-9]+)`", text))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.fixture(scope="module")
def filtered_flags(online_flags: list[str], rl_files: dict[str, Path]) -> list[Any]:
    """Flags of a run that leaves sampled groups over; its responses are long enough to be lost on the way."""
    flags = [*online_flags, "--dynamic-sampling-filter-path", f"{rl_files['reward']}:keep"]
    return [*flags, "--over-sampling-batch-size", 16, "--rollout-max-response-len", 64]


def rows_of(run_dir: Path) -> list[list[dict[str, Any]]]:
    """The kept samples of a run, by rollout."""
    files = sorted((run_dir / "rollouts").glob("rollout_*.jsonl"))
    return [[json.loads(row) for row in file.read_text().splitlines()] for file in files]


def test_run_to_the_end_saves_and_verifies(
    uninterrupted: Path,
    run: Callable[..., Any],
    filtered_flags: list[Any],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
    assert_no_process_left: Callable[..., None],
) -> None:
    done = run("train.py", *filtered_flags, "--run-dir", uninterrupted)
    assert done.code == 0, done.err
    assert_no_process_left(done.mark)
    lines = read_metrics(uninterrupted)
    assert [line["step"] for line in lines if line["stage"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["stage"] == "eval"] == [0, 2, 4]
    assert [line["sync/weight_version"] for line in lines if "sync/weight_version" in line] == [2, 3, 4, 5]
    # The engine samples what Megatron trains: the same log-probabilities up to float32 rounding.
    fresh = [line for line in lines if line.get("rollout/stale_fraction") == 0.0]
    assert fresh
    assert max(line["rollout/log_prob_difference_mean"] for line in fresh) < 1e-5
    versions = [{version for row in rows for version in row["weight_versions"]} for rows in rows_of(uninterrupted)]
    assert [max(found) for found in versions] == ["1", "2", "3", "4"]
    names = {name for line in lines for name in line if "/" in name}
    assert names - documented_names() == set()
    checked = run("miles/cli.py", "verify", uninterrupted)
    assert checked.code == 0, checked.out


def test_lost_drivers_engines_and_ranks_with_two_engines_and_groups_left_over_end_the_same(
    uninterrupted: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    filtered_flags: list[Any],
    figures_of: Callable[..., list[dict[str, Any]]],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
    assert_no_process_left: Callable[..., None],
) -> None:
    """No prompt is trained on twice or lost, and the tokens are those of a run of one engine."""
    run_dir = tmp_path / "run"
    flags = [*filtered_flags, "--run-dir", run_dir, "--rollout-num-gpus", 2, "--sglang-health-timeout-s", 12]
    # The steps in which these engines are lost are not done again.
    faults = ["generate@1=kill_engine", "generate@2=hang_engine", "eval@2=kill_driver"]
    killed = run("train.py", *flags, "--fault-injection", *faults)
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    assert killed.err.count("fault injection: ") == len(faults)
    assert killed.err.count("is lost and is started again") == 2
    assert_no_process_left(killed.mark)
    state = json.loads((run_dir / "train_state.json").read_text())
    assert state["prompts"]["leftover"], "this save holds no group that is left over"
    refused = run("train.py", *flags)
    assert refused.code != 0
    assert "--resume" in refused.last_line

    killed = run("train.py", *flags, "--resume", "--fault-injection", "generate@3=kill_driver")
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    assert killed.err.count("held-out accuracy after step 2: ") == 1
    assert_no_process_left(killed.mark)

    # The rank is missed when the engine that takes a dead one's place is to get its weights.
    faults = ["generate@3=kill_engine", "generate@3=kill_actor", "eval@4=kill_driver"]
    ended = run("train.py", *flags, "--resume", "--fault-injection", *faults)
    assert ended.code == -signal.SIGKILL, ended.err[-3000:]
    assert "held-out accuracy after step" not in ended.err
    assert ended.err.count("fault injection: ") == len(faults)
    assert re.findall(r"starting again from the save after rollout (\d)", ended.err) == ["1"]
    assert_no_process_left(ended.mark)
    # Of the last step only its evaluation is left.
    ended = run("train.py", *flags, "--resume")
    assert ended.code == 0, ended.err[-3000:]
    assert ended.err.count("held-out accuracy after step 4: ") == 1
    refused = run("train.py", *flags, "--resume")
    assert refused.code != 0
    assert "the run folder already holds 4 rollouts" in refused.last_line
    checked = run("miles/cli.py", "verify", run_dir)
    assert checked.code == 0, checked.out
    assert figures_of(run_dir) == figures_of(uninterrupted)
    lines = read_metrics(run_dir)
    resent = {line["step"]: line["rollout/requests_resent"] for line in lines if "rollout/requests_resent" in line}
    assert resent.keys() == {1, 2}
    assert min(resent.values()) > 0

    kept = rows_of(run_dir)
    assert [[row["tokens"] for row in rows] for rows in kept] == [
        [row["tokens"] for row in rows] for rows in rows_of(uninterrupted)
    ]
    rows = [row for rollout in kept for row in rollout]
    assert len({row["index"] for row in rows}) == len(rows) == 4 * 16
    # Every group of an epoch is another prompt of the 24.
    assert len({(row["group_index"] // 24, row["prompt"]) for row in rows}) == len(rows) // 2
    prompts = json.loads((run_dir / "train_state.json").read_text())["prompts"]
    sampled, filtered = (
        sum(line[name] for line in lines if name in line)
        for name in ("rollout/groups_sampled", "rollout/groups_filtered")
    )
    assert prompts["next_group"] == sampled == len(rows) // 2 + filtered + len(prompts["leftover"])


def test_replayed_rollouts_train_the_same_on_a_cluster_without_an_engine(
    uninterrupted: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    ray_cluster: str,
    replay_flags: Callable[[Path], list[Any]],
    figures_of: Callable[..., list[dict[str, Any]]],
) -> None:
    flags = replay_flags(uninterrupted / "rollouts")
    ended = run("train.py", *flags, "--run-dir", tmp_path / "run", ray_address=ray_cluster)
    assert ended.code == 0, ended.err[-3000:]
    assert "2 of 2 devices" in ended.err
    assert figures_of(tmp_path / "run", "train", "value") == figures_of(uninterrupted, "train", "value")


def test_engine_killed_that_may_not_start_again_ends_with_one_clear_line(
    tmp_path: Path,
    start: Callable[..., Any],
    online_flags: list[str],
    without: Callable[..., list[Any]],
    wait_for: Callable[..., None],
    assert_no_process_left: Callable[..., None],
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    training = ("--micro-batch-size", "--save-interval", "--lr", "--critic-lr")
    flags = without(online_flags, "--eval-prompt-data", "--eval-interval", *training)
    flags += ["--run-dir", tmp_path / "run", "--rollout-only", "--num-rollout", 10**6, "--sglang-max-restarts", 0]
    program = start("train.py", *flags)
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


def test_actor_tp2_critic_pp2_learn_and_late_and_failing_rewards_hold_up_nothing(
    tmp_path: Path,
    run: Callable[..., Any],
    online_flags: list[str],
    rl_files: dict[str, Path],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """The second rollout comes from an engine that an actor of two ranks has updated."""
    settings = {
        "actor-num-gpus-per-node": 2,
        "tensor-model-parallel-size": 2,
        "critic-num-gpus-per-node": 2,
        "critic-tensor-model-parallel-size": 1,
        "critic-pipeline-model-parallel-size": 2,
        "check-weight-sync": "always",
        "custom-rm-path": f"{rl_files['reward']}:trying",
        "rm-timeout-s": 4,
        "rm-on-error": "drop",
        "num-rollout": 2,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = run("train.py", *online_flags, *words, "--run-dir", tmp_path / "run")
    assert done.code == 0, done.err
    lines = read_metrics(tmp_path / "run")
    first, second = (line for line in lines if "rollout/stale_fraction" in line)
    assert second["rollout/stale_fraction"] == 0.0
    assert second["rollout/log_prob_difference_mean"] < 1e-5
    assert first["rollout/unscored"] == 2
    assert max(line.get("time/rollout_s", 0.0) for line in lines) < 30, "a round waited for a reward that takes 60 s"
    assert re.search(r"took more than 4 s on sample 3\b", done.err)
    assert re.search(r"failed on sample 5: OSError: the judge hung up", done.err)
    checked = run("miles/cli.py", "verify", tmp_path / "run")
    assert checked.code == 0, checked.out


def test_canary_grpo_without_a_critic_against_a_reference_model(
    tmp_path: Path,
    run: Callable[..., Any],
    online_flags: list[str],
    without: Callable[..., list[Any]],
    rl_files: dict[str, Path],
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    run_dir = tmp_path / "run"
    flags = without(online_flags, "--critic-lr", "--eval-prompt-data")
    flags += ["--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", 0.1, "--kl-loss-type", "k2"]
    flags += ["--dynamic-sampling-filter-path", "miles.rollout.filters:nonzero_reward_std"]
    flags += ["--over-sampling-batch-size", 10, "--policy-objective", "gspo", "--loss-agg-mode", "seq-mean-token-mean"]
    flags += ["--eval-prompt-data", f"one:{rl_files['heldout']}", f"two:{rl_files['heldout']}"]
    flags += ["--eval-sampling", "two:temperature=1.0,n_samples=2,max_response_len=2"]
    done = run("train.py", *flags, "--run-dir", run_dir, "--canary-one-step")
    assert done.code == 0, done.err[-3000:]
    lines = read_metrics(run_dir)
    figures = {name: value for line in lines for name, value in line.items()}
    assert figures["train/kl_loss"] == pytest.approx(0.0, abs=1e-9), "the actor begins as its reference"
    assert (figures["eval/one/count"], figures["eval/two/count"]) == (8, 16)
    assert figures["eval/two/response_length_mean"] <= 2
    assert figures["rollout/groups_sampled"] >= 10
    assert not any(name.startswith(("value/", "idle/critic")) for name in figures)
    assert not (run_dir / "checkpoints" / "critic").exists()


def test_canary_in_bfloat16_publishes_to_a_float32_engine_and_resumes(
    tmp_path: Path, run: Callable[..., Any], online_flags: list[str], without: Callable[..., list[Any]]
) -> None:
    flags = without(online_flags, "--eval-prompt-data", "--eval-interval")
    done = run("train.py", *flags, "--bf16", "--run-dir", tmp_path / "run", "--canary-one-step")
    assert done.code == 0, done.err[-3000:]
    assert "checksums of actor and engines agree" in done.err
    assert "canary: resumed from the save: log-probs differ by 0.00e+00, values by 0.00e+00" in done.out
    # What is only compared is kept nowhere.
    assert [file.name for file in (tmp_path / "run" / "rollouts").iterdir()] == ["rollout_000000.jsonl"]


def test_canary_sao_on_kept_rollouts_of_compacted_trajectories(
    tmp_path: Path,
    run: Callable[..., Any],
    tiny_hf_model: Path,
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """The whole recipe without an engine: 7 rows of 3 trajectories, none of whose counts divides another."""
    rollouts, run_dir = tmp_path / "rollouts", tmp_path / "run"
    rollouts.mkdir()
    rows = [segment_row(number, *place) for number, place in enumerate(segments_of(1, 5, 1))]
    (rollouts / "rollout_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "hf-checkpoint": tiny_hf_model,
        "num-rollout": 1,
        "rollout-batch-size": 3,
        "rollout-max-response-len": 8,
        "max-tokens-per-gpu": 64,
        "device": "cpu",
        "load-rollouts": rollouts,
        "sao-online-recipe": "coding",
        "run-dir": run_dir,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    done = run("train.py", *words, "--sao-compaction", "--use-dynamic-batch-size", "--canary-one-step")
    assert done.code == 0, done.err[-3000:]
    figures = {name: value for line in read_metrics(run_dir) for name, value in line.items()}
    assert figures["rollout/count"] == 7
    assert 0.0 <= figures["train/sao_dis_rejectfrac"] <= 1.0
    assert figures["value/lr"] == pytest.approx(5e-6 * 1.5 / 10), "two updates in the warm-up of ten"

    bad = [{**row, "rollout_log_probs": [None]} if row["index"] == 0 else row for row in rows]
    (rollouts / "rollout_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    other = [tmp_path / "other" if word is run_dir else word for word in words]
    refused = run("train.py", *other, "--sao-compaction", "--use-dynamic-batch-size")
    assert refused.code == 1
    assert "rollout_000000.jsonl:1: sample 0" in refused.last_line


def segments_of(*counts: int) -> list[tuple[str, int]]:
    """(trajectory, segment) of trajectories of so many segments."""
    return [(f"t{number}", segment) for number, count in enumerate(counts) for segment in range(count)]


def segment_row(number: int, trajectory: str, segment: int) -> dict[str, Any]:
    """A kept sample that is one segment of a trajectory; every third response token is an observation."""
    length = 2 + number % 3
    mask = [0 if position % 3 == 1 else 1 for position in range(length)]
    return {
        "index": number,
        "group_index": int(trajectory[1:]),
        "rollout_id": 0,
        "prompt": "2 + 2 =",
        "tokens": [5, 13, 5, 3 + number] + [4 + position for position in range(length)],
        "response_length": length,
        "reward": float(trajectory == "t1"),
        "loss_mask": mask,
        "rollout_log_probs": [-4.0 * one for one in mask],
        "status": "completed",
        "weight_versions": ["1"],
        "metadata": {
            "compaction_schema_version": 1,
            "compaction_trajectory_id": trajectory,
            "compaction_segment_index": segment,
            "compaction_segment_type": "summary" if segment % 2 else "execution",
        },
    }


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
