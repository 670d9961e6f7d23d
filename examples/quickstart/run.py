"""The quickstart: problems, warm start, rollouts, value data, critic, gate, online RL, verification, report.

Each stage is a program of its own, started here with its part of one YAML file. A stage that finished with the same
settings is not run again, so a second start costs nothing; --fresh starts over.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.stages import ROOT, Stage, Totals, flags, read_plan, run_stages, write_settings
from miles.reporting.report import write_report
from miles.utils.strict_parser import StrictParser

HERE = Path(__file__).resolve().parent


KEYS = (
    *("common", "problems.kinds", "actor", "rollouts.settings", "value_data"),
    *("warm_start.target_accuracy", "warm_start.max_steps", "warm_start.eval_interval", "warm_start.settings"),
    *("value_pretraining.settings", "value_evaluation.settings", "online_rl.settings"),
)
"""What a plan must hold."""


def stages(plan: dict[str, Any], out: Path) -> list[Stage]:
    """The stages in order; writes the settings file of each."""
    python = sys.executable

    def settings(name: str, **more: Any) -> list[str]:
        return write_settings(out / "settings", name, plan["common"] | plan[name]["settings"] | more)

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
    data = {**problems, "kinds": json.dumps(problems["kinds"])}
    texts = [str(out / "problems" / f"{split}.jsonl") for split in ("train", "heldout")]
    collected = settings("rollouts", rollout_only=True, run_dir=str(out / "collected"))
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
        Stage("rollouts", [python, str(ROOT / "train.py"), *collected], [out / "collected"]),
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
        Stage("verification", [python, "-m", "miles.cli", "verify", str(run)], [], only_looks=True),
    ]


def print_summary(out: Path, page: Path, totals: Totals) -> None:
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
    print(f"{totals.seconds:.0f} s, peak memory {totals.peak / 2**30:.1f} GiB")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=HERE / "quickstart.yaml", help="YAML file of all stages")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quickstart", help="output folder")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier start finished")
    options = parser.parse_args()
    out = options.out.resolve()
    plan = read_plan("quickstart", options.plan, KEYS, out=out)
    if options.fresh and out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    totals = run_stages("quickstart", stages(plan, out), out)
    print_summary(out, write_report(out / "run"), totals)


if __name__ == "__main__":
    main()
