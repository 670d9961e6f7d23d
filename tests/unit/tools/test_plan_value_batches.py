"""The exact-coverage plan of formulas A11: every row once, the largest sizes that the limits allow."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.contracts.canonical import canonical_json_bytes
from miles.value_pretraining import ValuePretrainDataset, check_parallel_layout, load_value_pretrain_manifest

TOOL = Path(__file__).parents[3] / "tools" / "plan_value_batches.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("plan_value_batches_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize(
    ("rows", "gpus", "limit", "dp", "batch", "steps"),
    [
        # By hand. 89 is prime: the upstream run of 89 traces went one row a step.
        (89, 8, 64, 1, 1, 89),
        (89, 128, 128, 89, 89, 1),
        (96, 8, 64, 8, 48, 2),
        (64, 8, 64, 8, 64, 1),
        (100, 8, 64, 5, 50, 2),
        (100, 8, 7, 5, 5, 20),
        (1, 8, 64, 1, 1, 1),
        (12, 5, 3, 3, 3, 4),
    ],
)
def test_plan_known_answers(rows, gpus, limit, dp, batch, steps):
    plan = tool.plan_value_batches(rows, num_gpus=gpus, max_global_batch_size=limit)
    assert plan["schema"] == "miles.tbench21-value-pretrain-plan.v1"
    assert (plan["data_parallel_size"], plan["global_batch_size"], plan["steps_per_epoch"]) == (dp, batch, steps)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 80), st.integers(1, 4))
def test_plan_covers_every_row_with_the_largest_sizes(rows, gpus, limit, model_parallel):
    arguments = {"num_gpus": gpus, "max_global_batch_size": limit, "model_parallel_size": model_parallel}
    if gpus < model_parallel:
        with pytest.raises(ValueError, match="is less than --model-parallel-size"):
            tool.plan_value_batches(rows, **arguments)
        return
    plan = tool.plan_value_batches(rows, **arguments)
    dp, batch = plan["data_parallel_size"], plan["global_batch_size"]
    assert plan["steps_per_epoch"] * batch == rows
    assert batch % dp == 0
    assert batch <= limit
    assert dp * model_parallel <= gpus
    # Nothing larger would do: every pair, by brute force.
    candidates = [
        (d, g)
        for g in range(1, min(rows, limit) + 1)
        for d in range(1, g + 1)
        if rows % g == 0 and rows % d == 0 and g % d == 0 and d * model_parallel <= gpus
    ]
    assert (dp, batch) == max(candidates)
    assert dp == check_parallel_layout(
        total_devices=dp * model_parallel,
        model_parallel_size=model_parallel,
        global_batch_size=batch,
        micro_batch_size=1,
        use_dynamic_batch_size=False,
    )


def test_plan_of_a_manifest_trains_on_every_row(make_manifest, value_row, tmp_path, capsys):
    manifest_path = make_manifest([value_row(i) for i in range(30)])
    out = tmp_path / "plan.json"
    assert tool.main(["--manifest", str(manifest_path), "--num-gpus", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "30 rows = 1 steps of 30, nothing dropped" in printed
    assert "--global-batch-size 30 --critic-num-gpus-per-node 3" in printed
    assert "1 of 4 devices stay idle" in printed
    data = out.read_bytes()
    plan = json.loads(data)
    assert data == canonical_json_bytes(plan)
    assert out.stat().st_mode & 0o777 == 0o600
    manifest = load_value_pretrain_manifest(manifest_path)
    assert plan["source_manifest_sha256"] == manifest.sha256
    dataset = ValuePretrainDataset(manifest.train, manifest.objective)
    batches = dataset.batch_indices(global_batch_size=plan["global_batch_size"], epochs=1, seed=3)
    assert sorted(row for batch in batches for row in batch) == list(range(30))

    assert tool.main(["--manifest", str(manifest_path), "--num-gpus", "4", "--out", str(out)]) == 1
    assert "never replaced" in capsys.readouterr().err
    assert out.read_bytes() == data


@pytest.mark.parametrize(
    ("gpus", "rows", "reason"),
    [
        (8, 96, "2 of 8 devices stay idle: 2 make no whole copy of 3"),
        (9, 64, "3 of 9 devices stay idle: no larger divisor fits 64 rows in batches of up to 64"),
        (10, 64, "4 of 10 devices stay idle: 1 make no whole copy of 3; no larger divisor fits 64 rows"),
    ],
)
def test_plan_says_why_devices_stay_idle(gpus, rows, reason, capsys):
    assert tool.main(["--num-samples", str(rows), "--num-gpus", str(gpus), "--model-parallel-size", "3"]) == 0
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-samples", "0", "--num-gpus", "4"], "number of rows must be an integer of at least 1"),
        (["--num-samples", "8", "--num-gpus", "0"], "--num-gpus must be an integer of at least 1"),
        (["--num-samples", "8", "--num-gpus", "1", "--model-parallel-size", "2"], "less than --model-parallel-size 2"),
        (["--manifest", "nowhere.json", "--num-gpus", "4"], "nowhere.json"),
        (["--manifest", ".", "--num-gpus", "4"], "manifest is a folder: .; give its manifest.json"),
        (["--num-samples", "8", "--num-gpus", "4", "--out", "nodir/x"], "--out nodir/x: No such file or directory"),
    ],
)
def test_plan_mistake_is_one_line_and_status_1(words, message, capsys):
    assert tool.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan_value_batches: ")
    assert message in line
