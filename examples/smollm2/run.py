"""SmolLM2-135M-Instruct: conversion, rollouts on word problems, value canary, online canary, resume, verification.

A real model through every part of miles once. Each stage is a program of its own, started here with its part of one
YAML file; a stage that finished with the same settings is not run again, --fresh starts over.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.stages import ROOT, Stage, Totals, flags, read_journal, read_plan, run_stages, write_settings
from miles.reporting.report import write_report
from miles.utils.strict_parser import StrictParser

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"


KEYS = (
    *("common", "problems.kinds", "rollouts.settings", "value_data", "value_canary.settings"),
    *("value_pretraining.settings", "online_canary.settings", "resume.settings"),
)
"""What a plan must hold."""


def stages(plan: dict[str, Any], out: Path) -> list[Stage]:
    """The stages in order; writes the settings file of each."""

    def settings(name: str, **more: Any) -> list[str]:
        return write_settings(out / "settings", name, plan["common"] | plan[name]["settings"] | more)

    def program(path: Path, *words: str) -> list[str]:
        return [sys.executable, str(path), *words]

    model, value_data, critic, run = out / "model", out / "value_data", out / "critic", out / "run"
    problems = {**plan["problems"], "kinds": json.dumps(plan["problems"]["kinds"])}
    # The critic never sees these; the online canary's prompts are the file's.
    offline = {"value_pretrain_manifest": str(value_data / "manifest.json"), "prompt_data": None}
    canary = {"critic_save": str(out / "canary_critic"), "run_dir": str(out / "value_canary_run"), **offline}
    pretrain = {"critic_save": str(critic), "run_dir": str(out / "value_run"), **offline}
    online = plan["online_canary"]["settings"] | {"critic_load": str(critic), "run_dir": str(run)}
    return [
        Stage("model", program(HERE / "convert.py", "--out", str(model)), [model]),
        Stage(
            "problems",
            program(QUICKSTART / "make_problems.py", "--out", str(out / "problems"), *flags(problems)),
            [out / "problems"],
        ),
        Stage(
            "rollouts",
            program(ROOT / "train.py", *settings("rollouts", rollout_only=True, run_dir=str(out / "collected"))),
            [out / "collected"],
        ),
        Stage(
            "inspection",
            program(HERE / "inspect_rollouts.py", "--rollouts", str(out / "collected"), "--model", str(model)),
            [],
            only_looks=True,
        ),
        Stage(
            "value data",
            program(
                ROOT / "tools" / "build_value_dataset.py",
                *("--rollouts", str(out / "collected"), "--out", str(value_data), *flags(plan["value_data"])),
            ),
            [value_data],
        ),
        Stage(
            "value canary",
            program(ROOT / "train_value.py", *settings("value_canary", **canary)),
            [out / "canary_critic", out / "value_canary_run"],
        ),
        Stage(
            "value pretraining",
            program(ROOT / "train_value.py", *settings("value_pretraining", **pretrain)),
            [critic, out / "value_run"],
        ),
        Stage(
            "online canary",
            program(ROOT / "train.py", *settings("online_canary", critic_load=str(critic), run_dir=str(run))),
            [run],
        ),
        Stage("resume", program(ROOT / "train.py", *settings("resume", **(online | plan["resume"]["settings"]))), []),
        Stage("verification", [sys.executable, "-m", "miles.cli", "verify", str(run)], [], only_looks=True),
    ]


def print_summary(out: Path, page: Path, done: list[Stage], totals: Totals) -> None:
    print("\nstage                seconds  peak GiB")
    journal = read_journal(out)
    for stage in done:
        facts = journal[stage.name]
        print(f"{stage.name:20} {facts['seconds']:7.0f}  {facts['peak_bytes'] / 2**30:8.1f}")
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["stage"] == "rollout":
            print(
                f"rollout {line['step']}: reward {line['rollout/reward_mean']:.3f}, engine and trainer differ by "
                f"{line['rollout/log_prob_difference_mean']:.1e} per token on average"
            )
    print(f"report: {page}")
    print(f"{totals.seconds:.0f} s, peak memory {totals.peak / 2**30:.1f} GiB")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=HERE / "smollm2.yaml", help="YAML file of all stages")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "smollm2", help="output folder")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier start finished")
    options = parser.parse_args()
    plan = read_plan("smollm2", options.plan, KEYS, out=options.out.resolve(), here=HERE)
    # Imports torch: a mistake or --help need not wait for it.
    from examples.smollm2.convert import find_gguf

    try:
        find_gguf()
    except ValueError as error:
        raise SystemExit(f"smollm2: {error}") from None
    out = options.out.resolve()
    if options.fresh and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    todo = stages(plan, out)
    totals = run_stages("smollm2", todo, out)
    print_summary(out, write_report(out / "run"), todo, totals)


if __name__ == "__main__":
    main()
