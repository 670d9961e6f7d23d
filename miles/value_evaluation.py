"""Critic evaluation: mixed-label batches, explained-variance statistics, the gate, the report (formulas A6).

The statistics themselves live in `miles.contracts.value_report`, so that `miles verify` can recompute a report; the
names programs import are these:

    batches = select_mixed_label_batches(dataset, global_batch_size=g, num_batches=n, seed=s)
    stats = combine_rank_stats(reports, expected_dp_size=dp, expected_sample_indices=rows, stats_field=None,
                               expected_active_targets=None)
    aggregate, gate = gate_metrics([stats, ...])       # or mappings that hold "sufficient_stats"
"""

from __future__ import annotations

import math
import os
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME
from miles.contracts.canonical import readable_json_bytes, require_int, sealed, sha256_bytes, sha256_file
from miles.contracts.publish import publish_bytes
from miles.contracts.value_report import (
    CALIBRATION_BINS,
    GATE_CRITERIA,
    POSITION_BINS,
    VALUE_EVAL_REPORT_SCHEMA,
    WEIGHTINGS,
    ValueEvalStats,
    bias_gate,
    calibration_table,
    gate_metrics,
    position_groups,
)

if TYPE_CHECKING:
    from miles.value_pretraining import ValuePretrainDataset, ValuePretrainManifest, ValueSample

__all__ = [
    "VALUE_EVAL_REPORT_SCHEMA",
    "ValueEvalStats",
    "build_batch_report",
    "build_eval_report",
    "build_rank_report",
    "combine_rank_stats",
    "gate_metrics",
    "raise_if_gate_failed",
    "refuse_existing_report",
    "scalar_active_label",
    "select_mixed_label_batches",
    "write_eval_report",
]


WORST_TRAJECTORIES = 10
"""Rows with the largest residual, which a report shows with their tokens."""
WORST_PROMPT_TOKENS, WORST_RESPONSE_TOKENS = 64, 512
"""Of each of them, at most so many tokens: the last."""


def scalar_active_label(sample: ValueSample) -> float:
    """Return the single distinct return among a row's active tokens.

    Raises:
        ValueError: the active returns differ from one another (a discounted row, say).
    """
    labels = {float(target) for target, active in zip(sample.returns, sample.loss_mask, strict=True) if active}
    if len(labels) == 1:
        return labels.pop()
    shown = ", ".join(f"{label:g}" for label in sorted(labels)[:4]) + (", ..." if len(labels) > 4 else "")
    raise ValueError(
        f"sample {sample.sample_id!r} must have one scalar active label to be evaluated, got {len(labels)}: {shown}"
    )


def _scalar_active_labels(dataset: ValuePretrainDataset) -> Iterator[float]:
    """Yield each row's label: from the index of a data set that has one, else by reading every row."""
    known = getattr(dataset, "scalar_active_labels", None)
    for index, label in enumerate(known() if known is not None else (math.nan for _ in range(len(dataset)))):
        yield scalar_active_label(dataset.get(index)) if math.isnan(label) else label


