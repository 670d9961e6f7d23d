"""Explained-variance statistics, the gate and the evaluation report (formulas A6).

Everything in a report can be recomputed from its sufficient statistics, so an edited figure is found without the
model. `miles.value_evaluation` exports the names that programs import.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, ClassVar

from miles.contracts.canonical import (
    StrictJsonError,
    check_seal,
    parse_strict_json,
    readable_json_bytes,
    require_finite,
    require_int,
    require_sha256,
    require_text,
)

VALUE_EVAL_REPORT_SCHEMA = "miles.value-pretrain-eval.v2"
WEIGHTINGS = ("trajectory_weighted", "token_weighted")
MIN_TARGET_VARIANCE = 1e-8
CALIBRATION_BINS = 10
POSITION_BINS = 20

GATE_CRITERIA = {
    "trajectory_weighted_aggregate_explained_variance": "> 0",
    "trajectory_weighted_positive_batch_explained_variance": "strict majority",
    "token_weighted_aggregate_explained_variance": "> 0",
    "token_weighted_positive_batch_explained_variance": "strict majority",
    "minimum_target_variance_per_batch": "> 1e-8",
}
_SUMS = ("returns_sum", "returns_sq_sum", "residual_sum", "residual_sq_sum")


def _exact_sum(values: Iterable[float]) -> Fraction:
    """Return the sum of float64 numbers without any rounding.

    `math.fsum` rounds the exact sum once; asked again for what is left, it gives the rest, in two or three passes.
    """
    values, total, parts = list(values), Fraction(0), list[float]()
    try:
        while (part := math.fsum(chain(values, (-p for p in parts)))) != 0.0:
            parts.append(part)
            total += Fraction(part)
    except (OverflowError, ValueError):
        raise ValueError("value statistics: a sum is not finite") from None
    return total


def _exact_squares(values: Iterable[float]) -> Iterable[float]:
    """Yield two floats per value whose sum is its square exactly (Dekker's product on Veltkamp's halves)."""
    for x in values:
        square = x * x
        shifted = 134217729.0 * x  # 2^27 + 1
        high = shifted - (shifted - x)
        low = x - high
        yield square
        yield ((high * high - square) + 2.0 * high * low) + low * low


def _variance(*, n: int, total: Fraction, squares: Fraction) -> float:
    """Return E[x^2] - E[x]^2 from sums, in exact arithmetic so that only the sums themselves may be rounded."""
    exact = float((n * squares - total**2) / n**2)
    if exact >= 0.0:
        return exact
    # Rounding of the sum of squares is at most n * 2^-52 of it, hence 2^-52 * squares after division by n.
    if exact > -(1e-12 + 2.0**-52 * float(squares)):
        return 0.0
    raise ValueError(f"sufficient statistics contradict each other: variance {exact} is negative")


@dataclass(frozen=True)
class ValueEvalStats:
    """Additive sufficient statistics over active targets, float64; residual = return - value (formulas A6.1).

    Five float64 fields cannot hold returns far from zero: at 1e4 the square sum alone moves a variance by 1e-8. So
    statistics made from values keep their sums as exact fractions behind the fields, which are those rounded once.
    Sums, and every figure made from them, are then the same in any order and on any layout, with nothing cancelled.
    """

    n: int
    returns_sum: float
    returns_sq_sum: float
    residual_sum: float
    residual_sq_sum: float

    _exact: ClassVar[tuple[Fraction, ...] | None] = None

    @classmethod
    def from_exact(cls, n: int, sums: Sequence[Fraction]) -> ValueEvalStats:
        """Build from exact sums, in the order of the fields."""
        stats = cls(n, *map(float, sums))
        # Not a field: programs compare and serialize five.
        object.__setattr__(stats, "_exact", tuple(sums))
        return stats

    @classmethod
    def from_mapping(cls, raw: object, tails: object = None) -> ValueEvalStats:
        """Build from a mapping with the five fields; other keys are left alone.

        Args:
            tails: what `tails` returned, for exact sums.

        Raises:
            ValueError: `n` is not an int of at least 1, or a sum is not a finite number.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"value statistics must be a mapping, got {type(raw).__name__}")
        n = require_int(raw.get("n"), field="value statistics n", minimum=1)
        sums = [require_finite(raw.get(name), field=f"value statistics {name}") for name in _SUMS]
        if tails is None:
            return cls(n, *sums)
        if not isinstance(tails, Mapping) or set(tails) != set(_SUMS):
            raise ValueError(f"value statistics tails must be lists named {', '.join(_SUMS)}")
        exact = []
        for name, rounded in zip(_SUMS, sums, strict=True):
            rest = [Fraction(require_finite(x, field=f"value statistics tails {name}")) for x in tails[name]]
            exact.append(sum(rest, Fraction(rounded)))
            if float(exact[-1]) != rounded:
                raise ValueError(
                    f"value statistics {name} is {rounded!r}, its exact sum rounds to {float(exact[-1])!r}"
                )
        return cls.from_exact(n, exact)

    @classmethod
    def from_values(cls, *, returns: Sequence[float], values: Sequence[float]) -> ValueEvalStats:
        """Sum over active targets given as equal-length sequences, exactly; a residual is a float64 difference."""
        wanted = [float(r) for r in returns]
        residuals = [r - float(v) for r, v in zip(wanted, values, strict=True)]
        pairs = ((xs, _exact_squares(xs)) for xs in (wanted, residuals))
        return cls.from_exact(len(residuals), [_exact_sum(xs) for pair in pairs for xs in pair])

    @classmethod
    def total(cls, parts: Sequence[ValueEvalStats]) -> ValueEvalStats:
        """Return the sum of `parts`; each sum is rounded once, whatever the order of the parts."""
        columns = zip(*(part.sums() for part in parts), strict=True)
        return cls.from_exact(sum(part.n for part in parts), [sum(column, Fraction(0)) for column in columns])

    def __add__(self, other: ValueEvalStats) -> ValueEvalStats:
        return ValueEvalStats.total((self, other))

    def sums(self) -> tuple[Fraction, ...]:
        """Return the four sums as fractions: exact ones where known, else the fields."""
        return self._exact or tuple(Fraction(getattr(self, name)) for name in _SUMS)

    def tails(self) -> dict[str, list[float]]:
        """Return what the four fields lack of their exact sums, each as floats to add, for `from_mapping`."""
        found: dict[str, list[float]] = {}
        for name, exact in zip(_SUMS, self.sums(), strict=True):
            rest, found[name] = exact - Fraction(getattr(self, name)), []
            while part := float(rest):
                found[name].append(part)
                rest -= Fraction(part)
        return found

    def metrics(self) -> dict[str, float | int]:
        """Return the six figures of A6.1; EV = 1 - Var(residual) / Var(return).

        Raises:
            ValueError: fewer than two targets, or a target variance of at most 1e-8.
        """
        if self.n <= 1:
            raise ValueError("explained variance requires at least two active targets")
        returns_sum, returns_sq_sum, residual_sum, residual_sq_sum = self.sums()
        target_variance = _variance(n=self.n, total=returns_sum, squares=returns_sq_sum)
        residual_variance = _variance(n=self.n, total=residual_sum, squares=residual_sq_sum)
        if target_variance <= MIN_TARGET_VARIANCE:
            raise ValueError(
                "critic evaluation batch has zero target variance; explained variance is undefined "
                f"(variance {target_variance:.3g} over {self.n} targets)"
            )
        return {
            "active_targets": self.n,
            "target_mean": float(returns_sum / self.n),
            "target_variance": target_variance,
            "residual_mean": float(residual_sum / self.n),
            "residual_variance": residual_variance,
            "explained_variance": 1.0 - residual_variance / target_variance,
        }

    def bias_metrics(self) -> dict[str, float]:
        """Return what EV cannot see: mean residual, mean squared error, R^2 = 1 - MSE / Var(return)."""
        _, _, residual_sum, residual_sq_sum = self.sums()
        mean_squared_error = float(residual_sq_sum / self.n)
        return {
            "mean_residual": float(residual_sum / self.n),
            "mean_squared_error": mean_squared_error,
            "r_squared": 1.0 - mean_squared_error / float(self.metrics()["target_variance"]),
        }


