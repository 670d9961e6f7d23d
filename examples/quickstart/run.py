"""The quickstart: problems, warm start, rollouts, value data, critic, gate, online RL, verification, report.

Each stage is a program of its own, started here with its part of one YAML file. A stage that finished with the same
settings is not run again, so a second start costs nothing; --fresh starts over.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from miles.contracts.publish import publish_bytes, publish_json
from miles.reporting.report import write_report

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Stage:
    """One program: its command, and the folders and files it makes, which are removed before it runs."""

    name: str
    command: list[str]
    makes: list[Path]


class PeakMemory(threading.Thread):
    """Watches the memory of this process and all below it; `peak` in bytes, shared pages shared out."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        me = psutil.Process()
        while True:
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak = max(self.peak, total)
            time.sleep(2.0)


def stages(plan: dict[str, Any], out: Path) -> list[Stage]:
    """The stages in order; writes the settings file of each."""
    python, folder = sys.executable, out / "settings"

    def settings(name: str, **more: Any) -> list[str]:
        path = folder / f"{name}.yaml"
        publish_bytes(path, yaml.safe_dump(plan["common"] | plan[name]["settings"] | more, sort_keys=True).encode())
        return ["--config", str(path)]

    def flags(values: dict[str, Any]) -> list[str]:
        return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    folder.mkdir(parents=True, exist_ok=True)
    problems, critic, value_data = plan["problems"], out / "critic", out / "value_data"
    run, report = out / "run", out / "value_report.json"
    manifest = {"value_pretrain_manifest": str(value_data / "manifest.json")}
    warm = {name: plan["warm_start"][name] for name in ("target_accuracy", "max_steps", "eval_interval")}
    pretrain = settings("value_pretraining", critic_save=str(critic), run_dir=str(out / "value_run"), **manifest)
    evaluation = settings(
        "value_evaluation",
        critic_load=str(critic),
        value_pretrain_eval_only=True,
        value_pretrain_eval_split="heldout",
        value_pretrain_eval_report=str(report),
        run_dir=str(out / "value_eval_run"),
        **manifest,
    )
    online = settings("online_rl", critic_load=str(critic), critic_value_eval_report=str(report), run_dir=str(run))
    splits = {"num_train": problems["num_train"], "num_heldout": problems["num_heldout"], "seed": problems["seed"]}
    data = {"dataset": problems["dataset"], "dataset_config": json.dumps(problems["config"]), **splits}
    texts = [str(out / "problems" / f"{split}.jsonl") for split in ("train", "heldout")]
    collected = settings("rollouts", run_dir=str(out / "collected"))
    return [
        Stage(
            "problems",
            [python, str(HERE / "make_problems.py"), "--out", str(out / "problems"), *flags(data)],
            [out / "problems"],
        ),
        Stage(
            "actor",
            [
                *(python, str(HERE / "make_actor.py"), "--problems", *texts),
                *("--out", str(out / "actor_random"), *flags(plan["actor"])),
            ],
            [out / "actor_random"],
        ),
        Stage(
            "warm start",
            [
                *(python, str(HERE / "warm_start.py"), *settings("warm_start", run_dir=str(out / "warm_start"))),
                *("--out", str(out / "actor"), *flags(warm)),
            ],
            [out / "actor", out / "warm_start"],
        ),
        Stage("rollouts", [python, str(HERE / "collect_rollouts.py"), *collected], [out / "collected"]),
        Stage(
            "value data",
            [
                *(python, str(ROOT / "tools" / "build_value_dataset.py"), "--rollouts", str(out / "collected")),
                *("--out", str(value_data), *flags(plan["value_data"])),
            ],
            [value_data],
        ),
        Stage("value pretraining", [python, str(ROOT / "train_value.py"), *pretrain], [critic, out / "value_run"]),
        Stage(
            "value evaluation", [python, str(ROOT / "train_value.py"), *evaluation], [report, out / "value_eval_run"]
        ),
        Stage("online RL", [python, str(ROOT / "train.py"), *online], [run]),
        Stage("verification", [python, "-m", "miles.cli", "verify", str(run)], []),
    ]


def digest_of(stage: Stage, before: str) -> str:
    """What the result of a stage follows from: its command, its settings file and the stage before it."""
    text = json.dumps([stage.command, before])
    for word in stage.command:
        if word.endswith(".yaml"):
            text += Path(word).read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def run(plan: dict[str, Any], out: Path) -> None:
    """Run what is not done yet; the report at the end."""
    memory = PeakMemory()
    memory.start()
    journal = out / "stages.json"
    done: dict[str, Any] = json.loads(journal.read_text()) if journal.exists() else {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started, digest, ran = time.monotonic(), "", False
    todo = stages(plan, out)
    for number, stage in enumerate(todo, start=1):
        digest = digest_of(stage, digest)
        title = f"[{number}/{len(todo)}] {stage.name}"
        if not ran and stage.makes and done.get(stage.name, {}).get("digest") == digest:
            print(f"{title}: done before, {done[stage.name]['seconds']:.0f} s", flush=True)
            continue
        print(title, flush=True)
        ran = True
        remove(stage.makes)
        began = time.monotonic()
        code = subprocess.run(stage.command, cwd=ROOT, env=environment).returncode
        if code != 0:
            raise SystemExit(
                f"quickstart: stage {stage.name!r} ended with exit code {code}: {' '.join(stage.command)}"
            )
        done[stage.name] = {"digest": digest, "seconds": time.monotonic() - began}
        publish_json(journal, done)
    page = write_report(out / "run")
    print_summary(out, page, seconds=time.monotonic() - started, peak=memory.peak)


def print_summary(out: Path, page: Path, *, seconds: float, peak: int) -> None:
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line for line in lines if line["stage"] == "eval"]
    gate = json.loads((out / "value_report.json").read_text())
    print()
    for when, line in (("before", accuracies[0]), ("after", accuracies[-1])):
        print(
            f"held-out accuracy {when:6} RL: {line['eval/accuracy']:.1%} "
            f"(95 % interval {line['eval/accuracy_low']:.1%} to {line['eval/accuracy_high']:.1%}, "
            f"{line['eval/count']} problems)"
        )
    for weighting in ("token_weighted", "trajectory_weighted"):
        ev = gate["aggregate"][weighting]["metrics"]["explained_variance"]
        print(f"critic on held-out prompts, {weighting.replace('_', '-')}: EV {ev:+.3f}")
    print(f"report: {page}")
    print(f"{seconds:.0f} s, peak memory {peak / 2**30:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plan", type=Path, default=HERE / "quickstart.yaml", help="YAML file of all stages")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quickstart", help="output folder")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier start finished")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.fresh and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    plan = yaml.safe_load(options.plan.read_text().replace("{out}", str(out)))
    run(plan, out)


if __name__ == "__main__":
    main()