def select_mixed_label_batches(
    dataset: ValuePretrainDataset, *, global_batch_size: int, num_batches: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Choose disjoint batches of row indices that each hold at least two labels (formulas A6.4).

    Two rows of different labels, taken from the two labels with most rows left, are set aside for every batch before
    the other places are filled, so a target variance above zero is a property of the plan.

    Returns:
        `num_batches` tuples of `global_batch_size` row indices; the same for the same data and seed.

    Raises:
        ValueError: a batch of one row, more rows asked for than there are, one label only, or too few rows of all
            but one label.
    """
    require_int(global_batch_size, field="global_batch_size", minimum=1)
    require_int(num_batches, field="num_batches", minimum=1)
    require_int(seed, field="seed")
    if global_batch_size < 2:
        raise ValueError("mixed-label evaluation needs a global_batch_size of at least 2")
    wanted = global_batch_size * num_batches
    if wanted > len(dataset):
        raise ValueError(
            f"critic evaluation requires disjoint rows: {num_batches} batches of {global_batch_size} need {wanted}, "
            f"the split has {len(dataset)}"
        )
    groups: dict[float, array[int]] = {}
    for index, label in enumerate(_scalar_active_labels(dataset)):
        groups.setdefault(label, array("q")).append(index)
    if len(groups) < 2:
        raise ValueError(
            f"critic evaluation needs rows of two distinct labels, the split has only {next(iter(groups)):g}"
        )
    rng = random.Random(seed)
    for label in sorted(groups):
        rng.shuffle(groups[label])
    batches: list[list[int]] = []
    for number in range(num_batches):
        fullest = sorted((label for label in groups if groups[label]), key=lambda label: (-len(groups[label]), label))
        if len(fullest) < 2:
            raise ValueError(
                f"critic evaluation batch {number} of {num_batches} cannot hold two distinct labels: "
                f"only rows labelled {fullest[0]:g} are left"
            )
        batches.append([groups[fullest[0]].pop(), groups[fullest[1]].pop()])
    remaining = array("q", chain.from_iterable(groups.values()))
    rng.shuffle(remaining)
    taken = 0
    for batch in batches:
        batch += remaining[taken : taken + global_batch_size - 2]
        taken += global_batch_size - 2
        rng.shuffle(batch)
    assert len({index for batch in batches for index in batch}) == wanted
    return tuple(tuple(batch) for batch in batches)


def build_rank_report(
    *,
    dp_rank: int,
    sample_indices: Sequence[int],
    values: Sequence[Sequence[float]],
    returns: Sequence[Sequence[float]],
    loss_masks: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Sum one data-parallel rank's predictions into the report of formulas A6.5, exactly.

    Args:
        values: predicted value per response token, one sequence per row (lists, or 1-D arrays on the CPU).
        returns, loss_masks: the same shape; only tokens with a mask of 1 are looked at.

    Returns:
        dp_rank, sample_indices, token_weighted and trajectory_weighted statistics, `sum_tails` (what these lack of
        the exact sums, see `ValueEvalStats`), and `values`: each row's predictions, None where the mask is 0.

    Raises:
        ValueError: an active prediction is not finite, or a row's active returns differ.
    """
    targets: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WEIGHTINGS}
    predictions: list[list[float | None]] = []
    for index, row_values, row_returns, row_mask in zip(sample_indices, values, returns, loss_masks, strict=True):
        rows = zip(row_values, row_returns, row_mask, strict=True)
        active = [(float(v), float(r)) for v, r, m in rows if m]
        if not active:
            raise ValueError(f"sample index {index}: no active target")
        if not all(math.isfinite(v) for v, _ in active):
            raise ValueError(
                f"sample index {index}: the critic predicts a value that is not finite on an active token"
            )
        labels = {r for _, r in active}
        if len(labels) != 1:
            raise ValueError(f"sample index {index}: must have one scalar active label, got {len(labels)}")
        predictions.append([float(v) if m else None for v, m in zip(row_values, row_mask, strict=True)])
        for v, r in active:
            targets["token_weighted"][0].append(v)
            targets["token_weighted"][1].append(r)
        targets["trajectory_weighted"][0].append(_mean_prediction(predictions[-1]))
        targets["trajectory_weighted"][1].append(labels.pop())
    stats = {name: ValueEvalStats.from_values(returns=wanted, values=v) for name, (v, wanted) in targets.items()}
    return {
        "dp_rank": dp_rank,
        "sample_indices": [int(index) for index in sample_indices],
        **{name: asdict(part) for name, part in stats.items()},
        "sum_tails": {name: part.tails() for name, part in stats.items()},
        "values": predictions,
    }


def _mean_prediction(values: Sequence[float | None]) -> float:
    """A row's one prediction: the mean over its active tokens (formulas A6.5)."""
    active = [v for v in values if v is not None]
    return math.fsum(active) / len(active)


