"""Pictures as SVG text whose colours are CSS variables, so that one file reads well on light and on dark."""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from miles.reporting.series import Series

# Stand-in colours no picture needs for itself: in the SVG each is replaced by the CSS variable of the same rank.
_THEMED = {
    "ink": "#010203",
    "grid": "#040506",
    "c1": "#070809",
    "c2": "#0a0b0c",
    "c3": "#0d0e0f",
    "c4": "#101112",
    "c5": "#131415",
    "c6": "#161718",
    "c7": "#191a1b",
    "c8": "#1c1d1e",
}
_PAPER = {
    "ink": "#3b4252",
    "grid": "#d5dae3",
    "c1": "#2563c9",
    "c2": "#c2540a",
    "c3": "#17825a",
    "c4": "#7d49c2",
    "c5": "#b3306d",
    "c6": "#8a6d00",
    "c7": "#0f7d8c",
    "c8": "#6b7280",
}
MAX_POINTS = 600  # of one curve
_EXTREMES: dict[str, Callable[[Sequence[float]], float]] = {"_max": max, "_min": min}


@dataclass(frozen=True)
class Theme:
    """Colours by rank."""

    colours: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.colours[name]


THEMED = Theme(_THEMED)
PAPER = Theme(_PAPER)


def draw_svg(draw: Callable[[Axes, Theme], None], *, salt: str, width: float = 5.6, height: float = 2.9) -> str:
    """One axes drawn by `draw`, as an `<svg>` element. `salt` keeps element ids apart within a page."""
    with matplotlib.rc_context(_style(THEMED, salt=salt)):
        figure, axes = _new_figure(FigureCanvasSVG, width, height)
        draw(axes, THEMED)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    for name, colour in _THEMED.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def draw_png(draw: Callable[[Axes, Theme], None], *, width: float = 7.2, height: float = 3.8, dpi: int = 150) -> bytes:
    """The same picture on white paper, as PNG bytes."""
    with matplotlib.rc_context(_style(PAPER)):
        figure, axes = _new_figure(FigureCanvasAgg, width, height)
        draw(axes, PAPER)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _new_figure(canvas: type, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    canvas(figure)
    return figure, figure.add_subplot()


def _style(theme: Theme, *, salt: str | None = None) -> dict[Any, Any]:
    return {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": theme["ink"],
        "axes.labelcolor": theme["ink"],
        "axes.edgecolor": theme["grid"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme["grid"],
        "grid.linewidth": 0.7,
        "xtick.color": theme["grid"],
        "ytick.color": theme["grid"],
        "xtick.labelcolor": theme["ink"],
        "ytick.labelcolor": theme["ink"],
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "legend.frameon": False,
        "legend.fontsize": 9,
    }


@dataclass(frozen=True)
class Line:
    """A curve with an optional band (low, high per step) and a legend text."""

    series: Series
    label: str
    colour: str = "c1"
    band: tuple[list[float], list[float]] | None = None
    dots: bool = False


def draw_lines(
    axes: Axes,
    theme: Theme,
    lines: Sequence[Line],
    *,
    ylabel: str,
    ylim: tuple[float | None, float | None] = (None, None),
    log: bool = False,
    reference: float | None = None,
    xlabel: str = "step",
) -> None:
    """Curves over the step. More than 600 points are averaged in equal runs of steps (extremes stay extremes)."""
    for line in lines:
        keep = next((keep for suffix, keep in _EXTREMES.items() if line.series.name.endswith(suffix)), fmean)
        steps, values = _thin(line.series.steps), _thin(line.series.values, keep)
        few = line.dots or len(steps) <= 30
        axes.plot(
            steps, values, color=theme[line.colour], label=line.label, marker="o" if few else None, markersize=3.5
        )
        if line.band is not None:
            low, high = (_thin(side) for side in line.band)
            axes.fill_between(steps, low, high, color=theme[line.colour], alpha=0.18, linewidth=0)
    if reference is not None:
        axes.axhline(reference, color=theme["ink"], linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
    if log:
        axes.set_yscale("log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.set_ylim(*ylim)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    if len(lines) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(lines), handlelength=1.4)


def _thin(values: Sequence[float], keep: Callable[[Sequence[float]], float] = fmean) -> list[float]:
    if len(values) <= MAX_POINTS:
        return list(values)
    size = -(-len(values) // MAX_POINTS)
    return [keep(values[i : i + size]) for i in range(0, len(values), size)]


def draw_stacks(axes: Axes, theme: Theme, steps: Sequence[int], stages: Sequence[tuple[str, Sequence[float]]]) -> None:
    """One bar a step, its parts stacked in the order given; long runs are averaged in runs of steps."""
    size = max(1, -(-len(steps) // 60))
    starts = range(0, len(steps), size)
    positions = [steps[i] for i in starts]
    gap = min((b - a for a, b in itertools.pairwise(positions)), default=1)
    floor = [0.0] * len(positions)
    for number, (label, seconds) in enumerate(stages):
        colour = theme["c8" if label == "other" else f"c{number % 7 + 1}"]
        heights = [sum(seconds[i : i + size]) / len(seconds[i : i + size]) for i in starts]
        axes.bar(positions, heights, width=0.86 * gap, bottom=floor, color=colour, label=label)
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axes.set_xlabel("step")
    axes.set_ylabel("seconds per step")
    axes.grid(axis="x", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.0)


def draw_timeline(axes: Axes, theme: Theme, spans: Sequence[Sequence[Any]]) -> None:
    """Spans (lane, name, start, end) as bars, a row for each lane in order of first use, a colour for each name."""
    lanes = list(dict.fromkeys(span[0] for span in spans))
    names = list(dict.fromkeys(span[1] for span in spans))
    for number, name in enumerate(names):
        mine = [span for span in spans if span[1] == name]
        axes.barh(
            [lanes.index(lane) for lane, *_ in mine],
            [end - start for _, _, start, end in mine],
            left=[start for _, _, start, _ in mine],
            height=0.6,
            color=theme[f"c{number % 7 + 1}"],
            label=name,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.0)


def draw_calibration(axes: Axes, theme: Theme, rows: Sequence[dict[str, Any]]) -> None:
    """Mean return over mean prediction, one dot a bin, its area the bin's share; the diagonal is a perfect critic."""
    filled = [row for row in rows if row["n"]]
    total = sum(row["n"] for row in filled)
    low, high = rows[0]["low"], rows[-1]["high"]
    axes.plot([low, high], [low, high], color=theme["ink"], linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
    predicted = [row["mean_value"] for row in filled]
    observed = [row["mean_return"] for row in filled]
    axes.plot(predicted, observed, color=theme["c1"], alpha=0.5)
    areas = [18 + 320 * row["n"] / total for row in filled]
    axes.scatter(predicted, observed, s=areas, color=theme["c1"], zorder=3, linewidths=0)
    axes.set_xlabel("mean prediction in the bin")
    axes.set_ylabel("mean return")