def gate_metrics(
    batches: Sequence[Mapping[str, Any] | ValueEvalStats],
) -> tuple[ValueEvalStats, dict[str, Any]]:
    """Sum batches and judge them: aggregate EV above 0 and a strict majority of batches above 0 (formulas A6.3).

    Args:
        batches: statistics, or mappings with `sufficient_stats`. Figures are always recomputed from the statistics.

    Returns:
        The aggregate statistics, and a dict with passed, aggregate_ev_positive, strict_majority_batch_ev_positive,
        positive_batches, evaluable_batches, required_positive_batches and aggregate_metrics.

    Raises:
        ValueError: no batches, or a batch whose explained variance is undefined.
    """
    if not batches:
        raise ValueError("the critic gate requires at least one evaluation batch")
    stats = [
        batch if isinstance(batch, ValueEvalStats) else ValueEvalStats.from_mapping(batch.get("sufficient_stats"))
        for batch in batches
    ]
    aggregate = ValueEvalStats.total(stats)
    aggregate_metrics = aggregate.metrics()
    positive = sum(float(part.metrics()["explained_variance"]) > 0.0 for part in stats)
    aggregate_positive = float(aggregate_metrics["explained_variance"]) > 0.0
    majority = 2 * positive > len(stats)
    return aggregate, {
        "passed": aggregate_positive and majority,
        "aggregate_ev_positive": aggregate_positive,
        "strict_majority_batch_ev_positive": majority,
        "positive_batches": positive,
        "evaluable_batches": len(stats),
        "required_positive_batches": len(stats) // 2 + 1,
        "aggregate_metrics": aggregate_metrics,
    }