def _reports_in_rank_order(
    reports: Sequence[Mapping[str, Any] | None], *, expected_dp_size: int
) -> list[Mapping[str, Any]]:
    present = [report for report in reports if report is not None]
    if len(present) != expected_dp_size:
        raise RuntimeError(f"critic evaluation expected {expected_dp_size} data-parallel reports, got {len(present)}")
    ranks = [report.get("dp_rank") for report in present]
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        raise RuntimeError(f"critic evaluation reports must carry an integer dp_rank, got {ranks!r}")
    ordered = sorted(present, key=lambda report: report["dp_rank"])
    if [report["dp_rank"] for report in ordered] != list(range(expected_dp_size)):
        raise RuntimeError(
            f"critic evaluation must cover data-parallel ranks 0..{expected_dp_size - 1}, got {ranks!r}"
        )
    return ordered


def combine_rank_stats(
    reports: Sequence[Mapping[str, Any] | None],
    expected_dp_size: int,
    expected_sample_indices: Sequence[int],
    stats_field: str | None = None,
    expected_active_targets: int | None = None,
) -> ValueEvalStats:
    """Prove that every rank, row and active target was evaluated exactly once, and sum (formulas A6.2).

    Args:
        reports: one report per rank; None where a rank has none.
        stats_field: key of the statistics in a report; None when the five sums lie in the report itself.

    Raises:
        RuntimeError: ranks, rows or active targets differ from what was expected.
        ValueError: a statistic is malformed.
    """
    ordered = _reports_in_rank_order(reports, expected_dp_size=expected_dp_size)
    covered: Counter[int] = Counter()
    for report in ordered:
        rows = report.get("sample_indices")
        if not isinstance(rows, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in rows):
            raise RuntimeError(
                f"critic evaluation rank {report['dp_rank']}: sample_indices must be a list of integers"
            )
        covered.update(rows)
    expected = Counter(expected_sample_indices)
    if covered != expected:
        missing, extra = sorted((expected - covered).elements()), sorted((covered - expected).elements())
        raise RuntimeError(
            "critic evaluation sample coverage differs from the deterministic batch plan: "
            f"missing {missing[:8]}, unexpected {extra[:8]}"
        )
    total = ValueEvalStats.total(
        [
            ValueEvalStats.from_mapping(report)
            if stats_field is None
            else ValueEvalStats.from_mapping(report.get(stats_field), report.get("sum_tails", {}).get(stats_field))
            for report in ordered
        ]
    )
    if expected_active_targets is not None and total.n != expected_active_targets:
        raise RuntimeError(
            "critic evaluation active-target coverage differs from the dataset: "
            f"expected {expected_active_targets}, got {total.n}"
        )
    return total


@dataclass(frozen=True)
class _Row:
    """One evaluated row: its label, and a prediction per response token (None where the mask is 0)."""

    batch: int
    index: int
    label: float
    values: Sequence[float | None]
    mean: float

    @property
    def residual(self) -> float:
        return self.label - self.mean


class _Binned:
    """Sums of predictions and returns by bin, each rounded once."""

    def __init__(self, bins: int) -> None:
        self._bins: list[tuple[list[float], list[float]]] = [([], []) for _ in range(bins)]

    def add(self, place: int, value: float, label: float) -> None:
        values, labels = self._bins[min(max(place, 0), len(self._bins) - 1)]
        values.append(value)
        labels.append(label)

    def sums(self) -> dict[str, list[Any]]:
        return {
            "n": [len(values) for values, _ in self._bins],
            "value_sum": [math.fsum(values) for values, _ in self._bins],
            "return_sum": [math.fsum(labels) for _, labels in self._bins],
        }


def _add_sums(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[Any]]:
    return {
        "n": [sum(column) for column in zip(*(part["n"] for part in parts), strict=True)],
        "value_sum": [math.fsum(column) for column in zip(*(part["value_sum"] for part in parts), strict=True)],
        "return_sum": [math.fsum(column) for column in zip(*(part["return_sum"] for part in parts), strict=True)],
    }


