"""Every rule and message of formulas A1 and A2."""

import hashlib
import json

import pytest

from miles.value_pretraining import (
    VALUE_PRETRAIN_SCHEMA,
    ValueObjective,
    load_value_pretrain_manifest,
    objective_args,
)

DEFAULT_OBJECTIVE = {
    "loss_type": "classification",
    "num_bins": 51,
    "reward_range": [0.0, 1.0],
    "target_type": "hl_gauss",
    "hl_gauss_sigma_ratio": 0.75,
}


def test_manifest_valid_keeps_path_digest_splits_and_objective(make_manifest, value_row):
    path = make_manifest(
        [value_row(0)], heldout=[value_row(1), value_row(2)], changes={"provenance": {"made": "here"}}
    )
    manifest = load_value_pretrain_manifest(path)
    assert VALUE_PRETRAIN_SCHEMA == "miles.value-pretrain.v1"
    assert manifest.path == path.resolve()
    assert manifest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest.train.path == (path.parent / "train.jsonl").resolve()
    assert manifest.train.num_samples == 1
    assert manifest.heldout is not None
    assert manifest.heldout.sha256 == hashlib.sha256((path.parent / "heldout.jsonl").read_bytes()).hexdigest()
    assert manifest.objective.to_dict() == DEFAULT_OBJECTIVE


@pytest.mark.parametrize("changes", [{}, {"heldout": None}])
def test_manifest_without_heldout_gives_none(make_manifest, value_row, changes):
    assert load_value_pretrain_manifest(make_manifest([value_row(0)], changes=changes)).heldout is None


def test_manifest_missing_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="manifest does not exist"):
        load_value_pretrain_manifest(tmp_path / "manifest.json")


def test_manifest_pin_is_checked_before_the_json(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(b"not json")
    actual = hashlib.sha256(b"not json").hexdigest()
    with pytest.raises(
        ValueError, match=f"value-pretraining manifest SHA-256 mismatch: expected {'0' * 64}, got {actual}"
    ):
        load_value_pretrain_manifest(path, expected_sha256="0" * 64)
    with pytest.raises(ValueError, match="invalid value-pretraining manifest JSON: Expecting value"):
        load_value_pretrain_manifest(path, expected_sha256=actual)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "invalid value-pretraining manifest JSON: not UTF-8"),
        (b"\xef\xbb\xbf{}", "invalid value-pretraining manifest JSON: starts with a byte-order mark"),
        (b'{"schema":1,"schema":2}', "invalid value-pretraining manifest JSON: duplicate key 'schema'"),
        (b'{"schema":NaN}', "invalid value-pretraining manifest JSON: NaN"),
        (b'{"a":{"b":1,"b":2}}', "invalid value-pretraining manifest JSON: duplicate key 'b'"),
        (b'{"a":-Infinity}', "invalid value-pretraining manifest JSON: -Infinity"),
        (b"[]", "manifest must be a JSON object"),
        (b"{}", r"manifest\.schema must be 'miles\.value-pretrain\.v1', got None"),
    ],
)
def test_manifest_not_strict_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_value_pretrain_manifest(path)


def test_manifest_with_crlf_is_json_like_any_other(make_manifest, value_row):
    path = make_manifest([value_row(0)])
    path.write_bytes(json.dumps(json.loads(path.read_bytes()), indent=1).replace("\n", "\r\n").encode())
    assert load_value_pretrain_manifest(path).train.num_samples == 1


def test_manifest_paths_are_absolute_or_relative_to_its_folder(make_manifest, value_row, tmp_path, monkeypatch):
    path = make_manifest([value_row(0)])
    monkeypatch.chdir("/")
    raw = json.loads(path.read_text())
    for stated in ("./x/../train.jsonl", str(tmp_path / "train.jsonl")):
        raw["train"]["path"] = stated
        path.write_text(json.dumps(raw))
        assert load_value_pretrain_manifest(path).train.path == (tmp_path / "train.jsonl").resolve()


