"""Every rule and message of formulas A3, each with `path:line`."""

import hashlib
import json
import math
import os
import pickle

import pytest

from miles.data.value_sample import RowReader
from miles.value_evaluation import select_mixed_label_batches
from miles.value_pretraining import (
    ValuePretrainDataset,
    check_some_token_ids,
    check_token_ids,
    load_value_pretrain_manifest,
)

MSE = {"loss_type": "mse"}


def open_train(manifest_path):
    manifest = load_value_pretrain_manifest(manifest_path)
    return ValuePretrainDataset(manifest.train, manifest.objective)


def repin(manifest_path):
    """Make the manifest speak of the train data as they are now."""
    raw = json.loads(manifest_path.read_text())
    with (manifest_path.parent / raw["train"]["path"]).open("rb") as stream:
        raw["train"]["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    manifest_path.write_text(json.dumps(raw))


def test_dataset_get_returns_the_row_and_build_rollout_batch_its_columns(open_dataset, value_row):
    rows = [value_row(i, label=i / 4, loss_mask=[False, True]) for i in range(4)]
    dataset = open_dataset(rows)
    assert len(dataset) == 4
    sample = dataset.get(2)
    assert sample.sample_id == "sample-2"
    assert sample.tokens == (10, 20, 32, 42)
    assert sample.response_length == 2
    assert sample.returns == (0.5, 0.5)
    assert sample.loss_mask == (0, 1)
    assert [type(x) for x in sample.loss_mask] == [int, int]
    assert dataset.build_rollout_batch((3, 1)) == {
        "tokens": [[10, 20, 33, 43], [10, 20, 31, 41]],
        "response_lengths": [2, 2],
        "returns": [[0.75, 0.75], [0.25, 0.25]],
        "loss_masks": [[0, 1], [0, 1]],
        "sample_indices": [3, 1],
        "sample_ids": ["sample-3", "sample-1"],
    }
    assert dataset.max_tokens == 4
    assert dataset.spec.path.name == "train.jsonl"


def test_dataset_loss_mask_absent_means_all_ones(open_dataset, value_row):
    row = value_row(0)
    del row["loss_mask"]
    assert open_dataset([row]).get(0).loss_mask == (1, 1)


def test_dataset_blank_lines_are_skipped_and_lines_still_counted(open_dataset, value_row, to_jsonl):
    first, second = to_jsonl([value_row(0)]), to_jsonl([value_row(1)])
    dataset = open_dataset(b"\n" + first + b"  \t\n\n" + second.rstrip(b"\n"))
    assert [dataset.get(i).sample_id for i in range(2)] == ["sample-0", "sample-1"]
    with pytest.raises(ValueError, match=r"train\.jsonl:5: duplicate sample_id 'sample-0', first at line 2"):
        open_dataset(b"\n" + first + b"\n\n" + first)


BAD_FIELDS = [
    ({"sample_id": ""}, "sample_id must be a non-empty string"),
    ({"sample_id": 5}, "sample_id must be a non-empty string"),
    ({"tokens": [1]}, "tokens must be a list of at least two non-negative integers"),
    ({"tokens": "abcd"}, "tokens must be a list"),
    ({"tokens": [1, 2, -3, 4]}, "non-negative integers"),
    ({"tokens": [1, 2, True, 4]}, "non-negative integers"),
    ({"tokens": [1, 2, 3.0, 4]}, "non-negative integers"),
    ({"tokens": [1, 2, 3, 2**31]}, "tokens must be at most 2147483647"),
    ({"response_length": 0}, "response_length must be an integer of at least 1"),
    ({"response_length": True}, "response_length must be an integer"),
    ({"response_length": 4}, "must leave at least one prompt token"),
    ({"returns": [0.0]}, "returns must be a list of response_length=2"),
    ({"returns": None}, "returns must be a list"),
    ({"returns": [0.0, True]}, "returns must be finite numbers"),
    ({"returns": [0.0, "1"]}, "returns must be finite numbers"),
    ({"returns": [0.0, 10**400]}, "returns must be finite numbers, got an integer too large"),
    ({"returns": [0.0, 1.1]}, r"classification returns must stay inside \[0\.0, 1\.0\], got 1\.1"),
    ({"returns": [-0.1, 1.0], "loss_mask": [0, 1]}, "classification returns must stay inside"),
    ({"loss_mask": [1]}, "loss_mask must be a list of response_length=2"),
    ({"loss_mask": None}, "loss_mask must be a list"),
    ({"loss_mask": [1, 2]}, "loss_mask values must be 0, 1, false or true"),
    ({"loss_mask": [1, 1.0]}, "loss_mask values must be 0, 1, false or true"),
    ({"loss_mask": [0, 0]}, "must select at least one target token"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS)
def test_dataset_bad_row_is_refused_with_path_and_line(open_dataset, value_row, changes, message):
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{message}"):
        open_dataset([value_row(0), value_row(1, **changes), value_row(2)])


@pytest.mark.parametrize("missing", ["sample_id", "tokens", "response_length", "returns"])
def test_dataset_row_without_a_required_field_is_refused(open_dataset, value_row, missing):
    row = value_row(0)
    del row[missing]
    with pytest.raises(ValueError, match=rf"train\.jsonl:1: {missing} must be"):
        open_dataset([row])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "invalid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"sample_id":"a","sample_id":"b"}', "duplicate key 'sample_id'"),
        (b'{"returns":[NaN]}', "NaN is not valid JSON"),
        (b'{"returns":[Infinity]}', "Infinity is not valid JSON"),
        (b'{"sample_id":"\xe9"}', "not UTF-8: byte 0xe9 at offset 14"),
        (b'{"sample_id":"a"} x', "invalid JSON: Extra data: line 1 column 19"),
        (b"\xef\xbb\xbf{}", "starts with a byte-order mark"),
    ],
)
def test_dataset_line_that_is_no_strict_json_is_refused(open_dataset, value_row, to_jsonl, line, message):
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{message}"):
        open_dataset(to_jsonl([value_row(0)]) + line + b"\n" + to_jsonl([value_row(2)]))