@dataclass(frozen=True)
class _Detail:
    """What a batch adds to the report beside its entry; made from rows in the order of the plan, never by rank."""

    stats: dict[str, ValueEvalStats]
    calibration: dict[str, dict[str, list[Any]]]
    positions: dict[float, dict[str, list[Any]]]
    worst: list[_Row]


def _detail(rows: Sequence[_Row], *, stats: dict[str, ValueEvalStats], low: float, high: float) -> _Detail:
    calibration = {name: _Binned(CALIBRATION_BINS) for name in WEIGHTINGS}
    positions: dict[float, _Binned] = {}

    def bin_of(value: float) -> int:
        return int((value - low) / (high - low) * CALIBRATION_BINS)

    for row in rows:
        calibration["trajectory_weighted"].add(bin_of(row.mean), row.mean, row.label)
        for value in row.values:
            if value is not None:
                calibration["token_weighted"].add(bin_of(value), value, row.label)
        along = positions.setdefault(row.label, _Binned(POSITION_BINS))
        for place, value in _along(row.values):
            along.add(place, value, row.label)
    return _Detail(
        stats=stats,
        calibration={name: binned.sums() for name, binned in calibration.items()},
        positions={label: binned.sums() for label, binned in sorted(positions.items())},
        worst=_worst(rows),
    )


