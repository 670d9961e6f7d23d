"""A value evaluation report as one HTML file: the gate, explained variance, calibration, values along responses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles.contracts.canonical import sha256_bytes
from miles.contracts.publish import publish_bytes
from miles.contracts.value_report import parse_report
from miles.reporting.figures import Line, Theme, draw_lines, draw_svg
from miles.reporting.page import Panel, document, escape, number, panels_html, table, tiles_html
from miles.reporting.report import calibration_panel
from miles.reporting.series import Series

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each."""

_WEIGHTINGS = (("token_weighted", "by tokens"), ("trajectory_weighted", "by trajectories"))


def write_value_page(report_path: str | Path, out: str | Path | None = None, *, decode: Decode | None = None) -> Path:
    """Check an evaluation report, draw it and write one HTML file that opens offline.

    Args:
        out: file to write, default the report's name with `.html`. Appears whole or not at all; replaces none.
        decode: turns token ids into the text of each; without it the ids are shown.

    Returns:
        the path written.

    Raises:
        FileNotFoundError: no such report. FileExistsError: `out` exists. ValueError: the report is malformed, or its
        figures contradict each other.
    """
    report_path = Path(report_path)
    data = report_path.read_bytes()
    try:
        report = parse_report(data)
    except ValueError as error:
        raise ValueError(f"{report_path}: {error}") from error
    verdict = ("ok", "gate passed") if report["passed"] else ("bad", "gate FAILED")
    title = f"Value evaluation: {report_path.name}"
    about = (
        f"{report['manifest']['split']} split, {len(report['batches'])} batches of "
        f"{report['batch_plan']['global_batch_size']} rows, critic of step "
        f"{report['checkpoint']['contract_completed_steps']}"
    )
    parts = [
        f"<h1>{escape(title)}</h1><p class='soft'>{escape(about)}. Everything shown is in this file.</p>",
        f"<p><span class='verdict {verdict[0]}'>{verdict[1]}</span></p>",
        tiles_html(_tiles(report)),
        panels_html(_panels(report)),
        "<h2>The gate</h2>" + table(("criterion", "required", "found", ""), _gate_rows(report)),
        "<h2>Batches</h2>" + _batches(report),
    ]
    if report.get("worst_trajectories"):
        parts.append(_worst(report, decode))
    facts = [("report SHA-256", sha256_bytes(data))]
    for section in ("manifest", "checkpoint", "execution", "batch_plan"):
        facts += [(f"{section}.{key}", str(value)) for key, value in report[section].items()]
    parts.append("<h2>What was evaluated</h2>" + table(("fact", "value"), facts, mono=(0, 1)))
    out = report_path.with_suffix(".html") if out is None else Path(out)
    publish_bytes(out, document(title, parts).encode("utf-8"), replace=False)
    return out


