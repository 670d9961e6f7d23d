"""train.py on kept rollouts, its driver and training ranks killed again and again."""

import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_driver_and_ranks_killed_again_and_again_kl_in_the_reward_two_steps_a_rollout_end_the_same(
    kept_rollouts: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    replay_flags: Callable[[Path], list[Any]],
    make_hf_model: Callable[..., Path],
    figures_of: Callable[..., list[dict[str, Any]]],
    assert_no_process_left: Callable[..., None],
) -> None:
    """faults.md rows 7, 40, 41: another reference, an adaptive penalty, two schedule steps a rollout."""
    reference = shutil.copytree(make_hf_model(seed=1), tmp_path / "reference")
    flags = [*replay_flags(kept_rollouts), "--ref-load", reference, "--no-tensorboard"]
    flags += ["--kl-coef", 0.1, "--kl-loss-type", "k3", "--kl-controller", "adaptive", "--kl-target", 1e-3]
    flags += ["--kl-horizon", 200, "--num-steps-per-rollout", 2, "--lr-decay-style", "cosine", "--lambd", 0.9]
    flags += ["--num-critic-epochs", 2, "--refresh-values"]
    whole = run("train.py", *flags, "--run-dir", tmp_path / "whole")
    assert whole.code == 0, whole.err[-3000:]

    flags += ["--run-dir", tmp_path / "run", "--max-restarts", 9]
    # The first two are missed together, before there is a save. Without its state file the last save does not count.
    faults = ["values@1=kill_critic", "log_probs@1=kill_actor", "save@2=kill_critic", "save_state@3=kill_driver"]
    killed = run("train.py", *flags, "--save-interval", 1, "--fault-injection", *faults)
    assert killed.code == -signal.SIGKILL, killed.err[-3000:]
    assert killed.err.count("fault injection: ") == len(faults)
    began = re.findall(r"starting again from (scratch|the save after rollout \d)", killed.err)
    assert began == ["scratch", "the save after rollout 0"]
    assert_no_process_left(killed.mark)

    refused = run("train.py", *flags, "--resume", "--lr", 2e-3)
    assert refused.code != 0
    assert "--resume: lr is 0.002, the last save was made with 0.001" in refused.err
    (reference / "note.json").write_text("{}")
    refused = run("train.py", *flags, "--resume")
    assert refused.code != 0
    assert refused.last_line.startswith(f"train.py: --resume: --ref-load {reference} has another content than when")
    (reference / "note.json").unlink()
    ended = run("train.py", *flags, "--resume", "--max-restarts", 0, "--fault-injection", "critic@3=kill_critic")
    assert ended.code == 1
    assert "a rank of the critic group died" in ended.last_line
    assert "--max-restarts 0 allows no other start" in ended.last_line
    assert "Traceback" not in ended.err
    assert_no_process_left(ended.mark)

    ended = run("train.py", *flags, "--resume", "--fault-injection", "actor@4=kill_actor")
    assert ended.code == 0, ended.err[-3000:]
    assert ended.err.count("starting again from the save after rollout 1") == 1

    lines = figures_of(tmp_path / "whole")
    assert figures_of(tmp_path / "run") == lines
    steps = [line for line in lines if line["stage"] == "train"]
    assert all(line["train/kl_reward"] > 0 for line in steps)
    # Far above its target, the controller raises the coefficient by its largest step: 0.2 x 16 samples / horizon.
    assert [line["train/kl_coef"] for line in steps] == pytest.approx([0.1 * 1.016**n for n in range(4)], rel=1e-6)
    rates = [1e-3 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(1, 17)]
    means = [sum(rates[first : first + 4]) / 4 for first in range(0, 16, 4)]
    values = [line["value/lr"] for line in lines if line["stage"] == "value"]
    assert values == pytest.approx(means, rel=1e-6), "two passes of two steps in each rollout"