SPEC = {"path": "train.jsonl", "sha256": "a" * 64, "num_samples": 1}


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "must be an object"),
        ({**SPEC, "path": ""}, r"\.path must be a non-empty string"),
        ({**SPEC, "path": 3}, r"\.path must be a non-empty string"),
        ({**SPEC, "sha256": "A" * 64}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "sha256": "a" * 63}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "sha256": None}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "sha256": "a" * 65}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "sha256": "g" * 64}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "sha256": "a" * 64 + "\n"}, r"\.sha256 must be a SHA-256"),
        ({**SPEC, "path": "a\0b"}, r"\.path must not hold a zero byte"),
        ({**SPEC, "num_samples": 0}, r"\.num_samples must be an integer of at least 1"),
        ({**SPEC, "num_samples": True}, r"\.num_samples must be an integer"),
        ({**SPEC, "num_samples": 1.0}, r"\.num_samples must be an integer"),
    ],
)
def test_manifest_bad_split_is_refused_naming_the_field(make_manifest, value_row, split, spec, message):
    path = make_manifest([value_row(0)], changes={split: spec})
    with pytest.raises(ValueError, match=f"manifest.{split}.*{message}"):
        load_value_pretrain_manifest(path)


def test_manifest_without_train_is_refused(make_manifest):
    with pytest.raises(ValueError, match=r"manifest\.train must be an object"):
        load_value_pretrain_manifest(make_manifest(None))


def test_manifest_data_through_a_symbolic_link_outside_is_allowed_and_resolved(make_manifest, value_row, tmp_path):
    path = make_manifest([value_row(0)])
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "train.jsonl").rename(outside / "real.jsonl")
    (tmp_path / "train.jsonl").symlink_to(outside / "real.jsonl")
    assert load_value_pretrain_manifest(path).train.path == (outside / "real.jsonl").resolve()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "huber"}, r"objective\.loss_type must be one of mse, classification"),
        ({"num_bins": 1}, r"objective\.num_bins must be an integer of at least 2"),
        ({"num_bins": 0, "loss_type": "mse"}, r"objective\.num_bins must be an integer of at least 1"),
        ({"num_bins": True}, r"objective\.num_bins must be an integer"),
        ({"num_bins": 51.0}, r"objective\.num_bins must be an integer"),
        ({"reward_range": [0.0]}, r"objective\.reward_range must be a list of two"),
        ({"reward_range": "01"}, r"objective\.reward_range must be a list of two"),
        ({"reward_range": [False, 1.0]}, r"objective\.reward_range\[0\] must be a finite number"),
        ({"reward_range": [0.0, None]}, r"objective\.reward_range\[1\] must be a finite number"),
        ({"reward_range": [0.0, 0.5, 1.0]}, r"objective\.reward_range must be a list of two"),
        ({"reward_range": [0, 10**400]}, r"objective\.reward_range\[1\] must be a finite number"),
        ({"hl_gauss_sigma_ratio": True}, r"objective\.hl_gauss_sigma_ratio must be a finite number"),
        ({"reward_range": [1.0, 1.0]}, "LOW < HIGH"),
        ({"reward_range": [2, 1]}, "LOW < HIGH"),
        ({"target_type": "one_hot"}, r"objective\.target_type must be one of two_hot, hl_gauss"),
        ({"hl_gauss_sigma_ratio": 0}, r"objective\.hl_gauss_sigma_ratio must be above 0"),
        ({"hl_gauss_sigma_ratio": "x"}, r"objective\.hl_gauss_sigma_ratio must be a finite number"),
        ({"sigma": 1}, "objective has unknown keys 'sigma'"),
    ],
)
def test_objective_bad_field_is_refused(make_manifest, value_row, changes, message):
    with pytest.raises(ValueError, match=message):
        load_value_pretrain_manifest(make_manifest([value_row(0)], objective=changes))


def test_objective_missing_is_refused(make_manifest, value_row):
    path = make_manifest([value_row(0)])
    raw = json.loads(path.read_text())
    del raw["objective"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="objective must be an object"):
        load_value_pretrain_manifest(path)


def test_objective_round_trip_emits_exactly_five_keys_with_floats():
    raw = {"loss_type": "mse", "num_bins": 1, "reward_range": [-1, 2], "target_type": "two_hot"}
    objective = ValueObjective.from_dict(raw)
    expected = {**raw, "reward_range": [-1.0, 2.0], "hl_gauss_sigma_ratio": 0.75}
    assert objective.to_dict() == expected
    assert [type(x) for x in objective.to_dict()["reward_range"]] == [float, float]
    assert ValueObjective.from_dict(objective.to_dict()) == objective
    assert objective_args(objective) == {
        "value_loss_type": "mse",
        "value_num_bins": 1,
        "value_reward_range": [-1.0, 2.0],
        "value_target_type": "two_hot",
        "hl_gauss_sigma_ratio": 0.75,
    }