def _tiles(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    tiles = []
    for name, words in _WEIGHTINGS:
        gate, metrics = report["gate"][name], report["aggregate"][name]["metrics"]
        positive = f"{gate['positive_batches']} of {gate['evaluable_batches']} batches above 0"
        ev = f"{metrics['explained_variance']:+.4f}"
        tiles.append((f"EV {words}", ev, f"{positive}; {metrics['active_targets']:,} targets"))
    bias = report.get("bias")
    if bias is not None:
        figures = bias["token_weighted"]
        tiles.append(("R² by tokens", f"{figures['r_squared']:+.4f}", "1 − MSE / Var(return): sees a bias"))
        limit = report["gate"].get("bias", {}).get("max_bias")
        allowed = "no limit set" if limit is None else f"at most {number(limit)} allowed"
        tiles.append(("Mean residual by tokens", number(figures["mean_residual"]), f"return − value; {allowed}"))
    return tiles


def _panels(report: dict[str, Any]) -> list[Panel]:
    panels = [_explained_variance_panel(report)]
    for name, words in _WEIGHTINGS:
        rows = report.get("calibration", {}).get(name)
        if rows:
            panels.append(calibration_panel(rows, title=f"Calibration {words}", source=f"weighted {words}"))
    if "positions" in report:
        panels.insert(1, _positions_panel(report["positions"]))
    return panels


def _explained_variance_panel(report: dict[str, Any]) -> Panel:
    lines = []
    for colour, (name, words) in zip(("c1", "c2"), _WEIGHTINGS, strict=True):
        values = [batch[name]["metrics"]["explained_variance"] for batch in report["batches"]]
        steps = list(range(len(values)))
        lines.append(Line(Series(name, "value_eval", steps, values), words, colour, dots=len(values) <= 100))
    lowest = min(value for line in lines for value in line.series.values)
    floor = min(-0.1, max(lowest, -1.0) - 0.08)

    def draw(axes: Any, theme: Theme) -> None:
        ylabel = "1 − Var(R − V) / Var(R)"
        draw_lines(axes, theme, lines, ylabel=ylabel, ylim=(floor, 1.05), xlabel="evaluation batch")
        axes.axhline(0.0, color=theme["c5"], linewidth=1.3, linestyle=(0, (4, 3)))
        axes.annotate(
            "gate: above 0", (1.0, 0.0), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            xytext=(0, 2), textcoords="offset points", color=theme["c5"], fontsize=9,
        )  # fmt: skip

    below = sum(value < -1.0 for line in lines for value in line.series.values)
    outside = f" {below} points lie under −1, outside the picture." if below else ""
    caption = (
        "Part of the returns' variance that the critic explains in each batch. The gate wants the whole and a strict"
        f" majority of batches above the dashed line, a constant guess.{outside}"
    )
    return Panel("Explained variance per batch", draw_svg(draw, salt="value-ev"), caption)


def _positions_panel(positions: dict[str, Any]) -> Panel:
    groups, bins = positions["groups"], positions["bins"]
    colours = {1: ("c1",), 2: ("c2", "c1"), 3: ("c2", "c6", "c1")}.get(len(groups), ("c2", "c6", "c3", "c1"))
    lines = []
    for group, colour in zip(groups, colours, strict=True):
        filled = [i for i in range(bins) if group["trajectories"][i]]
        steps = [round(100 * (i + 0.5) / bins) for i in filled]
        means = [group["mean_value"][i] for i in filled]
        lines.append(Line(Series(group["name"], "value_eval", steps, means), group["name"], colour, dots=True))
    svg = draw_svg(
        lambda axes, theme: draw_lines(
            axes, theme, lines, ylabel="mean value", xlabel="position in the response, % of its length"
        ),
        salt="value-positions",
    )
    caption = (
        "Mean over trajectories of the value along the response, grouped by what they earned. A critic that learns"
        " from what it reads pulls the curves apart towards the end; where they start apart, it knows from the prompt."
    )
    return Panel("Value against position in the response", svg, caption)


def _gate_rows(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    gate, rows = report["gate"], []

    def add(criterion: str, required: str, found: str, holds: bool) -> None:
        rows.append((criterion, required, found, "holds" if holds else "FAILS"))

    for name, words in _WEIGHTINGS:
        verdict, metrics = gate[name], report["aggregate"][name]["metrics"]
        ev = f"{metrics['explained_variance']:+.6f}"
        add(f"explained variance {words}, all batches", "> 0", ev, verdict["aggregate_ev_positive"])
        required = f"{verdict['required_positive_batches']} of {verdict['evaluable_batches']}"
        holds = verdict["strict_majority_batch_ev_positive"]
        add(f"batches with explained variance > 0 {words}", required, str(verdict["positive_batches"]), holds)
    if "bias" in gate:
        found = ", ".join(number(value) for value in gate["bias"]["mean_residual"].values())
        add("largest |mean residual|", f"<= {number(gate['bias']['max_bias'])}", found, gate["bias"]["passed"])
    return rows


def _batches(report: dict[str, Any]) -> str:
    rows = []
    for batch in report["batches"]:
        evs = [f"{batch[name]['metrics']['explained_variance']:+.4f}" for name, _ in _WEIGHTINGS]
        labels = ", ".join(f"{float(label):g}: {count}" for label, count in list(batch["label_counts"].items())[:6])
        rows.append((str(batch["batch"]), *evs, f"{batch['expected_active_targets']:,}", labels))
    head = ("batch", "EV by tokens", "EV by trajectories", "targets", "returns: rows")
    listed = table(head, rows, numeric=(0, 1, 2, 3))
    return listed if len(rows) <= 20 else f"<details><summary>{len(rows)} batches</summary>{listed}</details>"


def _worst(report: dict[str, Any], decode: Decode | None) -> str:
    rows = report["worst_trajectories"]
    bins = report["calibration"]["token_weighted"] if "calibration" in report else None
    low, high = (bins[0]["low"], bins[-1]["high"]) if bins else (0.0, 1.0)
    shown = "decoded" if decode else "as token ids; name a tokenizer to read them"
    intro = (
        f"<h2>Worst trajectories</h2><p class='soft'>The {len(rows)} rows whose return lies farthest from their mean"
        f" value, {shown}. Grey: the end of the prompt. Underlined: observation tokens, which have no target. Colour: "
        f"value from {number(low)}<span class='scale'></span>to {number(high)}; a token's own value shows under the"
        " pointer.</p>"
    )
    return intro + "".join(_trajectory(row, decode, low=low, high=high) for row in rows)


def _trajectory(row: dict[str, Any], decode: Decode | None, *, low: float, high: float) -> str:
    def texts(ids: Sequence[int]) -> list[str]:
        return decode(ids) if decode else [f"{token} " for token in ids]

    prompt = texts(row["prompt_tokens"])
    pieces = texts([*row["prompt_tokens"], *row["tokens"]])[len(prompt) :]
    spans = []
    for place, (text, value) in enumerate(zip(pieces, row["values"], strict=True), start=row["first_response_token"]):
        if value is None:
            spans.append(f"<span class='masked' title='token {place}: no target'>{escape(text)}</span>")
            continue
        share = min(max((value - low) / (high - low), 0.0), 1.0) - 0.5
        colour = f"color-mix(in srgb, var(--{'c1' if share > 0 else 'c2'}) {abs(share) * 120:.0f}%, transparent)"
        title = f"token {place}: value {number(value)}"
        spans.append(f"<span style='background:{colour}' title='{title}'>{escape(text)}</span>")
    cut = row["first_response_token"]
    before = f"<span class='prompt'>… {cut} response tokens …</span>" if cut else ""
    head = (
        f"{row['sample_id']} (row {row['sample_index']}, batch {row['batch']}): return {number(row['label'])}, "
        f"mean value {number(row['mean_value'])}, residual {row['residual']:+.3g}, "
        f"{row['response_length']:,} response tokens"
    )
    return (
        f"<div class='card trajectory'><h3>{escape(head)}</h3><div class='tokens'>"
        f"<span class='prompt'>{escape(''.join(prompt))}</span>{before}{''.join(spans)}</div></div>"
    )
