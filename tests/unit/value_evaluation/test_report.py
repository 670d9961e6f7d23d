"""The evaluation report: schema of formulas A6.6, our additions, publication, and what a failed gate says."""

import copy
import json
import os

import numpy as np
import pytest

from miles.contracts.canonical import sealed, sha256_bytes
from miles.contracts.value_report import calibration_table, check_report, position_groups
from miles.value_evaluation import (
    _along,
    build_batch_report,
    build_eval_report,
    build_rank_report,
    raise_if_gate_failed,
    refuse_existing_report,
    write_eval_report,
)
from miles.value_pretraining import ValuePretrainDataset, load_value_pretrain_manifest


@pytest.fixture
def evaluate(make_manifest, value_row, tmp_path):
    """evaluate(predict, max_bias=None) -> the report of two batches of four rows, predicted by `predict(label)`."""
    rows = [value_row(i, label=float(i % 2), loss_mask=[1, i % 3 and 1]) for i in range(8)]
    manifest = load_value_pretrain_manifest(make_manifest(rows, heldout=rows))
    assert manifest.heldout is not None
    dataset = ValuePretrainDataset(manifest.heldout, manifest.objective)

    def run(predict, max_bias=None, override=None, dp_size=2):
        batches = []
        for number, indices in enumerate([(0, 1, 2, 3), (7, 6, 5, 4)]):
            rank_reports = []
            share = 4 // dp_size
            for rank in range(dp_size):
                numbers = indices[share * rank : share * (rank + 1)]
                mine = [dataset.get(i) for i in numbers]
                rank_reports.append(
                    build_rank_report(
                        dp_rank=rank,
                        sample_indices=numbers,
                        values=[
                            [(override or {}).get(i, predict(r)) for r in s.returns]
                            for i, s in zip(numbers, mine, strict=True)
                        ],
                        returns=[s.returns for s in mine],
                        loss_masks=[s.loss_mask for s in mine],
                    )
                )
            # Ranks that are not the last pipeline stage report nothing.
            batches.append(
                build_batch_report(
                    number, dataset=dataset, indices=indices, rank_reports=[None, *rank_reports, None], dp_size=dp_size
                )
            )
        return build_eval_report(
            manifest=manifest,
            dataset=dataset,
            split="heldout",
            checkpoint=tmp_path / "critic",
            contract={"completed_steps": 5},
            contract_sha256="c" * 64,
            loaded_iteration=5,
            dp_size=dp_size,
            model_parallel_size=1,
            seed=7,
            global_batch_size=4,
            batches=batches,
            max_bias=max_bias,
        )

    return run


def good(label):
    return 0.25 + 0.5 * label


def test_report_has_the_schema_of_the_reference(evaluate, tmp_path):
    report = evaluate(good)
    assert set(report) == {
        "schema", "passed", "manifest", "checkpoint", "execution", "batch_plan", "batches", "aggregate", "gate",
        "bias", "calibration", "positions", "worst_trajectories", "sum_tails", "seal_sha256",
    }  # fmt: skip
    assert report["schema"] == "miles.value-pretrain-eval.v2"
    assert report["passed"] is True
    assert report["manifest"]["split"] == "heldout"
    assert report["manifest"]["dataset_path"] == str((tmp_path / "heldout.jsonl").resolve())
    assert report["manifest"]["dataset_num_samples"] == 8
    assert report["checkpoint"] == {
        "path": str((tmp_path / "critic").resolve()),
        "contract_sha256": "c" * 64,
        "contract_completed_steps": 5,
        "loaded_iteration": 5,
        "checkpoint_manifest_sha256": None,
    }
    assert report["execution"] == {
        "forward_only": True, "optimizer_initialized": False, "optimizer_steps": 0, "pure_data_parallel": True,
        "dp_size": 2,
    }  # fmt: skip
    assert report["batch_plan"] == {
        "seed": 7, "global_batch_size": 4, "num_batches": 2, "disjoint_rows": True, "mixed_label_batches": True,
    }  # fmt: skip
    first = report["batches"][0]
    assert set(first) == {
        "batch", "sample_indices", "sample_ids", "label_counts", "expected_active_targets", "trajectory_weighted",
        "token_weighted",
    }  # fmt: skip
    assert first["label_counts"] == {"0": 2, "1": 2}
    # Rows 0 and 3 have one active token of two.
    assert first["expected_active_targets"] == first["token_weighted"]["sufficient_stats"]["n"] == 6
    assert first["trajectory_weighted"]["sufficient_stats"]["n"] == 4
    assert set(report["aggregate"]) == {"trajectory_weighted", "token_weighted"}
    assert set(report["gate"]) == {"passed", "trajectory_weighted", "token_weighted", "criteria"}
    assert list(report["gate"]["criteria"].values()).count("> 0") == 2
    assert list(report["gate"]["criteria"].values()).count("strict majority") == 2
    assert report["gate"]["criteria"]["minimum_target_variance_per_batch"] == "> 1e-8"


