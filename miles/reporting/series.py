"""What a run folder holds: metric series, resolved settings, facts."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from miles.contracts.canonical import parse_json, read_json

_LINE_KEYS = frozenset({"step", "stage", "time", "timeline"})


@dataclass(frozen=True)
class Series:
    """One metric of one stage: `steps` ascending, `values` finite."""

    name: str
    stage: str
    steps: list[int]
    values: list[float]

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]

    def as_dict(self) -> dict[int, float]:
        """Step -> value."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass
class Metrics:
    """All numeric series of a metrics file.

    `num_not_finite` counts the values left out of a series because they were null, NaN or infinite; `seconds` is the
    time from the first line to the last; `timeline` is the newest step's, (step, [lane, name, start, end] of each
    span).
    """

    points: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    num_not_finite: dict[str, int] = field(default_factory=dict)
    timeline: tuple[int, list[list[Any]]] | None = None
    seconds: float = 0.0
    truncated: bool = False

    def names(self) -> list[str]:
        """Names of the series with at least one finite value, sorted."""
        return sorted({name for (name, _), points in self.points.items() if points})

    def all(self, name: str) -> list[Series]:
        """The series of that name, one per stage that logged it, in stage order."""
        return list(self._select(name))

    def get(self, name: str) -> Series | None:
        """The series of that name; the longest one if several stages logged it."""
        return max(self._select(name), key=lambda series: len(series.steps), default=None)

    def _select(self, name: str) -> Iterator[Series]:
        for (key, stage), points in sorted(self.points.items()):
            if key == name and points:
                steps = sorted(points)
                yield Series(name=name, stage=stage, steps=steps, values=[points[step] for step in steps])


def read_metrics(path: Path) -> Metrics:
    """Read a metrics file. A step logged twice (after a resume) keeps its last value. A name without a slash belongs
    to its stage, "STAGE/NAME", as in TensorBoard.

    A last line without its newline is what a killed run leaves: it is left out and `truncated` is set.

    Raises:
        FileNotFoundError: no such file.
        ValueError: `path:line` of a line that is not a JSON object with an integer step and a stage.
    """
    if not path.is_file():
        raise FileNotFoundError(f"metrics {path}: no such file")
    metrics = Metrics()
    first_time: float | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                metrics.truncated = True
                break
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = parse_json(line, where=where)
            if not isinstance(row, dict) or type(row.get("step")) is not int or not isinstance(row.get("stage"), str):
                raise ValueError(f"{where}: expected an object with an integer 'step' and a string 'stage'")
            time = row.get("time")
            if is_finite(time):
                first_time = time if first_time is None else first_time
                metrics.seconds = max(metrics.seconds, time - first_time)
            if "timeline" in row:
                if not _is_timeline(row["timeline"]):
                    raise ValueError(f"{where}: expected a 'timeline' of [lane, name, start, end] each")
                metrics.timeline = (row["step"], row["timeline"])
            for name, value in row.items():
                if name not in _LINE_KEYS:
                    full_name = name if "/" in name else f"{row['stage']}/{name}"
                    _add_point(metrics, name=full_name, stage=row["stage"], step=row["step"], value=value)
    return metrics


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value out of JSON is a number that a float can hold."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _is_timeline(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(span, list)
        and len(span) == 4
        and all(isinstance(text, str) for text in span[:2])
        and all(map(is_finite, span[2:]))
        for span in value
    )


def _add_point(metrics: Metrics, *, name: str, stage: str, step: int, value: Any) -> None:
    points = metrics.points.setdefault((name, stage), {})
    if is_finite(value):
        points[step] = float(value)
    elif value is None or isinstance(value, (int, float)):
        metrics.num_not_finite[name] = metrics.num_not_finite.get(name, 0) + 1
        points.pop(step, None)


@dataclass(frozen=True)
class Setting:
    """One line of the resolved configuration."""

    group: str
    name: str
    value: str
    source: str


def read_settings(path: Path) -> list[Setting]:
    """Settings of a resolved `config.yaml`: `name: value  # source` lines under `# group` headings; none if absent."""
    if not path.is_file():
        return []
    settings: list[Setting] = []
    group = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#"):
            group = line.lstrip("# ").strip()
        elif ":" in line and not line.startswith((" ", "-")):
            text, _, source = line.rpartition("  # ")
            if not text:
                text, source = line, ""
            name, _, value = text.partition(":")
            settings.append(Setting(group=group, name=name.strip(), value=value.strip(), source=source.strip()))
    return settings


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is no file.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def flatten(value: Any, *, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) pairs of a nested JSON value; lists of scalars become one comma-separated text."""
    if isinstance(value, dict):
        return [
            pair for key, item in value.items() for pair in flatten(item, prefix=f"{prefix}.{key}" if prefix else key)
        ]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [pair for i, item in enumerate(value) for pair in flatten(item, prefix=f"{prefix}[{i}]")]
    if isinstance(value, list):
        return [(prefix, ", ".join(str(item) for item in value))]
    return [(prefix, "" if value is None else str(value))]


def evaluation_report(run_dir: Path, facts: dict[str, Any] | None) -> dict[str, Any] | None:
    """The critic's evaluation report named in `run.json`, if there; a relative path starts at the run folder.

    Raises:
        ValueError: it holds something else than a JSON object.
    """
    used = (facts or {}).get("value_pretraining")
    named = used.get("eval_report_path") if isinstance(used, dict) else None
    return read_json_object(run_dir / named) if isinstance(named, str) else None
