"""`report.html`: one page, no network, that shows what a run did and which of its figures are missing."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles.contracts.chain import RUN_CONFIG_NAME, RUN_RECORD_NAME
from miles.contracts.publish import publish_bytes
from miles.reporting.figures import (
    MAX_POINTS,
    Line,
    Theme,
    draw_calibration,
    draw_lines,
    draw_png,
    draw_stacks,
    draw_svg,
    draw_timeline,
)
from miles.reporting.page import Panel, number, render_page
from miles.reporting.series import (
    Metrics,
    Series,
    evaluation_report,
    flatten,
    is_finite,
    read_json_object,
    read_metrics,
    read_settings,
)
from miles.reporting.wilson import wilson_interval
from miles.utils.tracking_utils.tracking import METRICS_FILE

TIME_STAGES = (
    ("time/rollout_s", "rollout"),
    ("time/values_s", "values"),
    ("time/log_probs_s", "log-probs"),
    ("time/critic_s", "critic update"),
    ("time/actor_s", "actor update"),
    ("time/sync_s", "weight sync"),
    ("time/save_s", "save"),
    ("time/eval_s", "evaluation"),
)

_OUTSIDE_STEP = frozenset({"time/save_s", "time/eval_s"})


_ACCURACY = re.compile(r"eval/(.+/)?accuracy")


class ChainLink(Protocol):
    """One verified link of the artifact chain, as `miles.contracts.chain.verify_chain` lists them."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Any: ...
    @property
    def ok(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def write_report(run_dir: str | Path, out: str | Path | None = None, *, links: Sequence[ChainLink] = ()) -> Path:
    """Read a run folder and write one HTML file that opens offline.

    A series that was never logged is named as missing, not drawn empty. Settings, facts and the critic's evaluation
    report are shown where the run folder has them.

    Args:
        run_dir: folder with `metrics.jsonl`, and where present `config.yaml` and `run.json`.
        out: file to write, default `report.html` in the run folder, which is drawn again. Appears whole or not at all.
        links: the verified artifact chain, shown as a list.

    Returns:
        the path written.

    Raises:
        FileNotFoundError: no metrics file. FileExistsError: `out` exists. ValueError: a file that does not parse,
        with its line.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir / METRICS_FILE)
    facts = read_json_object(run_dir / RUN_RECORD_NAME)
    evaluation = evaluation_report(run_dir, facts)
    panels, missing = _panels(metrics, evaluation)
    drawn = {name for names in DRAWN_NAMES for name in names}
    page = render_page(
        title=str((facts or {}).get("name") or run_dir.resolve().name),
        tiles=_tiles(metrics),
        panels=panels,
        missing=missing,
        notes=_notes(metrics),
        others=[
            (s.name, s.stage, len(s.steps), s.last) for n in metrics.names() if n not in drawn for s in metrics.all(n)
        ],
        stage_table=_stage_table(metrics),
        settings=read_settings(run_dir / RUN_CONFIG_NAME),
        facts=flatten(facts) if facts else [],
        links=[(link.name, str(link.path), link.ok, link.detail) for link in links],
    )
    page_path = run_dir / "report.html" if out is None else Path(out)
    return publish_bytes(page_path, page.encode("utf-8"), replace=out is None)


def learning_curve_png(run_dir: str | Path, path: str | Path) -> Path:
    """Write the learning curve (held-out accuracy and training reward over the step, with 95 % intervals) as a PNG.

    Raises:
        FileNotFoundError: no metrics file. FileExistsError: `path` exists. ValueError: neither series was logged.
    """
    metrics = read_metrics(Path(run_dir) / METRICS_FILE)
    lines = _accuracy_lines(metrics) + [_with(line, colour="c2") for line in _reward_lines(metrics)]
    if not lines:
        raise ValueError(f"{Path(run_dir) / METRICS_FILE}: neither eval/accuracy nor rollout/reward_mean was logged")
    data = draw_png(lambda axes, theme: draw_lines(axes, theme, lines, ylabel="fraction solved", ylim=_unit(lines)))
    return publish_bytes(Path(path), data, replace=False)


# ---------------------------------------------------------------------------------------------------------------------
# curves


def _with(line: Line, *, colour: str) -> Line:
    return Line(series=line.series, label=line.label, colour=colour, band=line.band, dots=line.dots)


def _accuracy_lines(metrics: Metrics) -> list[Line]:
    """A line for each evaluation set, the one without a name first."""
    lines: list[Line] = []
    names = [name for name in metrics.names() if _ACCURACY.fullmatch(name)]
    for name in sorted(names, key=lambda name: name != "eval/accuracy"):
        series = metrics.get(name)
        assert series is not None
        which = name.removeprefix("eval/").removesuffix("accuracy").rstrip("/")
        label = f"held-out accuracy of {which}" if which else "held-out accuracy"
        band = _logged_band(metrics, series)
        lines.append(Line(series, label, f"c{len(lines) % 7 + 1}", band=band, dots=True))
    return lines


def _logged_band(metrics: Metrics, series: Series) -> tuple[list[float], list[float]] | None:
    """The interval that was logged, else the Wilson interval from the count, else none."""
    stem = series.name.removesuffix("accuracy")
    by_name = {name: metrics.get(stem + name) for name in ("accuracy_low", "accuracy_high", "count")}
    low, high, count = (s.as_dict() if s else {} for s in by_name.values())
    if all(step in low and step in high for step in series.steps):
        return [low[step] for step in series.steps], [high[step] for step in series.steps]
    if all(count.get(step, 0) >= 1 for step in series.steps):
        return _wilson_band(series, count)
    return None


def _wilson_band(series: Series, count: dict[int, float]) -> tuple[list[float], list[float]]:
    bounds = [
        wilson_interval(value * count[step], int(count[step]))
        for step, value in zip(series.steps, series.values, strict=True)
    ]
    return [low for low, _ in bounds], [high for _, high in bounds]


def _reward_lines(metrics: Metrics) -> list[Line]:
    series = metrics.get("rollout/reward_mean")
    if series is None:
        return []
    counts, unscored = (
        found.as_dict() if (found := metrics.get(name)) else {} for name in ("rollout/count", "rollout/unscored")
    )
    count = {step: n - unscored.get(step, 0) for step, n in counts.items()}
    binomial = all(0 <= v <= 1 for v in series.values) and all(count.get(step, 0) >= 1 for step in series.steps)
    return [Line(series, "training reward", "c1", band=_wilson_band(series, count) if binomial else None)]


def _unit(lines: Sequence[Line]) -> tuple[float | None, float | None]:
    """0..1 with a little air where everything is a fraction, free otherwise."""
    fractions = all(0 <= value <= 1 for line in lines for value in line.series.values)
    return (-0.02, 1.02) if fractions else (None, None)


# ---------------------------------------------------------------------------------------------------------------------
# panels


@dataclass(frozen=True)
class _Plain:
    """A panel that needs nothing but lines: names to draw with their legend texts."""

    title: str
    names: tuple[tuple[str, str], ...]
    ylabel: str
    about: str
    log: bool = False
    zero: bool = False
    reference: float | None = None
    xlabel: str = "step"


_PLAIN = (
    _Plain("Value loss", (("value/loss", "value loss"),), "loss per token", "The critic's training loss", zero=True),
    _Plain("Explained variance of held-out batches", (("value/heldout_explained_variance", "explained variance"),),
           "1 − Var(R − V) / Var(R)",
           "Explained variance of each evaluation batch, token weighted (dashed: a constant guess)",
           reference=0.0, xlabel="evaluation batch"),
    _Plain("Response length", (("rollout/response_length_mean", "mean length"),), "tokens",
           "Mean number of response tokens per rollout", zero=True),
    _Plain("Truncated responses", (("rollout/truncated_fraction", "truncated"),), "fraction",
           "Share of responses cut off at the length limit", zero=True),
    _Plain("Entropy", (("train/entropy", "entropy"),), "nats per token",
           "Mean entropy of the policy's next-token distribution", zero=True),
    _Plain("KL to the policy that sampled", (("train/approx_kl", "approximate KL"),), "nats per token",
           "Estimated KL divergence between the policy before and after the update", zero=True),
    _Plain("Clip fraction", (("train/clip_fraction", "clipped"),), "fraction of tokens",
           "Share of tokens whose ratio left the clip band in the direction the advantage pushes", zero=True),
    _Plain("Extremes of the probability ratio", (("train/ratio_max", "largest"), ("train/ratio_min", "smallest")),
           "ratio (log scale)", "Largest and smallest ratio new / old probability of any token (dashed: 1, no change)",
           log=True, reference=1.0),
    _Plain("Effective sample size", (("train/ess", "ESS"),), "fraction",
           "(Σw)² / (n Σw²) of the ratios in each sample (1: the policy is the old one)", zero=True),
    _Plain("KL to the reference model", (("train/kl_reward", "in the reward"), ("train/kl_loss", "in the loss")),
           "nats per token", "KL divergence to the reference model, before its coefficient"),
    _Plain("Idle share", (("idle/actor", "actor"), ("idle/critic", "critic"), ("idle/engines", "engines")),
           "share of the step", "Share of a step in which a group had nothing to do", zero=True),
    _Plain("Engine against trainer", (("rollout/log_prob_difference_mean", "difference"),), "nats per token",
           "Mean distance between engine's and trainer's log-probability of a sampled token", zero=True),
    _Plain("Policy loss", (("train/policy_loss", "policy loss"),), "loss per token",
           "The actor's clipped surrogate; its jumps matter, not its level"),
    _Plain("Gradient norms", (("train/grad_norm", "actor"), ("value/grad_norm", "critic")), "norm before clipping",
           "Global gradient norm of each optimizer step before clipping", log=True),
    _Plain("Learning rates", (("train/lr", "actor"), ("value/lr", "critic")), "learning rate",
           "Learning rate of each optimizer step", zero=True),
    _Plain("Throughput", (("perf/tokens_per_s", "tokens/s"),), "tokens per second",
           "Tokens trained on per second of a step's wall time", zero=True),
    _Plain("Supervised warm start", (("sft/loss", "loss"),), "nats per token",
           "Negative log-likelihood of the demonstrations", zero=True),
)  # fmt: skip

DRAWN_NAMES = (
    ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/count"),
    ("rollout/reward_mean", "rollout/count", "value/explained_variance", "time/step_s"),
    tuple(name for name, _ in TIME_STAGES),
    tuple(name for panel in _PLAIN for name, _ in panel.names),
)


def _panels(metrics: Metrics, evaluation: dict[str, Any] | None) -> tuple[list[Panel], list[tuple[str, str]]]:
    """Pictures for what was logged, and (title, series names) for what was not."""
    panels: list[Panel] = []
    missing: list[tuple[str, str]] = []

    def add(panel: Panel | None, title: str, needs: str) -> None:
        if panel is None:
            missing.append((title, needs))
        else:
            panels.append(panel)

    add(_accuracy_panel(metrics), "Held-out accuracy", "eval/accuracy")
    add(_reward_panel(metrics), "Reward", "rollout/reward_mean")
    add(_plain_panel(metrics, _PLAIN[0]), _PLAIN[0].title, "value/loss")
    add(_explained_variance_panel(metrics), "Explained variance per batch", "value/explained_variance")
    add(_calibration_panel(evaluation), "Calibration of the critic", "the evaluation report named in run.json")
    for plain in _PLAIN[1:]:
        add(_plain_panel(metrics, plain), plain.title, ", ".join(name for name, _ in plain.names))
    add(_time_panel(metrics), "Time per stage", "time/*_s")
    add(_timeline_panel(metrics), "Timeline of a step", "a timeline on a line of stage time")
    return panels, missing


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _course(series: Series, show: Any = number) -> str:
    """ "from A (step s) to B (step t)", or the single value."""
    if len(series.steps) == 1:
        return f"{show(series.last)} at step {series.steps[0]}"
    return f"{show(series.first)} at step {series.steps[0]}, {show(series.last)} at step {series.steps[-1]}"


def _stage_lines(metrics: Metrics, names: Sequence[tuple[str, str]]) -> list[Line]:
    lines: list[Line] = []
    for name, label in names:
        stages = metrics.all(name)
        for series in stages:
            text = label if len(stages) == 1 else f"{label} ({series.stage})"
            lines.append(Line(series, text, f"c{len(lines) % 7 + 1}"))
    return lines


def _plain_panel(metrics: Metrics, plain: _Plain) -> Panel | None:
    lines = _stage_lines(metrics, plain.names)
    if not lines:
        return None
    log = plain.log and all(value > 0 for line in lines for value in line.series.values)
    floor = 0.0 if plain.zero and all(value >= 0 for line in lines for value in line.series.values) else None

    def draw(axes: Any, theme: Theme) -> None:
        draw_lines(
            axes,
            theme,
            lines,
            ylabel=plain.ylabel,
            ylim=(floor, None),
            log=log,
            reference=plain.reference,
            xlabel=plain.xlabel,
        )

    if len(lines) == 1:
        courses = _course(lines[0].series)
    else:
        courses = "; ".join(f"{line.label}: {_course(line.series)}" for line in lines)
    absent = [label for name, label in plain.names if metrics.get(name) is None]
    not_logged = f" Not logged: {', '.join(absent)}." if absent else ""
    return Panel(plain.title, draw_svg(draw, salt=plain.title), f"{plain.about}: {courses}.{not_logged}")


def _accuracy_panel(metrics: Metrics) -> Panel | None:
    lines = _accuracy_lines(metrics)
    if not lines:
        return None
    line = lines[0]
    svg = draw_svg(
        lambda axes, theme: draw_lines(axes, theme, lines, ylabel="fraction solved", ylim=_unit(lines)),
        salt="accuracy",
    )
    caption = f"Share of held-out problems solved: {_course(line.series, _percent)}."
    if line.band is None:
        return Panel("Held-out accuracy", svg, caption + " No interval: the number of problems was not logged.")
    low, high = line.band
    caption += " Shaded: 95 % binomial (Wilson) interval."
    if len(line.series.steps) > 1:
        ends = (
            f"{_percent(low[0])} to {_percent(high[0])} at first, {_percent(low[-1])} to {_percent(high[-1])} at last"
        )
        apart = "do not overlap" if low[-1] > high[0] or high[-1] < low[0] else "overlap"
        caption += f" The intervals of first and last ({ends}) {apart}."
    return Panel("Held-out accuracy", svg, caption)


def _reward_panel(metrics: Metrics) -> Panel | None:
    lines = _reward_lines(metrics)
    if not lines:
        return None
    svg = draw_svg(
        lambda axes, theme: draw_lines(axes, theme, lines, ylabel="mean reward", ylim=_unit(lines)), salt="reward"
    )
    caption = f"Mean reward of the rollouts trained on: {_course(lines[0].series)}."
    if lines[0].band is not None:
        caption += " Shaded: 95 % Wilson interval of a proportion over the scored samples of that step."
    return Panel("Reward", svg, caption)


def _explained_variance_panel(metrics: Metrics) -> Panel | None:
    lines = _stage_lines(metrics, (("value/explained_variance", "explained variance"),))
    if not lines:
        return None
    values = [value for line in lines for value in line.series.values]
    below = sum(value < -1 for value in values)
    floor = -1.05 if below else min(-0.05, min(values) - 0.05)
    svg = draw_svg(
        lambda axes, theme: draw_lines(
            axes, theme, lines, ylabel="1 − Var(R − V) / Var(R)", ylim=(floor, 1.05), reference=0.0
        ),
        salt="explained-variance",
    )
    courses = "; ".join(_course(line.series) for line in lines)
    caption = (
        f"Part of the returns' variance the critic explains, per batch: {courses}."
        f" {sum(value > 0 for value in values)} of {len(values)} batches lie above 0 (dashed: a constant guess)."
        " It does not see a constant bias; the calibration does."
    )
    if below:
        caption += f" {below} batches lie under −1, outside the picture."
    undefined = metrics.num_not_finite.get("value/explained_variance", 0)
    if undefined:
        caption += f" Undefined in {undefined} batches, whose returns did not vary."
    return Panel("Explained variance per batch", svg, caption)


def _calibration_panel(evaluation: dict[str, Any] | None) -> Panel | None:
    tables = (evaluation or {}).get("calibration")
    rows = tables.get("token_weighted") if isinstance(tables, dict) else None
    if not isinstance(rows, list) or not all(map(_is_bin, rows)) or not any(row["n"] for row in rows):
        return None
    return calibration_panel(rows, title="Calibration of the critic", source="the evaluation report, token weighted")


def _is_bin(row: Any) -> bool:
    """Whether an entry of a report that anybody may have edited is a bin of a calibration table."""
    if not isinstance(row, dict) or type(row.get("n")) is not int or row["n"] < 0:
        return False
    needed = ("low", "high", *(("mean_value", "mean_return") if row["n"] else ()))
    return all(is_finite(row.get(name)) for name in needed)


def calibration_panel(rows: Sequence[dict[str, Any]], *, title: str, source: str) -> Panel:
    """A calibration table as a picture; `source` says where it comes from."""
    filled = [row for row in rows if row["n"]]
    total = sum(row["n"] for row in filled)
    error = sum(row["n"] * abs(row["mean_value"] - row["mean_return"]) for row in filled) / total
    bias = sum(row["n"] * (row["mean_return"] - row["mean_value"]) for row in filled) / total
    caption = (
        f"Predicted value against what was earned, in {len(rows)} bins of prediction ({len(filled)} of them filled,"
        f" {total:,} targets; {source}). Dots on the dashed line are calibrated; a dot's area is its bin's share."
        f" Mean distance from the line {number(error)}, mean return minus prediction {number(bias)}."
    )
    return Panel(title, draw_svg(lambda axes, theme: draw_calibration(axes, theme, rows), salt=title), caption)


@dataclass(frozen=True)
class _StageSeconds:
    """Seconds of each stage at each step (0 where it did not run), and the wall time of each step.

    `time/step_s` spans rollout to weight sync; saving and evaluation come on top. Stages that ran side by side add up
    to more than the wall time.
    """

    steps: list[int]
    stages: list[tuple[str, list[float]]]
    wall: list[float]

    @property
    def overlap(self) -> float:
        return max(0.0, sum(sum(seconds) for _, seconds in self.stages) - sum(self.wall))


def _stage_seconds(metrics: Metrics) -> _StageSeconds:
    logged = [(name, label, series.as_dict()) for name, label in TIME_STAGES if (series := metrics.get(name))]
    whole = metrics.get("time/step_s")
    step_seconds = whole.as_dict() if whole else {}
    steps = sorted({step for _, _, points in logged for step in points} | set(step_seconds))
    stages = [(label, [points.get(step, 0.0) for step in steps]) for _, label, points in logged]
    wall, other = [], []
    for step in steps:
        within = sum(points.get(step, 0.0) for name, _, points in logged if name not in _OUTSIDE_STEP)
        outside = sum(points.get(step, 0.0) for name, _, points in logged if name in _OUTSIDE_STEP)
        span = step_seconds.get(step, within)
        wall.append(span + outside)
        other.append(max(0.0, span - within))
    if any(seconds > 1e-6 for seconds in other):
        stages.append(("other" if logged else "whole step", other))
    return _StageSeconds(steps, stages, wall)


def _time_panel(metrics: Metrics) -> Panel | None:
    times = _stage_seconds(metrics)
    if not times.stages:
        return None
    svg = draw_svg(
        lambda axes, theme: draw_stacks(axes, theme, times.steps, times.stages), salt="time", width=11.4, height=3.2
    )
    longest = max(times.stages, key=lambda stage: sum(stage[1]))
    total = sum(times.wall)
    caption = (
        f"Seconds of each stage, stacked. {len(times.steps)} steps took {_duration(total)}, the median step"
        f" {number(statistics.median(times.wall))} s; the longest stage is {longest[0]}"
        f" ({100 * sum(longest[1]) / max(total, 1e-9):.0f} % of the wall time)."
    )
    if times.overlap > 0.01 * total:
        extra = _duration(times.overlap)
        caption += f" Some stages ran side by side, so the bars add up to {extra} more than the clock showed."
    return Panel("Time per stage", svg, caption, wide=True)


def _timeline_panel(metrics: Metrics) -> Panel | None:
    if metrics.timeline is None or not metrics.timeline[1]:
        return None
    step, spans = metrics.timeline
    end = max(span[3] for span in spans)
    idle = []
    for lane in dict.fromkeys(span[0] for span in spans):
        if (series := metrics.get(f"idle/{lane}")) is not None:
            idle.append(f"{lane} {_percent(series.last)}")
    svg = draw_svg(lambda axes, theme: draw_timeline(axes, theme, spans), salt="timeline", width=11.4, height=2.4)
    caption = f"What ran when in step {step}, the newest: {number(end)} s from the rollout to the published weights."
    if idle:
        caption += f" Idle: {', '.join(idle)}."
    return Panel("Timeline of a step", svg, caption, wide=True)


def _stage_table(metrics: Metrics) -> list[tuple[str, str, str, str, str]]:
    """(stage, steps it ran in, median seconds when it ran, total, share of the wall time)."""
    times = _stage_seconds(metrics)
    total = max(sum(times.wall), 1e-9)
    rows = []
    for label, seconds in times.stages:
        ran = [s for s in seconds if s > 0]
        median = number(statistics.median(ran)) if ran else "0"
        share = f"{100 * sum(seconds) / total:.1f} %"
        rows.append((label, str(len(ran)), f"{median} s", _duration(sum(seconds)), share))
    return rows


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _tiles(metrics: Metrics) -> list[tuple[str, str, str]]:
    """(label, large text, small text) of the figures a reader looks for first."""
    tiles: list[tuple[str, str, str]] = []
    for line in _accuracy_lines(metrics):
        band = line.band
        interval = (
            f"95 % interval {_percent(band[0][-1])} to {_percent(band[1][-1])}" if band else "no interval logged"
        )
        tiles.append(
            (line.label.capitalize(), _percent(line.series.last), f"from {_percent(line.series.first)}; {interval}")
        )
    if reward := metrics.get("rollout/reward_mean"):
        tiles.append(("Reward", number(reward.last), f"from {number(reward.first)}, {len(reward.steps)} steps"))
    if explained := metrics.get("value/explained_variance"):
        tiles.append(("Explained variance", number(explained.last), f"last batch; first {number(explained.first)}"))
    if length := metrics.get("rollout/response_length_mean"):
        tiles.append(("Response length", f"{length.last:.1f}", f"tokens; first {length.first:.1f}"))
    if metrics.seconds:
        tiles.append(("Wall time", _duration(metrics.seconds), "from the first metric line to the last"))
    return tiles


def _notes(metrics: Metrics) -> list[str]:
    notes = []
    if any(len(series.steps) > MAX_POINTS for name in metrics.names() for series in metrics.all(name)):
        notes.append(f"Curves of more than {MAX_POINTS} points are averaged over equal runs of steps.")
    if metrics.truncated:
        notes.append("The last line of metrics.jsonl is incomplete (a run that was killed); it is left out.")
    for name, count in sorted(metrics.num_not_finite.items()):
        if name != "value/explained_variance":
            notes.append(f"{name}: {count} values were not finite and are left out.")
    return notes