def test_report_of_any_data_parallel_size_has_the_same_figures_to_the_last_bit(evaluate):
    def ragged(label):
        return 0.1 + 0.7 * label

    reports = [evaluate(ragged, override={1: 1 / 3, 4: 2 / 7}, dp_size=dp) for dp in (1, 2, 4)]
    for report in reports:
        assert report["execution"].pop("dp_size") in (1, 2, 4)
        del report["seal_sha256"]
    assert reports[0] == reports[1] == reports[2]


def test_report_figures_equal_numpy_on_the_same_data(evaluate):
    report = evaluate(good)
    labels = np.array([float(i % 2) for i in range(8)])
    residual = labels - good(labels)
    metrics = report["aggregate"]["trajectory_weighted"]["metrics"]
    assert metrics["explained_variance"] == pytest.approx(1 - residual.var() / labels.var(), abs=1e-15)
    bias = report["bias"]["trajectory_weighted"]
    assert bias["mean_residual"] == pytest.approx(residual.mean(), abs=1e-15)
    assert bias["r_squared"] == pytest.approx(1 - (residual**2).mean() / labels.var(), abs=1e-15)
    filled = {(row["low"], row["n"], row["mean_value"], row["mean_return"])
              for row in report["calibration"]["trajectory_weighted"] if row["n"]}  # fmt: skip
    assert filled == {(0.2, 4, 0.25, 0.0), (0.7, 4, 0.75, 1.0)}


def test_report_positions_follow_predictions_along_the_response_by_return(evaluate):
    curves = evaluate(good)["positions"]
    assert [(group["name"], group["labels"]) for group in curves["groups"]] == [
        ("return 0", [0.0]),
        ("return 1", [1.0]),
    ]
    # Of two tokens each has half of the parts; rows 0 and 6 lack the second, row 3 too.
    for group, value, second in zip(curves["groups"], (0.25, 0.75), (2, 3), strict=True):
        assert group["trajectories"] == [4] * 10 + [second] * 10
        assert group["mean_value"] == [value] * 20


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 40 tokens: two to a part. 3 tokens: parts that a border divides hold both neighbours.
        ([float(i) for i in range(40)], [2 * i + 0.5 for i in range(20)]),
        ([0.0, 1.0, 2.0], [0.0] * 6 + [0.5] + [1.0] * 6 + [1.5] + [2.0] * 6),
        ([None, 1.0], dict.fromkeys(range(10, 20), 1.0)),
    ],
)
def test_positions_are_means_over_equal_parts_of_a_response(values, expected):
    found = dict(_along(values))
    assert found == (dict(enumerate(expected)) if isinstance(expected, list) else expected)


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ([1.0, 0.0, 1.0], [("return 0", [0.0]), ("return 1", [1.0])]),
        ([0.0, 0.1, 0.2, 0.9, 1.0], [("return 0 to 0.2", [0.0, 0.1, 0.2]), ("return 0.9 to 1", [0.9, 1.0])]),
    ],
)
def test_position_groups_are_labels_or_halves_of_their_range(labels, groups):
    assert position_groups(labels) == groups


def test_report_worst_trajectories_come_with_their_tokens_largest_residual_first(evaluate, value_row):
    values = {0: 0.9, 3: 0.05}
    report = evaluate(good, override=values)
    rows = report["worst_trajectories"]
    assert [row["sample_index"] for row in rows[:2]] == [3, 0]
    assert len(rows) == 8
    first = rows[0]
    assert first["sample_id"] == "sample-3"
    assert (first["label"], first["mean_value"], first["residual"]) == (1.0, 0.05, 0.95)
    assert first["prompt_tokens"] + first["tokens"] == value_row(3)["tokens"]
    assert first["values"] == [0.05, None]
    assert (first["response_length"], first["first_response_token"]) == (2, 0)


def test_calibration_table_has_ten_bins_and_none_where_empty():
    table = calibration_table({"n": [2] + [0] * 9, "value_sum": [0.1] + [0] * 9, "return_sum": [1.0] + [0] * 9},
                              low=-1.0, high=1.0)  # fmt: skip
    assert table[0] == {"low": -1.0, "high": -0.8, "n": 2, "mean_value": 0.05, "mean_return": 0.5}
    assert [row["n"] for row in table] == [2] + [0] * 9
    assert table[9] == {"low": pytest.approx(0.8), "high": 1.0, "n": 0, "mean_value": None, "mean_return": None}