def test_dataset_byte_order_mark_is_refused(open_dataset, value_row, to_jsonl):
    with pytest.raises(ValueError, match=r"train\.jsonl:1: starts with a byte-order mark"):
        open_dataset(b"\xef\xbb\xbf" + to_jsonl([value_row(0)]))


def test_dataset_return_that_overflows_is_refused(open_dataset, value_row, to_jsonl):
    data = to_jsonl([value_row(0)]).replace(b"[0.0, 0.0]", b"[0.0, 1e999]")
    with pytest.raises(ValueError, match="returns must be finite numbers"):
        open_dataset(data, objective=MSE)


def test_dataset_row_longer_than_the_limit_is_refused(open_dataset, value_row, monkeypatch):
    monkeypatch.setattr("miles.data.value_sample.MAX_ROW_BYTES", 200)
    with pytest.raises(ValueError, match=r"train\.jsonl:2: row is longer than 200 bytes"):
        open_dataset([value_row(0), value_row(1, tokens=list(range(300))), value_row(2)])


def test_dataset_line_of_a_hundred_megabytes_is_refused(make_manifest, value_row, to_jsonl):
    path = make_manifest([value_row(0)])
    data = path.parent / "train.jsonl"
    with data.open("ab") as stream:
        stream.truncate(data.stat().st_size + (100 << 20))  # A line of zero bytes, which takes no room on the disk.
        stream.seek(0, os.SEEK_END)
        stream.write(b"\n" + to_jsonl([value_row(1)]))
    repin(path)
    with pytest.raises(ValueError, match=r"train\.jsonl:2: row is longer than 67108864 bytes"):
        open_train(path)


def test_dataset_crlf_is_white_space_as_json_has_it(open_dataset, value_row, to_jsonl):
    data = to_jsonl([value_row(0), value_row(1)]).replace(b"\n", b"\r\n") + b"\r\n"
    dataset = open_dataset(data)
    assert [dataset.get(i).sample_id for i in range(2)] == ["sample-0", "sample-1"]
    with pytest.raises(ValueError, match=r"train\.jsonl:3: duplicate sample_id 'sample-0', first at line 1"):
        open_dataset(data.replace(b"\r\n\r\n", b"\r\n") + to_jsonl([value_row(0)]))


def test_dataset_converted_to_crlf_is_refused_with_a_hint(make_manifest, value_row):
    path = make_manifest([value_row(0), value_row(1)])
    data = path.parent / "train.jsonl"
    data.write_bytes(data.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ValueError, match=r"SHA-256 mismatch for .*, its lines end in CRLF: was it converted\?$"):
        open_train(path)


def test_dataset_of_no_rows_is_refused(make_manifest):
    path = make_manifest(b" \n\n")
    raw = json.loads(path.read_text())
    raw["train"]["num_samples"] = 1
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"row-count mismatch for .*: expected 1, got 0"):
        open_train(path)


def test_dataset_scalar_active_labels_come_from_active_tokens(open_dataset, value_row):
    rows = [value_row(0, 0.25), value_row(1, returns=[0.0, 1.0], loss_mask=[0, 1]), value_row(2, returns=[0, 1])]
    labels = list(open_dataset(rows).scalar_active_labels())
    assert labels[:2] == [0.25, 1.0]
    assert math.isnan(labels[2])