def bias_gate(aggregates: Mapping[str, ValueEvalStats], *, max_bias: float) -> dict[str, Any]:
    """Judge |mean residual| <= `max_bias` in every weighting; EV is blind to a constant bias."""
    biases = {name: aggregates[name].bias_metrics()["mean_residual"] for name in WEIGHTINGS}
    return {
        "max_bias": require_finite(max_bias, field="--value-gate-max-bias"),
        "mean_residual": biases,
        "passed": all(abs(bias) <= max_bias for bias in biases.values()),
    }


def calibration_edges(low: float, high: float) -> list[float]:
    """Return the 11 edges of the ten equal bins of predicted value."""
    return [low + (high - low) * i / CALIBRATION_BINS for i in range(CALIBRATION_BINS)] + [high]


def calibration_table(
    sums: Mapping[str, Sequence[float]], *, low: float, high: float
) -> list[dict[str, float | int | None]]:
    """Turn per-bin sums (`n`, `value_sum`, `return_sum`, ten each) into rows; an empty bin has None for its means."""
    edges = calibration_edges(low, high)
    rows: list[dict[str, float | int | None]] = []
    for i, n in enumerate(sums["n"]):
        rows.append(
            {
                "low": edges[i],
                "high": edges[i + 1],
                "n": n,
                "mean_value": sums["value_sum"][i] / n if n else None,
                "mean_return": sums["return_sum"][i] / n if n else None,
            }
        )
    return rows


def position_groups(labels: Sequence[float]) -> list[tuple[str, list[float]]]:
    """Return (name, labels) of the groups whose predictions are followed along the response.

    Up to four labels stand for themselves; more are halved at the middle of their range.
    """
    distinct = sorted(set(labels))
    if len(distinct) <= 4:
        return [(f"return {label:g}", [label]) for label in distinct]
    middle = (distinct[0] + distinct[-1]) / 2
    low, high = [x for x in distinct if x <= middle], [x for x in distinct if x > middle]
    return [(f"return {part[0]:g} to {part[-1]:g}", part) for part in (low, high)]


