"""Rollouts to a value data set: returns, the split by prompt, the account of what was left out, publication."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.contracts.value_schema import ValueObjective
from miles.data.sample import Sample, SampleStatus
from miles.data.value_rows import ConversionOptions, build_value_dataset, monte_carlo_returns, suffix_window
from miles.value_evaluation import select_mixed_label_batches
from miles.value_pretraining import ValuePretrainDataset, load_value_pretrain_manifest

TOOL = Path(__file__).parents[3] / "tools" / "build_value_dataset.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("build_value_dataset_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write_rollouts(tmp_path, to_jsonl):
    def write(rows, name="rollouts.jsonl"):
        path = tmp_path / name
        path.write_bytes(rows if isinstance(rows, bytes) else to_jsonl(rows))
        return path

    return write


@pytest.fixture
def good_rows(rollout_row):
    return [rollout_row(i, prompt=i // 2, reward=float(i % 2)) for i in range(20)]


def build(rollouts, out, objective=None, heldout_rollouts=(), **options):
    return build_value_dataset(
        [rollouts],
        out,
        objective=objective or ValueObjective(),
        options=ConversionOptions(**options),
        heldout_rollouts=heldout_rollouts,
    )


def read(report):
    """Open both splits through the manifest, as training does."""
    manifest = load_value_pretrain_manifest(report["manifest_path"], expected_sha256=report["manifest_sha256"])
    assert manifest.heldout is not None
    return tuple(ValuePretrainDataset(spec, manifest.objective) for spec in (manifest.train, manifest.heldout))


def samples(dataset):
    return [dataset.get(i) for i in range(len(dataset))]


def test_build_rows_open_as_a_value_data_set_held_out_by_prompt(write_rollouts, good_rows, tmp_path):
    report = build(write_rollouts(good_rows), tmp_path / "out", heldout_fraction=0.3)
    train, heldout = read(report)
    assert (len(train), len(heldout)) == (14, 6)
    prompts = [{s.tokens[: -s.response_length] for s in samples(d)} for d in (train, heldout)]
    assert [len(p) for p in prompts] == [7, 3]
    assert not prompts[0] & prompts[1]
    for sample in samples(train) + samples(heldout):
        ordinal, line = map(int, sample.sample_id.split(":"))
        source = good_rows[line - 1]
        assert ordinal == 0
        assert list(sample.tokens) == source["tokens"]
        assert sample.loss_mask == (1, 0, 1)
        assert sample.returns == (source["reward"],) * 3
    assert select_mixed_label_batches(heldout, global_batch_size=2, num_batches=3, seed=0)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "conversion_report.json", "heldout.jsonl", "manifest.json", "train.jsonl",
    ]  # fmt: skip
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_build_reads_what_sample_to_dict_writes(write_rollouts, tmp_path):
    rows = []
    for i in range(4):
        sample = Sample(index=i, group_index=i, rollout_id=0, prompt="p", tokens=[1, 2, 10 + i])
        sample.append_response_tokens([5, 6], log_probs=[-0.5, -0.25])
        sample.append_response_tokens([7], trainable=False)
        sample.reward, sample.status = float(i % 2), SampleStatus.TRUNCATED
        rows.append(sample.to_dict())
    train, heldout = read(build(write_rollouts(rows), tmp_path / "out", heldout_fraction=0.5))
    assert len(train) == len(heldout) == 2
    assert {s.loss_mask for s in samples(train)} == {(1, 1, 0)}


def test_build_same_input_gives_the_same_bytes(write_rollouts, good_rows, tmp_path):
    path = write_rollouts(good_rows)
    first, second = build(path, tmp_path / "a"), build(path, tmp_path / "b")
    assert first["manifest_sha256"] == second["manifest_sha256"]
    assert build(path, tmp_path / "c", seed=9)["manifest_sha256"] != first["manifest_sha256"]


def test_build_split_of_a_prompt_does_not_depend_on_the_order_of_rows(write_rollouts, good_rows, tmp_path):
    def heldout_prompts(report):
        return {s.tokens[:2] for s in samples(read(report)[1])}

    first = build(write_rollouts(good_rows), tmp_path / "a")
    again = build(write_rollouts(good_rows[::-1], "reversed.jsonl"), tmp_path / "b")
    assert heldout_prompts(first) == heldout_prompts(again)


def test_build_manifest_and_report_say_where_the_rows_came_from(write_rollouts, good_rows, tmp_path):
    path = write_rollouts(good_rows)
    built = build(path, tmp_path / "out", gamma=1.0)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    provenance = manifest["provenance"]
    assert (provenance["returns"], provenance["lambda"], provenance["gamma"]) == ("monte_carlo", 1.0, 1.0)
    assert provenance["split_by"] == "prompt_tokens"
    report_bytes = (tmp_path / "out" / "conversion_report.json").read_bytes()
    assert provenance["conversion_report"]["sha256"] == hashlib.sha256(report_bytes).hexdigest()
    report = json.loads(report_bytes)
    assert report["schema"] == "miles.value-pretrain-conversion-report.v1"
    assert report["sources"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report["splits"]["train"]["rewards"] == dict(
        sorted(Counter(format(s.returns[0], ".17g") for s in samples(read(built)[0])).items())
    )


def test_build_account_counts_everything_left_out_and_why(write_rollouts, good_rows, rollout_row, to_jsonl, tmp_path):
    bad = [
        rollout_row(50, prompt=1, reward=None),
        rollout_row(51, prompt=1, reward=None),
        rollout_row(52, prompt=1, reward=1.0, loss_mask=[0, 0, 0]),
        rollout_row(53, prompt=1, reward=1.0, status="aborted"),
        rollout_row(54, prompt=1, reward=None, status="failed"),
        rollout_row(55, prompt=1, reward=None, status="pending"),
        rollout_row(56, prompt=1, reward=1.0, response_length=0, loss_mask=[], rollout_log_probs=[]),
        rollout_row(57, prompt=1, reward=1.0, tokens=[7, 8, 9]),
        rollout_row(58, prompt=1, reward=float("nan")),
        rollout_row(59, prompt=1, reward=float("inf")),
    ]
    path = write_rollouts(to_jsonl(good_rows) + b"\n" + to_jsonl(bad))
    report = build(path, tmp_path / "out")
    assert report["rows_read"] == 30
    assert report["rows_kept"] == 20
    assert report["rows_dropped"] == {
        "reward_missing": 2,
        "reward_not_finite": 2,
        "no_trainable_token": 2,
        "no_prompt_token": 1,
        "status_aborted": 1,
        "status_failed": 1,
        "status_pending": 1,
    }
    assert report["dropped_examples"]["reward_missing"] == [f"{path}:22", f"{path}:23"]
    with pytest.raises(ValueError, match=r"--strict: .*:22: reward_missing \(7 such rows in all\)"):
        build(path, tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()


def test_build_strict_allows_aborted_generation(write_rollouts, good_rows, rollout_row, tmp_path):
    rows = [*good_rows, rollout_row(50, prompt=1, reward=None, status="aborted")]
    assert build(write_rollouts(rows), tmp_path / "out", strict=True)["rows_kept"] == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"returns": [0.1, 0.2, 0.3]}, r":2: carries returns of its own.*lambda-returns"),
        ({"tokens": [1, -2, 3, 4]}, ":2: tokens must be a list of integers"),
        ({"tokens": None}, ":2: tokens must be a list"),
        ({"loss_mask": [1, 1]}, ":2: loss_mask has 2 entries, response_length is 3"),
        ({"loss_mask": [1, 1, 2]}, ":2: loss_mask must be a list of integers between 0 and 1"),
        ({"response_length": True}, ":2: response_length must be an integer"),
        ({"response_length": 9, "loss_mask": [1] * 9}, ":2: response_length 9 exceeds the 5 tokens"),
        ({"reward": "1"}, ":2: reward must be a number"),
        ({"reward": True}, ":2: reward must be a number"),
        ({"status": "done"}, ":2: status must be completed"),
        ({"status": ["failed"]}, ":2: status must be completed"),
        ({"reward": 10**400}, ":2: reward must be a number, got an integer too large for float64"),
        ({"reward": 1.5}, r":2: returns \[1\.5, 1\.5\] leave --value-reward-range \[0, 1\]"),
    ],
)
def test_build_malformed_row_is_refused_with_path_and_line(write_rollouts, good_rows, tmp_path, changes, message):
    good_rows[1] = {**good_rows[1], **changes}
    with pytest.raises(ValueError, match=message):
        build(write_rollouts(good_rows), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["rollouts.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", ":1: invalid JSON"),
        (b'{"a":1,"a":2}', ":1: invalid JSON: duplicate key 'a'"),
        (b'"\xff"', ":1: invalid JSON: not UTF-8"),
        (b"\xef\xbb\xbf{}", ":1: starts with a byte-order mark"),
        (b"[]", ":1: must be a JSON object"),
    ],
)
def test_build_line_that_is_no_json_object_is_refused(write_rollouts, tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        build(write_rollouts(line + b"\n"), tmp_path / "out")


def test_build_given_heldout_rollouts_that_leak_a_prompt_are_refused(write_rollouts, good_rows, rollout_row, tmp_path):
    train = write_rollouts(good_rows)
    fresh = [rollout_row(i, prompt=40 + i, reward=float(i % 2)) for i in range(4)]
    report = build(train, tmp_path / "a", heldout_rollouts=[write_rollouts(fresh, "held.jsonl")])
    assert [len(d) for d in read(report)] == [20, 4]
    # Another group, another sample: only the prompt's tokens are the same.
    leaking = [*fresh, rollout_row(90, prompt=3, reward=1.0, group_index=77)]
    held = write_rollouts(leaking, "leak.jsonl")
    with pytest.raises(ValueError, match=rf"{held}:5: leaking prompt: .* trained on at {train}:8"):
        build(train, tmp_path / "b", heldout_rollouts=[held])
    assert not (tmp_path / "b").exists()


def test_build_one_prompt_cannot_be_split(write_rollouts, rollout_row, tmp_path):
    rows = [rollout_row(i, prompt=1, reward=float(i % 2)) for i in range(6)]
    with pytest.raises(ValueError, match="at least two distinct prompts, the rollouts have 1"):
        build(write_rollouts(rows), tmp_path / "out")


def test_build_balanced_has_as_many_rows_of_each_reward(write_rollouts, rollout_row, tmp_path):
    rows = [rollout_row(i, prompt=i, reward=float(i % 4 == 0)) for i in range(60)]
    report = build(write_rollouts(rows), tmp_path / "out", label_mix="balanced", heldout_fraction=0.5)
    for part in report["splits"].values():
        assert len(set(part["rewards"].values())) == 1
    assert report["rows_dropped"]["label_mix"] == 60 - report["rows_kept"] > 0


def test_build_existing_manifest_or_folder_is_not_overwritten(write_rollouts, good_rows, tmp_path):
    path = write_rollouts(good_rows)
    (tmp_path / "empty").mkdir()
    build(path, tmp_path / "empty")
    before = (tmp_path / "empty" / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"refusing to overwrite an existing manifest: .*empty/manifest\.json"):
        build(path, tmp_path / "empty", seed=8)
    assert (tmp_path / "empty" / "manifest.json").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="folder that is not empty"):
        build(path, tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["notes.txt"]


def test_build_no_rollouts_and_rollouts_named_twice_are_refused(write_rollouts, good_rows, tmp_path):
    with pytest.raises(FileNotFoundError, match="no rollouts: "):
        build(tmp_path / "nowhere", tmp_path / "out")
    path = write_rollouts(good_rows)
    with pytest.raises(ValueError, match="rollouts named twice"):
        build(path, tmp_path / "out", heldout_rollouts=[path])


def test_build_run_folder_takes_its_rollouts_in_order(good_rows, to_jsonl, tmp_path):
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    for part in (1, 0):
        (folder / f"rollout_{part:06d}.jsonl").write_bytes(to_jsonl(good_rows[10 * part : 10 * part + 10]))
    report = build(tmp_path / "run", tmp_path / "out")
    assert [Path(s["path"]).name for s in report["sources"]] == ["rollout_000000.jsonl", "rollout_000001.jsonl"]
    assert report["rows_kept"] == 20


@pytest.mark.parametrize(
    ("reward", "mask", "gamma", "expected"),
    [
        (1.0, [1, 1, 1], 1.0, [1.0, 1.0, 1.0]),
        (1.0, [1, 1, 1], 0.5, [0.25, 0.5, 1.0]),
        # Observations do not discount; the reward falls on the last trainable token, not on the trailing observation.
        (1.0, [1, 0, 1, 0], 0.5, [0.5, 1.0, 1.0, 1.0]),
        (10.0, [1, 1, 0], 0.0, [0.0, 10.0, 10.0]),
        (2.0, [0, 1], 0.5, [2.0, 2.0]),
    ],
)
def test_monte_carlo_returns_by_hand(reward, mask, gamma, expected):
    assert monte_carlo_returns(reward=reward, loss_mask=mask, gamma=gamma) == expected


@settings(max_examples=60, deadline=None)
@given(
    mask=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12).filter(any),
    reward=st.floats(-2, 2),
    gamma=st.floats(0, 1),
)
def test_monte_carlo_returns_equal_gae_with_lambda_one_and_no_values(mask, reward, gamma):
    """On trainable tokens: sum over later trainable tokens of gamma^k r_k, with the reward on the last of them."""
    returns = monte_carlo_returns(reward=reward, loss_mask=mask, gamma=gamma)
    active = [t for t, m in enumerate(mask) if m]
    for position, t in enumerate(active):
        assert returns[t] == pytest.approx(reward * gamma ** (len(active) - 1 - position), rel=1e-12, abs=1e-300)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), prompt=st.integers(1, 6), max_tokens=st.integers(2, 14))
def test_suffix_window_keeps_a_target_a_token_before_it_and_as_much_as_fits(data, prompt, max_tokens):
    mask = data.draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=10).filter(any))
    total = prompt + len(mask)
    start, end = suffix_window(num_tokens=total, response_length=len(mask), loss_mask=mask, max_tokens=max_tokens)
    assert 0 <= start < end <= total
    assert end - start == min(total, max_tokens) or (start == 0 and end <= max_tokens)
    targets = [prompt + t for t, m in enumerate(mask) if m]
    assert any(start < t < end for t in targets)
    if any(total - max_tokens < t for t in targets):
        assert end == total


def test_build_windowed_rows_keep_their_returns_and_masks(write_rollouts, rollout_row, tmp_path):
    rows = [
        rollout_row(
            i,
            prompt=i,
            reward=float(i % 2),
            tokens=[i, *range(100, 120)],
            response_length=20,
            loss_mask=[1] * 10 + [0] * 10,
            rollout_log_probs=[0.0] * 20,
        )
        for i in range(6)
    ]
    report = build(write_rollouts(rows), tmp_path / "out", max_tokens=8, gamma=0.5, objective=None)
    # Of 21 tokens and 10 targets, the last 8 and 7 before the observations.
    train = report["splits"]["train"]
    assert train["windowed"] == train["rows"] == len(read(report)[0])
    assert train["window_dropped"] == {"tokens": 13 * train["rows"], "targets": 3 * train["rows"]}
    for sample in samples(read(report)[0]):
        # The last 8 tokens hold no target, so the window ends after the last one (token 109).
        assert sample.tokens == tuple(range(102, 110))
        assert sample.response_length == 7
        assert sample.loss_mask == (1,) * 7
        reward = sample.returns[-1]
        assert sample.returns == tuple(reward * 0.5**k for k in range(6, -1, -1))


def test_build_balanced_up_to_a_number_per_label_keeps_all_of_a_rare_one(write_rollouts, rollout_row, tmp_path):
    rewards = [0.0] * 20 + [1.0] * 12 + [0.5] * 2
    rows = [rollout_row(i, prompt=i, reward=reward) for i, reward in enumerate(rewards)]
    held = [rollout_row(i, prompt=100 + i, reward=float(i % 2)) for i in range(10)]
    report = build(
        write_rollouts(rows), tmp_path / "out", heldout_rollouts=[write_rollouts(held, "held.jsonl")],
        label_mix="balanced", rows_per_label=(8, 3),
    )  # fmt: skip
    assert report["splits"]["train"]["rewards"] == {"0": 8, "0.5": 2, "1": 8}
    assert report["splits"]["heldout"]["rewards"] == {"0": 3, "1": 3}
    assert report["rows_dropped"] == {"label_mix": 34 - 18 + 4}
    assert report["options"]["rows_per_label"] == [8, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "--gamma must be between 0 and 1"),
        ({"gamma": float("nan")}, "--gamma must be between 0 and 1"),
        ({"heldout_fraction": 0.0}, "--heldout-fraction must be between 0 and 1"),
        ({"heldout_fraction": 1.0}, "--heldout-fraction must be between 0 and 1"),
        ({"label_mix": "even"}, "--label-mix must be natural or balanced"),
        ({"rows_per_label": (4, 4)}, "--rows-per-label needs --label-mix balanced"),
        ({"rows_per_label": (0, 4), "label_mix": "balanced"}, "--rows-per-label must be at least 1"),
        ({"max_tokens": 1}, "--max-tokens must be at least 2"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ConversionOptions(**options)


def test_tool_prints_counts_and_digest_and_refuses_with_one_line(tool, write_rollouts, good_rows, tmp_path, capsys):
    good_rows[3]["reward"] = None
    path = write_rollouts(good_rows)
    arguments = ["--rollouts", str(path), "--out", str(tmp_path / "out"), "--value-num-bins", "11"]
    assert tool.main(arguments) == 0
    out = capsys.readouterr().out
    assert "rollouts read: 20, kept: 19" in out
    assert f"reward_missing  (first: {path}:4)" in out
    manifest = tmp_path / "out" / "manifest.json"
    assert f"manifest sha256: {hashlib.sha256(manifest.read_bytes()).hexdigest()}" in out
    assert load_value_pretrain_manifest(manifest).objective.num_bins == 11
    assert tool.main(arguments) == 1
    error = capsys.readouterr().err
    assert error == f"build_value_dataset: refusing to overwrite an existing manifest: {manifest}\n"


def test_build_copy_of_a_file_under_another_name_is_refused(write_rollouts, good_rows, tmp_path):
    write_rollouts(good_rows)
    write_rollouts(good_rows, "copy.jsonl")
    with pytest.raises(ValueError, match=r"named twice: .*rollouts\.jsonl has the same bytes as .*copy\.jsonl"):
        build(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_build_split_no_gate_can_judge_is_warned_of(tool, write_rollouts, good_rows, rollout_row, tmp_path, capsys):
    assert build(write_rollouts(good_rows), tmp_path / "good")["warnings"] == []
    same = [rollout_row(i, prompt=50 + i, reward=0.5) for i in range(4)]
    held = write_rollouts(same, "heldout.jsonl")
    words = ["--rollouts", str(tmp_path / "rollouts.jsonl"), "--heldout-rollouts", str(held), "--gamma", "0.5"]
    assert tool.main([*words, "--out", str(tmp_path / "out")]) == 0
    warnings = json.loads((tmp_path / "out" / "conversion_report.json").read_bytes())["warnings"]
    # A row of two targets and a reward other than 0 has two returns.
    assert [warning.split(":")[0] for warning in warnings] == [
        "10 rows of the train split have several returns (--gamma below 1)",
        "all 4 rows of the heldout split have the reward 0.5",
        "4 rows of the heldout split have several returns (--gamma below 1)",
    ]
    assert capsys.readouterr().err.splitlines() == [f"build_value_dataset: warning: {told}" for told in warnings]


def test_tool_out_that_cannot_be_a_folder_is_named(tool, write_rollouts, good_rows, tmp_path, capsys):
    path = str(write_rollouts(good_rows))
    assert tool.main(["--rollouts", path, "--out", path]) == 1
    error = capsys.readouterr().err
    assert error == f"build_value_dataset: --out {path}: exists and is not a folder; the data set needs a new one\n"
    for below in ("x", "x/y"):
        assert tool.main(["--rollouts", path, "--out", f"{path}/{below}"]) == 1
        assert capsys.readouterr().err == f"build_value_dataset: --out {path}/{below}: Not a directory\n"


def test_tool_disk_full_is_one_line_and_leaves_nothing(write_rollouts, good_rows, tmp_path):
    path = write_rollouts(good_rows)
    # A file size limit fails a write as a full disk does, and needs no privileges.
    code = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(TOOL), "--rollouts", str(path), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == f"build_value_dataset: --out {tmp_path / 'out'}: File too large\n"
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]


@pytest.mark.parametrize(
    "words", [["--value-num-bins", "5"], ["--value-target-type", "two_hot"], ["--hl-gauss-sigma-ratio", "1"]]
)
def test_setting_of_another_loss_is_refused(tool, words, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--rollouts", "x", "--out", "y", "--value-loss-type", "mse", *words])
    assert f"{words[0]} has no effect with --value-loss-type mse" in capsys.readouterr().err