def test_mixed_batches_take_labels_from_the_index_and_read_only_a_row_without_one(
    open_dataset, value_row, monkeypatch
):
    dataset = open_dataset([value_row(i, float(i % 2)) for i in range(8)])
    expected = select_mixed_label_batches(dataset, global_batch_size=2, num_batches=3, seed=5)
    monkeypatch.setattr(dataset, "get", None)
    assert select_mixed_label_batches(dataset, global_batch_size=2, num_batches=3, seed=5) == expected
    assert all({i % 2 for i in batch} == {0, 1} for batch in expected)
    discounted = open_dataset([value_row(0), value_row(1, returns=[0.25, 0.5])])
    with pytest.raises(ValueError, match=r"sample 'sample-1' must have one scalar active label .* got 2: 0.25, 0.5"):
        select_mixed_label_batches(discounted, global_batch_size=2, num_batches=1, seed=5)


def test_dataset_mse_allows_returns_outside_the_range(open_dataset, value_row):
    assert open_dataset([value_row(0, label=-7.5)], objective=MSE).get(0).returns == (-7.5, -7.5)


def test_dataset_file_missing_is_file_not_found(make_manifest, value_row, tmp_path):
    manifest = load_value_pretrain_manifest(make_manifest([value_row(0)]))
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"dataset does not exist: .*train\.jsonl"):
        ValuePretrainDataset(manifest.train, manifest.objective)


def test_dataset_digest_mismatch_wins_over_bad_rows(make_manifest, value_row):
    manifest = load_value_pretrain_manifest(make_manifest([value_row(0)]))
    manifest.train.path.write_bytes(b"{broken\n")
    with pytest.raises(ValueError, match=r"dataset SHA-256 mismatch for .*train\.jsonl: expected [0-9a-f]{64}, got"):
        ValuePretrainDataset(manifest.train, manifest.objective)


@pytest.mark.parametrize("claimed", [1, 3])
def test_dataset_row_count_differs_from_manifest_is_refused(make_manifest, value_row, claimed):
    path = make_manifest([value_row(0), value_row(1)])
    raw = json.loads(path.read_text())
    raw["train"]["num_samples"] = claimed
    path.write_text(json.dumps(raw))
    manifest = load_value_pretrain_manifest(path)
    with pytest.raises(ValueError, match=rf"dataset row-count mismatch for .*: expected {claimed}, got 2"):
        ValuePretrainDataset(manifest.train, manifest.objective)


@pytest.mark.parametrize("index", [True, -1, 2, 1.0, "0"])
def test_dataset_index_outside_is_index_error(open_dataset, value_row, index):
    dataset = open_dataset([value_row(0), value_row(1)])
    with pytest.raises(IndexError):
        dataset.get(index)
    with pytest.raises(IndexError):
        dataset.build_rollout_batch([0, index])


@pytest.mark.parametrize("replace", [False, True])
def test_dataset_changed_while_it_is_read_is_refused(make_manifest, value_row, monkeypatch, replace):
    """Written to in place, or another file put under its name, between the first byte and the last."""
    path = make_manifest([value_row(i) for i in range(3)])
    data = path.parent / "train.jsonl"
    facts = RowReader.facts

    def write_and_read(self, line, **named):
        if replace:
            (path.parent / "other").write_bytes(data.read_bytes())
            os.replace(path.parent / "other", data)
        else:
            with data.open("ab") as stream:
                stream.write(b" ")
        return facts(self, line, **named)

    monkeypatch.setattr(RowReader, "facts", write_and_read)
    with pytest.raises(ValueError, match=r"dataset changed while it was read: .*train\.jsonl"):
        open_train(path)


def test_dataset_changed_after_it_was_opened_is_refused_at_get(open_dataset, value_row):
    dataset = open_dataset([value_row(0), value_row(1)])
    path = dataset.spec.path
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"31", b"39"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert dataset.get(0).tokens == (10, 20, 30, 40)
    with pytest.raises(ValueError, match=r"dataset changed since it was opened: row 1"):
        dataset.get(1)


def test_dataset_pickled_reads_the_same_rows(open_dataset, value_row):
    dataset = open_dataset([value_row(0), value_row(1)])
    assert pickle.loads(pickle.dumps(dataset)).get(1) == dataset.get(1)


def test_token_ids_beyond_the_vocabulary_are_refused_in_the_batch_that_holds_them(open_dataset, value_row):
    rows = [value_row(i) for i in range(600)]
    rows[301]["tokens"][0] = 1000
    dataset = open_dataset(rows)
    # every second row is looked at before the start, and 301 is not among them
    check_some_token_ids(dataset, vocab_size=1000, model="toy")
    check_token_ids(dataset, dataset.build_rollout_batch((300, 302)), vocab_size=1000, model="toy")
    with pytest.raises(ValueError, match=r"train.jsonl:302: sample 'sample-301' has token id 1000, the model toy"):
        check_token_ids(dataset, dataset.build_rollout_batch((300, 301)), vocab_size=1000, model="toy")
    with pytest.raises(ValueError, match=r"train.jsonl:1: sample 'sample-0' has token id"):
        check_some_token_ids(dataset, vocab_size=30, model="toy")