_REPORT_KEYS = {
    "schema", "passed", "manifest", "checkpoint", "execution", "batch_plan", "batches", "aggregate", "gate"
}  # fmt: skip
_OUR_REPORT_KEYS = {"bias", "calibration", "positions", "seal_sha256", "sum_tails", "worst_trajectories"}


def _same(actual: object, expected: object, *, field: str) -> None:
    if actual != expected:
        raise ValueError(f"report.{field} is {actual!r}, but its sufficient statistics give {expected!r}")


def _close(actual: object, expected: float, *, field: str, rel_tol: float = 1e-9, abs_tol: float = 1e-12) -> None:
    number = require_finite(actual, field=f"report.{field}")
    if not math.isclose(number, expected, rel_tol=rel_tol, abs_tol=abs_tol):
        raise ValueError(f"report.{field} is {actual!r}, but its sufficient statistics give {expected!r}")


def _object(parent: Mapping[str, Any], key: str, *, field: str = "") -> dict[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"report.{field}{key} must be an object")
    return value


def _check_figures(section: Mapping[str, Any], *, field: str, tails: object = None) -> ValueEvalStats:
    figures = _object(section, "metrics", field=f"{field}.")
    try:
        stats = ValueEvalStats.from_mapping(section.get("sufficient_stats"), tails)
        expected = stats.metrics()
    except ValueError as error:
        raise ValueError(f"report.{field}: {error}") from error
    _same(sorted(figures), sorted(expected), field=f"{field}.metrics keys")
    # A report of another program has rounded sums only; a variance made from them is off by what they lost.
    lost = 0.0 if tails is not None else 2.0**-51 * max(stats.returns_sq_sum, stats.residual_sq_sum) / stats.n
    slack = {"target_variance": lost, "residual_variance": lost}
    slack["explained_variance"] = lost / expected["target_variance"] * (2.0 - float(expected["explained_variance"]))
    for name, value in expected.items():
        _close(figures[name], float(value), field=f"{field}.metrics.{name}", abs_tol=1e-12 + slack.get(name, 0.0))
    return stats


def _check_calibration(rows: object, aggregate: ValueEvalStats, *, field: str) -> None:
    if not isinstance(rows, list) or len(rows) != CALIBRATION_BINS:
        raise ValueError(f"report.{field} must be a list of {CALIBRATION_BINS} bins")
    filled = [row for row in rows if row["n"]]
    _same(sum(row["n"] for row in filled), aggregate.n, field=f"{field} targets")
    scale = aggregate.n * (1.0 + abs(aggregate.returns_sum / aggregate.n) + abs(aggregate.residual_sum / aggregate.n))
    for name, expected in (
        ("mean_return", aggregate.returns_sum),
        ("mean_value", aggregate.returns_sum - aggregate.residual_sum),
    ):
        total = math.fsum(row["n"] * row[name] for row in filled)
        _close(total, expected, field=f"{field} {name} total", abs_tol=1e-9 * scale)


def _check_positions(positions: object, rows_of: Mapping[float, int]) -> None:
    if not isinstance(positions, dict) or not isinstance(positions.get("groups"), list):
        raise ValueError("report.positions must be an object with groups")
    labels = [label for group in positions["groups"] for label in group["labels"]]
    _same(sorted(labels), sorted(rows_of), field="positions labels")
    for group in positions["groups"]:
        for name in ("trajectories", "mean_value"):
            _same(len(group[name]), positions.get("bins"), field=f"positions {name} length")
        rows = sum(rows_of[label] for label in group["labels"])
        if not all(0 <= n <= rows for n in group["trajectories"]) or max(group["trajectories"]) == 0:
            raise ValueError(f"report.positions trajectories must be at most the {rows} rows of {group['name']!r}")