def _along(values: Sequence[float | None]) -> Iterator[tuple[int, float]]:
    """Yield (part, mean prediction) for each equal part of a response that holds an active token.

    A token that reaches into several parts of a short response counts in each, so that trajectories of all lengths
    are in every part and a curve over the parts compares like with like.
    """
    length = len(values)
    for part in range(POSITION_BINS):
        covered = values[part * length // POSITION_BINS : -(-(part + 1) * length // POSITION_BINS)]
        if any(value is not None for value in covered):
            yield part, _mean_prediction(covered)


def _worst(rows: Sequence[_Row]) -> list[_Row]:
    return sorted(rows, key=lambda row: (-abs(row.residual), row.index))[:WORST_TRAJECTORIES]


def build_batch_report(
    number: int,
    *,
    dataset: ValuePretrainDataset,
    indices: Sequence[int],
    rank_reports: Sequence[Mapping[str, Any] | None],
    dp_size: int,
) -> dict[str, Any]:
    """Combine one batch's rank reports into its entry of the evaluation report.

    Args:
        number: the batch's number, counted from 0.
        indices: the batch's rows.
        rank_reports: what the critic group's `evaluate_critic` returned.

    Raises:
        RuntimeError: coverage of ranks, rows or active targets is not exact.
        ValueError: a statistic is malformed or the batch's explained variance is undefined.
    """
    samples = [dataset.get(index) for index in indices]
    active = sum(sum(sample.loss_mask) for sample in samples)
    labels = [scalar_active_label(sample) for sample in samples]
    stats = {
        name: combine_rank_stats(
            rank_reports,
            expected_dp_size=dp_size,
            expected_sample_indices=indices,
            stats_field=name,
            expected_active_targets=targets,
        )
        for name, targets in (("trajectory_weighted", len(indices)), ("token_weighted", active))
    }
    values: dict[int, list[float | None]] = {}
    for report in _reports_in_rank_order(rank_reports, expected_dp_size=dp_size):
        if "values" not in report:
            raise RuntimeError(
                f"critic evaluation rank {report['dp_rank']} sent no values; "
                "build rank reports with miles.value_evaluation.build_rank_report"
            )
        values |= dict(zip(report["sample_indices"], report["values"], strict=True))
    rows = [
        _Row(number, index, label, values[index], _mean_prediction(values[index]))
        for index, label in zip(indices, labels, strict=True)
    ]
    objective = dataset.objective
    return {
        "batch": number,
        "sample_indices": list(indices),
        "sample_ids": [sample.sample_id for sample in samples],
        "label_counts": {format(label, ".17g"): count for label, count in sorted(Counter(labels).items())},
        "expected_active_targets": active,
        **{name: {"sufficient_stats": asdict(part), "metrics": part.metrics()} for name, part in stats.items()},
        _DETAIL: _detail(rows, stats=stats, low=objective.reward_low, high=objective.reward_high),
    }


_DETAIL = "detail"
"""Key of a batch's entry that does not reach the report as it is."""


def _position_curves(parts: Sequence[Mapping[float, dict[str, list[Any]]]]) -> dict[str, Any]:
    """Mean over trajectories of their prediction in each part of the response, by group of returns."""
    groups = []
    for name, labels in position_groups([label for part in parts for label in part]):
        sums = _add_sums([part[label] for part in parts for label in labels if label in part])
        pairs = zip(sums["n"], sums["value_sum"], strict=True)
        means = [total / n if n else None for n, total in pairs]
        groups.append({"name": name, "labels": labels, "trajectories": sums["n"], "mean_value": means})
    return {"bins": POSITION_BINS, "groups": groups}


def _shown(row: _Row, dataset: ValuePretrainDataset) -> dict[str, Any]:
    """A row as the report shows it: the end of its prompt and of its response, a value per response token."""
    sample = dataset.get(row.index)
    prompt = sample.tokens[: -sample.response_length]
    first = max(0, sample.response_length - WORST_RESPONSE_TOKENS)
    return {
        "batch": row.batch,
        "sample_index": row.index,
        "sample_id": sample.sample_id,
        "label": row.label,
        "mean_value": row.mean,
        "residual": row.residual,
        "response_length": sample.response_length,
        "first_response_token": first,
        "prompt_tokens": list(prompt[-WORST_PROMPT_TOKENS:]),
        "tokens": list(sample.tokens[len(prompt) + first :]),
        "values": list(row.values[first:]),
    }


def build_eval_report(
    *,
    manifest: ValuePretrainManifest,
    dataset: ValuePretrainDataset,
    split: str,
    checkpoint: str | os.PathLike[str],
    contract: Mapping[str, Any],
    contract_sha256: str,
    loaded_iteration: int,
    dp_size: int,
    model_parallel_size: int,
    seed: int,
    global_batch_size: int,
    batches: Sequence[Mapping[str, Any]],
    max_bias: float | None = None,
) -> dict[str, Any]:
    """Assemble the whole evaluation report (formulas A6.6), with our additions and a seal.

    Added are bias, calibration, predictions along the response, the trajectories with the largest residuals (their
    tokens too, so that the report can be drawn without the data), and `sum_tails`, with which the published sums are
    exact.

    Args:
        checkpoint: the critic folder that was evaluated (`--critic-load`).
        batches: entries of `build_batch_report`, in order.
        max_bias: `--value-gate-max-bias`; None leaves bias out of the gate, though not out of the report.
    """
    details: list[_Detail] = [batch[_DETAIL] for batch in batches]
    judged = {name: gate_metrics([detail.stats[name] for detail in details]) for name in WEIGHTINGS}
    aggregates = {name: aggregate for name, (aggregate, _) in judged.items()}
    verdicts = {name: dict(verdict) for name, (_, verdict) in judged.items()}
    metrics = {name: verdict.pop("aggregate_metrics") for name, verdict in verdicts.items()}
    passed = all(verdict["passed"] for verdict in verdicts.values())
    gate: dict[str, Any] = {**verdicts, "criteria": dict(GATE_CRITERIA)}
    if max_bias is not None:
        gate["bias"] = bias_gate(aggregates, max_bias=max_bias)
        gate["criteria"]["maximum_absolute_mean_residual"] = f"<= {float(max_bias):.17g}"
        passed = passed and gate["bias"]["passed"]
    gate["passed"] = passed
    checkpoint = Path(checkpoint).resolve()
    files = checkpoint / f"iter_{loaded_iteration:07d}" / CHECKPOINT_MANIFEST_NAME
    objective = manifest.objective
    calibration = {name: _add_sums([detail.calibration[name] for detail in details]) for name in WEIGHTINGS}
    return sealed(
        {
            "schema": VALUE_EVAL_REPORT_SCHEMA,
            "passed": passed,
            "manifest": {
                "path": str(manifest.path),
                "sha256": manifest.sha256,
                "split": split,
                "dataset_path": str(dataset.spec.path),
                "dataset_sha256": dataset.spec.sha256,
                "dataset_num_samples": len(dataset),
            },
            "checkpoint": {
                "path": str(checkpoint),
                "contract_sha256": contract_sha256,
                "contract_completed_steps": contract["completed_steps"],
                "loaded_iteration": loaded_iteration,
                "checkpoint_manifest_sha256": sha256_file(files) if files.is_file() else None,
            },
            "execution": {
                "forward_only": True,
                "optimizer_initialized": False,
                "optimizer_steps": 0,
                "pure_data_parallel": model_parallel_size == 1,
                "dp_size": dp_size,
            },
            "batch_plan": {
                "seed": seed,
                "global_batch_size": global_batch_size,
                "num_batches": len(batches),
                "disjoint_rows": True,
                "mixed_label_batches": True,
            },
            "batches": [{key: value for key, value in batch.items() if key != _DETAIL} for batch in batches],
            "aggregate": {
                name: {"sufficient_stats": asdict(aggregates[name]), "metrics": metrics[name]} for name in WEIGHTINGS
            },
            "bias": {name: aggregates[name].bias_metrics() for name in WEIGHTINGS},
            "calibration": {
                name: calibration_table(calibration[name], low=objective.reward_low, high=objective.reward_high)
                for name in WEIGHTINGS
            },
            "positions": _position_curves([detail.positions for detail in details]),
            "worst_trajectories": [
                _shown(row, dataset) for row in _worst([row for detail in details for row in detail.worst])
            ],
            "sum_tails": [{name: detail.stats[name].tails() for name in WEIGHTINGS} for detail in details],
            "gate": gate,
        }
    )


def refuse_existing_report(path: str | os.PathLike[str]) -> None:
    """Refuse, before any device is reserved, a report path that is taken or whose folder does not exist."""
    path = Path(path)
    if os.path.lexists(path):
        raise ValueError(f"--value-pretrain-eval-report: {path} already exists and is never replaced; name a new file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--value-pretrain-eval-report: folder does not exist: {path.parent}")


def write_eval_report(path: str | os.PathLike[str], report: Mapping[str, Any]) -> str:
    """Publish a report and return the SHA-256 of its bytes.

    Exclusive temporary file of mode 0600, fsync, hard link: the file is whole, and never replaces an earlier one.

    Raises:
        FileExistsError: `path` exists.
    """
    data = readable_json_bytes(report)
    publish_bytes(path, data, replace=False, mode=0o600)
    return sha256_bytes(data)


def raise_if_gate_failed(report: Mapping[str, Any], *, path: str | os.PathLike[str]) -> None:
    """Raise RuntimeError naming what failed, if the gate failed; call it once the report is on disk."""
    if report["passed"]:
        return
    gate, reasons = report["gate"], []
    for name in WEIGHTINGS:
        words = name.replace("_", "-")
        if not gate[name]["aggregate_ev_positive"]:
            ev = report["aggregate"][name]["metrics"]["explained_variance"]
            reasons.append(f"{words} aggregate explained variance {ev:.6g} is not > 0")
        if not gate[name]["strict_majority_batch_ev_positive"]:
            reasons.append(
                f"{words} explained variance is > 0 in {gate[name]['positive_batches']} of "
                f"{gate[name]['evaluable_batches']} batches, {gate[name]['required_positive_batches']} required"
            )
    if "bias" in gate and not gate["bias"]["passed"]:
        shown = ", ".join(
            f"{name.replace('_', '-')} {bias:.6g}" for name, bias in gate["bias"]["mean_residual"].items()
        )
        reasons.append(f"mean residual ({shown}) exceeds --value-gate-max-bias {gate['bias']['max_bias']:g}")
    raise RuntimeError(f"critic EV gate failed: {'; '.join(reasons)} (report: {path})")