def test_report_biased_critic_passes_ev_and_fails_the_bias_gate(evaluate, tmp_path):
    def biased(label):
        return label + 10.0

    blind = evaluate(biased)
    assert blind["passed"] is True
    assert blind["aggregate"]["token_weighted"]["metrics"]["explained_variance"] == 1.0
    assert blind["bias"]["token_weighted"]["r_squared"] < -300
    report = evaluate(biased, max_bias=0.5)
    assert report["passed"] is False
    assert report["gate"]["criteria"]["maximum_absolute_mean_residual"] == "<= 0.5"
    check_report(report)
    with pytest.raises(
        RuntimeError, match=r"mean residual \(trajectory-weighted -10.* exceeds --value-gate-max-bias 0"
    ):
        raise_if_gate_failed(report, path=tmp_path / "r")
    assert evaluate(good, max_bias=0.5)["passed"] is True


def test_report_of_a_useless_critic_fails_and_says_why(evaluate, tmp_path):
    report = evaluate(lambda label: 1.0 - label)
    check_report(report)
    with pytest.raises(RuntimeError, match=r"critic EV gate failed: trajectory-weighted aggregate .* is not > 0"):
        raise_if_gate_failed(report, path=tmp_path / "r")
    with pytest.raises(RuntimeError, match="is > 0 in 0 of 2 batches, 2 required"):
        raise_if_gate_failed(report, path=tmp_path / "r")
    raise_if_gate_failed(evaluate(good), path=tmp_path / "r")


def test_write_report_is_whole_private_and_never_replaced(evaluate, tmp_path):
    report = evaluate(good)
    path = tmp_path / "out" / "report.json"
    path.parent.mkdir()
    digest = write_eval_report(path, report)
    data = path.read_bytes()
    assert digest == sha256_bytes(data)
    assert data == (json.dumps(report, indent=2, sort_keys=True) + "\n").encode()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["report.json"]
    with pytest.raises(FileExistsError, match="never replaced"):
        write_eval_report(path, {**report, "passed": False})
    assert path.read_bytes() == data
    with pytest.raises(ValueError, match="already exists and is never replaced"):
        refuse_existing_report(path)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("schema",), "v1", r"report\.schema must be"),
        (("passed",), False, r"report\.passed is False"),
        (("batches", 0, "token_weighted", "metrics", "explained_variance"), 0.9, r"batches\[0\]\.token_weighted"),
        (("batches", 1, "sample_indices"), [0, 6, 5, 4], r"batches\[1\]\.sample_indices are not disjoint"),
        (("batches", 1, "batch"), 0, r"batches\[1\]\.batch"),
        (("batches", 0, "label_counts"), {"0": 3, "1": 1}, r"batches\[0\]\.label_counts sum"),
        (("batches", 0, "label_counts"), {"0": 4}, "holds one label only"),
        (("batches", 0, "expected_active_targets"), 7, "expected_active_targets"),
        (("batches", 0, "token_weighted", "sufficient_stats", "n"), True, "n must be an integer"),
        (("aggregate", "token_weighted", "sufficient_stats", "residual_sq_sum"), 0.0, r"aggregate\.token_weighted"),
        (("gate", "token_weighted", "positive_batches"), 1, r"gate\.token_weighted\.positive_batches"),
        (("gate", "passed"), False, r"gate\.passed"),
        (("bias", "token_weighted", "r_squared"), 0.1, r"bias\.token_weighted\.r_squared"),
        (("calibration", "token_weighted", 2, "mean_value"), 0.3, r"calibration\.token_weighted mean_value"),
        (("batch_plan", "num_batches"), 3, r"batch_plan\.num_batches"),
        (("positions", "groups", 0, "labels"), [0.5], r"positions labels"),
        (("positions", "groups", 0, "trajectories", 5), 99, r"positions trajectories must be at most the 4 rows"),
        (("worst_trajectories", 0, "residual"), 0.5, r"worst_trajectories\[0\]\.residual"),
        (("worst_trajectories", 0, "sample_id"), "sample-9", r"worst_trajectories\[0\] batch, sample_id"),
        (("sum_tails",), [], r"sum_tails must be a list with an entry per batch"),
        (("sum_tails", 0, "token_weighted", "returns_sum"), [1.0], r"batches\[0\]\.token_weighted: .* returns_sum"),
        (("checkpoint", "loaded_iteration"), 4, r"checkpoint\.loaded_iteration"),
        (("manifest", "sha256"), "x", r"manifest\.sha256 must be a SHA-256"),
        (("extra",), 1, r"unknown \['extra'\]"),
    ],
)
def test_check_report_edited_and_resealed_names_the_field(evaluate, keys, value, message):
    report = copy.deepcopy(evaluate(good))
    check_report(report)
    target = report
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    with pytest.raises(ValueError, match=message):
        check_report(sealed(report))
    with pytest.raises(ValueError, match=r"schema|seal_sha256|unknown"):
        check_report(report)


def test_check_report_of_another_program_without_our_additions_holds(evaluate):
    report = evaluate(good)
    for ours in ("bias", "calibration", "positions", "worst_trajectories", "sum_tails", "seal_sha256"):
        del report[ours]
    del report["checkpoint"]["checkpoint_manifest_sha256"]
    check_report(report)