def _check_worst(rows: object, owners: Mapping[int, tuple[int, str]]) -> None:
    if not isinstance(rows, list):
        raise ValueError("report.worst_trajectories must be a list")
    for number, row in enumerate(rows):
        where = f"worst_trajectories[{number}]"
        _same((row["batch"], row["sample_id"]), owners.get(row["sample_index"]), field=f"{where} batch, sample_id")
        _close(row["residual"], row["label"] - row["mean_value"], field=f"{where}.residual")
        _same(len(row["values"]), len(row["tokens"]), field=f"{where}.values length")
    sizes = [abs(row["residual"]) for row in rows]
    _same(sizes, sorted(sizes, reverse=True), field="worst_trajectories order")


def parse_report(data: bytes) -> dict[str, Any]:
    """Return the evaluation report of a file's bytes, every figure recomputed.

    Raises:
        ValueError: as `check_report`, or the bytes are not those that a report is written as.
    """
    try:
        report = parse_strict_json(data)
    except StrictJsonError as error:
        raise ValueError(f"invalid JSON: {error}") from error
    try:
        check_report(report)
    except (KeyError, TypeError, AttributeError) as error:
        # A file that someone else wrote or edited may hold any JSON at all.
        raise ValueError(f"malformed report: {type(error).__name__}: {error}") from error
    if readable_json_bytes(report) != data:
        raise ValueError("not the bytes that were written: layout changed")
    return report


