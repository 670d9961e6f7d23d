"""A learning curve for each advantage estimator on the quickstart's task, in one picture.

    make quickstart                                   # once: actor, problems, pretrained critic
    python benchmarks/estimator_curves.py [--quickstart outputs/quickstart] [--estimators gae grpo ...]
        [--rollouts 20] [--out FILE.png]

Every run starts from the same warm-started actor with the same prompts, batch (64 prompts x 4 responses), seeds and
learning rate, and differs in its estimator alone (and in what belongs to it: GAE's critic comes from the quickstart's
contract, dr_grpo adds up tokens over a constant). Prints held-out accuracy with its 95 % interval, first and last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from matplotlib.ticker import MaxNLocator

from miles.contracts.publish import publish_bytes
from miles.reporting.figures import draw_png

ROOT = Path(__file__).resolve().parents[1]
CRITIC = {"critic_load", "critic_value_eval_report", "critic_lr", "critic_lambd", "critic_num_gpus_per_node"}
WHITENS = {"normalize_advantages": None}
# Settings on top of the quickstart's; None takes one away that the estimator does not read.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {},
    "gae_adaptive": {"lambd": None},
    "monte_carlo": {"lambd": None},
    "grpo": {"lambd": None},
    "dr_grpo": {"lambd": None, "loss_agg_mode": "seq-mean-token-sum-norm", "normalize_advantages": False},
    "rloo": {"lambd": None},
    "reinforce_plus_plus": {"lambd": None, **WHITENS},
    "reinforce_plus_plus_baseline": {"lambd": None, **WHITENS},
}
# Two may be the same here, as rloo and reinforce_plus_plus_baseline are: dashes and dots let the one below be seen.
STYLES = ("o-", "s-", "^-", "D-", "v-", "X-", "P--", ".--")


def run(name: str, base: dict[str, Any], folder: Path, rollouts: int) -> list[dict[str, float]]:
    """The evaluations of one run, from before its first update on."""
    settings = {key: value for key, value in (base | ESTIMATORS[name]).items() if value is not None}
    if not name.startswith("gae"):
        settings = {key: value for key, value in settings.items() if key not in CRITIC}
    settings |= {
        "advantage_estimator": name,
        "num_rollout": rollouts,
        "rollout_batch_size": 64,
        "n_samples_per_prompt": 4,
        "eval_interval": max(1, rollouts // 4),
        "save_interval": rollouts,
        "run_dir": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "eval"]


def picture(curves: dict[str, list[dict[str, float]]]) -> bytes:
    """A PNG of accuracy over rollouts, each estimator in a colour and marker of its own whatever is beside it; the
    legend stands beside the axes, the best at the end on top.
    """

    def draw(axes: Any, theme: Any) -> None:
        for number, name in enumerate(ESTIMATORS):
            if name not in curves:
                continue
            axes.plot(
                [point["step"] for point in curves[name]],
                [point["eval/accuracy"] for point in curves[name]],
                STYLES[number],
                markersize=7,
                color=theme[f"c{number + 1}"],
                label=name,
            )
        count = next(iter(curves.values()))[0]["eval/count"]
        axes.set_xlabel("rollout")
        axes.set_ylabel(f"held-out accuracy, {count:.0f} problems")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        lines = sorted(axes.get_lines(), key=lambda line: line.get_ydata()[-1], reverse=True)
        axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3.0)

    return draw_png(draw, width=8.6, height=4.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, default=ROOT / "outputs" / "quickstart", help="its output folder")
    parser.add_argument("--estimators", nargs="+", choices=list(ESTIMATORS), default=list(ESTIMATORS))
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "estimators.png")
    options = parser.parse_args()
    source = options.quickstart / "settings" / "online_rl.yaml"
    if not source.is_file():
        parser.error(f"{source} does not exist: run `make quickstart` first, or name its folder with --quickstart")
    base = yaml.safe_load(source.read_text())
    curves: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.estimators:
            began = time.perf_counter()
            curves[name] = run(name, base, Path(scratch), options.rollouts)
            first, last = curves[name][0], curves[name][-1]
            print(
                f"{name:30}{first['eval/accuracy']:7.1%} -> {last['eval/accuracy']:6.1%} "
                f"({last['eval/accuracy_low']:.1%} to {last['eval/accuracy_high']:.1%}), "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )

    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(publish_bytes(options.out, picture(curves)))


if __name__ == "__main__":
    main()
