"""Explained-variance statistics, the gate and the evaluation report (formulas A6).

Everything in a report can be recomputed from its sufficient statistics, so an edited figure is found without the
model. `miles.value_evaluation` exports the names that programs import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from miles.contracts.canonical import check_seal, require_finite, require_int, require_sha256, require_text

VALUE_EVAL_REPORT_SCHEMA = "miles.value-pretrain-eval.v2"
WEIGHTINGS = ("trajectory_weighted", "token_weighted")
MIN_TARGET_VARIANCE = 1e-8
CALIBRATION_BINS = 10

GATE_CRITERIA = {
    "trajectory_weighted_aggregate_explained_variance": "> 0",
    "trajectory_weighted_positive_batch_explained_variance": "strict majority",
    "token_weighted_aggregate_explained_variance": "> 0",
    "token_weighted_positive_batch_explained_variance": "strict majority",
    "minimum_target_variance_per_batch": "> 1e-8",
}
_SUMS = ("returns_sum", "returns_sq_sum", "residual_sum", "residual_sq_sum")


def _variance(*, n: int, total: float, squares: float) -> float:
    """Return E[x^2] - E[x]^2 from sums, in exact arithmetic so that only the sums themselves are rounded."""
    exact = (n * Fraction(squares) - Fraction(total) ** 2) / n**2
    variance = float(exact)
    if variance >= 0.0:
        return variance
    # Rounding of the sum of squares is at most n * 2^-52 of it, hence 2^-52 * squares after division by n.
    if variance > -(1e-12 + 2.0**-52 * squares):
        return 0.0
    raise ValueError(f"sufficient statistics contradict each other: variance {variance} is negative")


@dataclass(frozen=True)
class ValueEvalStats:
    """Additive sufficient statistics over active targets, float64; residual = return - value (formulas A6.1)."""

    n: int
    returns_sum: float
    returns_sq_sum: float
    residual_sum: float
    residual_sq_sum: float

    @classmethod
    def from_mapping(cls, raw: object) -> ValueEvalStats:
        """Build from a mapping with the five fields; other keys are left alone.

        Raises:
            ValueError: `n` is not an int of at least 1, or a sum is not a finite number.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"value statistics must be a mapping, got {type(raw).__name__}")
        n = require_int(raw.get("n"), field="value statistics n", minimum=1)
        return cls(n, *(require_finite(raw.get(name), field=f"value statistics {name}") for name in _SUMS))

    @classmethod
    def from_values(cls, *, returns: Sequence[float], values: Sequence[float]) -> ValueEvalStats:
        """Sum over active targets given as equal-length sequences, with exactly rounded float64 sums."""
        residuals = [r - v for r, v in zip(returns, values, strict=True)]
        return cls(
            n=len(residuals),
            returns_sum=math.fsum(returns),
            returns_sq_sum=math.fsum(r * r for r in returns),
            residual_sum=math.fsum(residuals),
            residual_sq_sum=math.fsum(e * e for e in residuals),
        )

    @classmethod
    def total(cls, parts: Sequence[ValueEvalStats]) -> ValueEvalStats:
        """Return the sum of `parts`; each sum is rounded once, whatever the order of the parts."""
        return cls(
            n=sum(part.n for part in parts),
            returns_sum=math.fsum(part.returns_sum for part in parts),
            returns_sq_sum=math.fsum(part.returns_sq_sum for part in parts),
            residual_sum=math.fsum(part.residual_sum for part in parts),
            residual_sq_sum=math.fsum(part.residual_sq_sum for part in parts),
        )

    def __add__(self, other: ValueEvalStats) -> ValueEvalStats:
        return ValueEvalStats.total((self, other))

    def metrics(self) -> dict[str, float | int]:
        """Return the six figures of A6.1; EV = 1 - Var(residual) / Var(return).

        Raises:
            ValueError: fewer than two targets, or a target variance of at most 1e-8.
        """
        if self.n <= 1:
            raise ValueError("explained variance requires at least two active targets")
        target_variance = _variance(n=self.n, total=self.returns_sum, squares=self.returns_sq_sum)
        residual_variance = _variance(n=self.n, total=self.residual_sum, squares=self.residual_sq_sum)
        if target_variance <= MIN_TARGET_VARIANCE:
            raise ValueError(
                "critic evaluation batch has zero target variance; explained variance is undefined "
                f"(variance {target_variance:.3g} over {self.n} targets)"
            )
        return {
            "active_targets": self.n,
            "target_mean": self.returns_sum / self.n,
            "target_variance": target_variance,
            "residual_mean": self.residual_sum / self.n,
            "residual_variance": residual_variance,
            "explained_variance": 1.0 - residual_variance / target_variance,
        }

    def bias_metrics(self) -> dict[str, float]:
        """Return what EV cannot see: mean residual, mean squared error, R^2 = 1 - MSE / Var(return)."""
        mean_squared_error = self.residual_sq_sum / self.n
        return {
            "mean_residual": self.residual_sum / self.n,
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


_REPORT_KEYS = {
    "schema", "passed", "manifest", "checkpoint", "execution", "batch_plan", "batches", "aggregate", "gate"
}  # fmt: skip
_OUR_REPORT_KEYS = {"bias", "calibration", "seal_sha256"}


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


def _check_figures(section: Mapping[str, Any], *, field: str) -> ValueEvalStats:
    figures = _object(section, "metrics", field=f"{field}.")
    try:
        stats = ValueEvalStats.from_mapping(section.get("sufficient_stats"))
        expected = stats.metrics()
    except ValueError as error:
        raise ValueError(f"report.{field}: {error}") from error
    _same(sorted(figures), sorted(expected), field=f"{field}.metrics keys")
    for name, value in expected.items():
        _close(figures[name], float(value), field=f"{field}.metrics.{name}")
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


def check_report(report: object) -> dict[str, Any]:
    """Recompute every figure of an evaluation report and return it.

    A report of another program may lack our additions (bias, calibration, seal); where they are, they are checked.

    Raises:
        ValueError: naming the first field that is missing, malformed or disagrees with the sufficient statistics.
    """
    if not isinstance(report, dict):
        raise ValueError("report must be a JSON object")
    if report.get("schema") != VALUE_EVAL_REPORT_SCHEMA:
        raise ValueError(f"report.schema must be {VALUE_EVAL_REPORT_SCHEMA!r}, got {report.get('schema')!r}")
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
    seen: set[int] = set()
    per_weighting: dict[str, list[ValueEvalStats]] = {name: [] for name in WEIGHTINGS}
    for number, batch in enumerate(batches):
        where = f"batches[{number}]"
        if not isinstance(batch, dict):
            raise ValueError(f"report.{where} must be an object")
        rows = [require_int(i, field=f"report.{where}.sample_indices") for i in batch.get("sample_indices", [])]
        _same(batch.get("batch"), number, field=f"{where}.batch")
        _same(len(rows), plan.get("global_batch_size"), field=f"{where}.sample_indices length")
        _same(len(batch.get("sample_ids", [])), len(rows), field=f"{where}.sample_ids length")
        if len(set(rows)) != len(rows) or seen & set(rows):
            raise ValueError(f"report.{where}.sample_indices are not disjoint from the batches before")
        seen |= set(rows)
        labels = _object(batch, "label_counts", field=f"{where}.")
        _same(sum(labels.values()), len(rows), field=f"{where}.label_counts total")
        if len(labels) < 2:
            raise ValueError(f"report.{where}.label_counts holds one label only")
        for name in WEIGHTINGS:
            per_weighting[name].append(
                _check_figures(_object(batch, name, field=f"{where}."), field=f"{where}.{name}")
            )
        trajectory = per_weighting["trajectory_weighted"][-1]
        _same(trajectory.n, len(rows), field=f"{where}.trajectory_weighted n")
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
        stated = _check_figures(
            _object(_object(report, "aggregate"), name, field="aggregate."), field=f"aggregate.{name}"
        )
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
    passed = all(gate[name]["passed"] for name in WEIGHTINGS)
    if "bias" in gate:
        expected_bias = bias_gate(aggregates, max_bias=_object(gate, "bias", field="gate.").get("max_bias"))  # type: ignore[arg-type]
        _same(gate["bias"].get("passed"), expected_bias["passed"], field="gate.bias.passed")
        passed = passed and expected_bias["passed"]
    _same(gate.get("passed"), passed, field="gate.passed")
    _same(report["passed"], passed, field="passed")
    return report