def check_report(report: object) -> dict[str, Any]:
    """Recompute every figure of an evaluation report and return it.

    A report of another program may lack our additions (bias, calibration, positions, worst trajectories, exact sums,
    seal); where they are, they are checked.

    Raises:
        ValueError: naming the first field that is missing, malformed or disagrees with the sufficient statistics.
    """
    if not isinstance(report, dict):
        raise ValueError("report must be a JSON object")
    if report.get("schema") != VALUE_EVAL_REPORT_SCHEMA:
        raise ValueError(
            f"not an evaluation report: report.schema must be {VALUE_EVAL_REPORT_SCHEMA!r}, "
            f"got {report.get('schema')!r}"
        )
    missing, unknown = _REPORT_KEYS - set(report), set(report) - _REPORT_KEYS - _OUR_REPORT_KEYS
    if missing or unknown:
        raise ValueError(f"report keys differ from the schema: missing {sorted(missing)}, unknown {sorted(unknown)}")
    if "seal_sha256" in report:
        check_seal(report)
    manifest, checkpoint = _object(report, "manifest"), _object(report, "checkpoint")
    for name in ("sha256", "dataset_sha256"):
        require_sha256(manifest.get(name), field=f"report.manifest.{name}")
    for name in ("path", "split", "dataset_path"):
        require_text(manifest.get(name), field=f"report.manifest.{name}")
    require_text(checkpoint.get("path"), field="report.checkpoint.path")
    require_int(checkpoint.get("contract_completed_steps"), field="report.checkpoint.contract_completed_steps")
    _same(
        checkpoint.get("loaded_iteration"),
        checkpoint["contract_completed_steps"],
        field="checkpoint.loaded_iteration",
    )
    batches = report["batches"]
    if not isinstance(batches, list) or not batches:
        raise ValueError("report.batches must be a non-empty list")
    plan = _object(report, "batch_plan")
    _same(plan.get("num_batches"), len(batches), field="batch_plan.num_batches")
    tails = report.get("sum_tails")
    if tails is not None and (not isinstance(tails, list) or len(tails) != len(batches)):
        raise ValueError("report.sum_tails must be a list with an entry per batch")
    owners: dict[int, tuple[int, str]] = {}
    rows_of: Counter[float] = Counter()
    per_weighting: dict[str, list[ValueEvalStats]] = {name: [] for name in WEIGHTINGS}
    for number, batch in enumerate(batches):
        where = f"batches[{number}]"
        if not isinstance(batch, dict):
            raise ValueError(f"report.{where} must be an object")
        rows = [require_int(i, field=f"report.{where}.sample_indices") for i in batch.get("sample_indices", [])]
        _same(batch.get("batch"), number, field=f"{where}.batch")
        _same(len(rows), plan.get("global_batch_size"), field=f"{where}.sample_indices length")
        _same(len(batch.get("sample_ids", [])), len(rows), field=f"{where}.sample_ids length")
        if len(set(rows)) != len(rows) or owners.keys() & set(rows):
            raise ValueError(f"report.{where}.sample_indices are not disjoint from the batches before")
        owners |= {row: (number, name) for row, name in zip(rows, batch["sample_ids"], strict=True)}
        labels = _object(batch, "label_counts", field=f"{where}.")
        _same(sum(labels.values()), len(rows), field=f"{where}.label_counts total")
        if len(labels) < 2:
            raise ValueError(f"report.{where}.label_counts holds one label only")
        for name in WEIGHTINGS:
            exact = None if tails is None else tails[number].get(name)
            section = _object(batch, name, field=f"{where}.")
            per_weighting[name].append(_check_figures(section, field=f"{where}.{name}", tails=exact))
        trajectory = per_weighting["trajectory_weighted"][-1]
        _same(trajectory.n, len(rows), field=f"{where}.trajectory_weighted n")
        rows_of.update({float(label): count for label, count in labels.items()})
        label_sum = math.fsum(float(label) * count for label, count in labels.items())
        # The trainer of another program may have summed float32 labels.
        _close(label_sum, trajectory.returns_sum, field=f"{where}.label_counts sum", rel_tol=1e-5)
        _same(
            batch.get("expected_active_targets"),
            per_weighting["token_weighted"][-1].n,
            field=f"{where}.expected_active_targets",
        )
    gate = _object(report, "gate")
    aggregates: dict[str, ValueEvalStats] = {}
    for name in WEIGHTINGS:
        total, verdict = gate_metrics(per_weighting[name])
        section = _object(_object(report, "aggregate"), name, field="aggregate.")
        exact = None if tails is None else total.tails()
        stated = _check_figures(section, field=f"aggregate.{name}", tails=exact)
        aggregates[name] = total
        _same(stated.n, total.n, field=f"aggregate.{name}.sufficient_stats.n")
        for key, value in asdict(total).items():
            _close(asdict(stated)[key], float(value), field=f"aggregate.{name}.sufficient_stats.{key}")
        stated_gate = _object(gate, name, field="gate.")
        for key, value in verdict.items():
            if key != "aggregate_metrics":
                _same(stated_gate.get(key), value, field=f"gate.{name}.{key}")
    for name, aggregate in aggregates.items():
        if "bias" in report:
            stated_bias = _object(_object(report, "bias"), name, field="bias.")
            for key, value in aggregate.bias_metrics().items():
                _close(stated_bias.get(key), value, field=f"bias.{name}.{key}")
        if "calibration" in report:
            _check_calibration(report["calibration"].get(name), aggregate, field=f"calibration.{name}")
    if "positions" in report:
        _check_positions(report["positions"], rows_of)
    if "worst_trajectories" in report:
        _check_worst(report["worst_trajectories"], owners)
    passed = all(gate[name]["passed"] for name in WEIGHTINGS)
    if "bias" in gate:
        expected_bias = bias_gate(aggregates, max_bias=_object(gate, "bias", field="gate.").get("max_bias"))  # type: ignore[arg-type]
        _same(gate["bias"].get("passed"), expected_bias["passed"], field="gate.bias.passed")
        passed = passed and expected_bias["passed"]
    _same(gate.get("passed"), passed, field="gate.passed")
    _same(report["passed"], passed, field="passed")
    return report
