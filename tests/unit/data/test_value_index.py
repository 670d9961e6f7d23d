"""The cached index of a value data set: used when it is proven, ignored and made again when it is not."""

import hashlib
import os
import resource

import numpy as np
import pytest

from miles.data import value_index
from miles.value_pretraining import ValuePretrainDataset, load_value_pretrain_manifest

ROWS = 20


@pytest.fixture(autouse=True)
def small_files_are_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(value_index, "CACHE_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def parsed(monkeypatch):
    """A list that grows by one whenever a file is parsed."""
    calls = []
    scan = value_index.scan_file

    def counted(*args, **kwargs):
        calls.append(1)
        return scan(*args, **kwargs)

    monkeypatch.setattr(value_index, "scan_file", counted)
    return calls


@pytest.fixture
def opened(make_manifest, value_row, tmp_path):
    """opened(**manifest changes) -> the train split of twenty rows, opened; the data are written once."""
    path = make_manifest([value_row(i, label=float(i % 2)) for i in range(ROWS)])
    text = path.read_text()

    def open_again(changes=(), file=None):
        for old, new in changes:
            assert old in text
            path.write_text(text.replace(old, new))
        manifest = load_value_pretrain_manifest(file or path)
        return ValuePretrainDataset(manifest.train, manifest.objective)

    return open_again


@pytest.fixture
def cache(tmp_path):
    return tmp_path / ".train.jsonl.value-index"


def test_cache_saves_parsing_and_gives_the_same_data_set(opened, parsed, cache):
    first = opened()
    assert len(parsed) == 1
    assert cache.stat().st_size < 1000 + 24 * ROWS
    second = opened()
    assert len(parsed) == 1
    for name in ("offsets", "digests", "labels"):
        assert np.array_equal(getattr(first._index, name), getattr(second._index, name))
    assert (len(second), second.max_tokens) == (ROWS, first.max_tokens)
    assert [second.get(i) for i in range(ROWS)] == [first.get(i) for i in range(ROWS)]


def test_cache_does_not_save_hashing(opened, parsed, cache, tmp_path):
    opened()
    data = tmp_path / "train.jsonl"
    before = data.stat()
    data.write_bytes(data.read_bytes().replace(b"sample-3", b"sample-X"))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="dataset SHA-256 mismatch for"):
        opened()
    assert len(parsed) == 1


def test_cache_still_checks_the_row_count(opened):
    opened()
    with pytest.raises(ValueError, match=r"row-count mismatch for .*: expected 21, got 20"):
        opened([('"num_samples": 20', '"num_samples": 21')])


def test_cache_with_any_byte_flipped_is_not_trusted(opened, cache):
    """Header, columns and digest: no byte of the file may change unseen."""
    dataset = opened()
    whole = cache.read_bytes()
    binding = value_index._binding(sha256=dataset.spec.sha256, objective=dataset.objective)
    assert value_index._decode(whole, binding) is not None
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        assert value_index._decode(bytes(damaged), binding) is None, place
    for length in range(len(whole)):
        assert value_index._decode(whole[:length], binding) is None, length
    assert value_index._decode(whole + b"\0", binding) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:-40] + b"\0" * 8 + data[-32:],
        lambda data: b"{}\n" + hashlib.sha256(b"{}\n").digest(),
        lambda data: b"[]\n" + hashlib.sha256(b"[]\n").digest(),
        lambda data: b"\xff" + hashlib.sha256(b"\xff").digest(),
    ],
)
def test_cache_spoiled_is_made_again(opened, parsed, cache, spoil):
    opened()
    whole = cache.read_bytes()
    cache.write_bytes(spoil(whole))
    assert len(opened()) == ROWS
    assert len(parsed) == 2
    assert cache.read_bytes() == whole


def test_cache_of_another_file_is_not_trusted(opened, parsed, cache, make_manifest, value_row, tmp_path):
    opened()
    foreign = cache.read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    for name, old, new in (("train.jsonl", "sample-", "simple-"), ("manifest.json", "train", "train")):
        (other / name).write_text((tmp_path / name).read_text().replace(old, new))
    digest = hashlib.sha256((other / "train.jsonl").read_bytes()).hexdigest()
    text = (other / "manifest.json").read_text()
    start = text.index('"sha256": "') + len('"sha256": "')
    (other / "manifest.json").write_text(text[:start] + digest + text[start + 64 :])
    (other / cache.name).write_bytes(foreign)
    assert opened(file=other / "manifest.json").get(3).sample_id == "simple-3"
    assert len(parsed) == 2


@pytest.mark.parametrize(
    "objective", ['{"reward_range": [0, 2]}', '{"loss_type": "mse"}', '{"reward_range": [-1, 1], "num_bins": 7}']
)
def test_cache_of_another_range_of_returns_is_not_trusted(opened, parsed, objective):
    opened()
    opened([('"objective": {}', f'"objective": {objective}')])
    assert len(parsed) == 2


def test_cache_of_an_objective_that_changes_no_rule_is_used(opened, parsed):
    opened()
    opened([('"objective": {}', '"objective": {"num_bins": 11}')])
    assert len(parsed) == 1


def test_cache_of_other_rules_is_not_trusted(opened, parsed, monkeypatch):
    opened()
    monkeypatch.setattr(value_index, "rules_digest", lambda: "0" * 64)
    opened()
    assert len(parsed) == 2


def test_rules_digest_changes_with_the_source_of_the_rules(monkeypatch, tmp_path):
    value_index.rules_digest.cache_clear()
    before = value_index.rules_digest()
    edited = tmp_path / "value_sample.py"
    edited.write_text("# another rule\n")
    monkeypatch.setattr(value_index.value_sample, "__file__", str(edited))
    value_index.rules_digest.cache_clear()
    assert value_index.rules_digest() != before
    value_index.rules_digest.cache_clear()


def test_cache_lies_in_the_users_folder_where_the_data_folder_takes_none(opened, parsed, cache, tmp_path):
    cache.mkdir()  # Stands for a folder that cannot be written; root can write into any.
    dataset = opened()
    mine = tmp_path / "home" / "miles" / "value-index" / dataset.spec.sha256
    assert mine.is_file()
    opened()
    assert len(parsed) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_bad_data_set_is_never_cached(make_manifest, value_row, cache, tmp_path):
    for rows in ([value_row(0), value_row(0)], [value_row(0), value_row(1, returns=[2.0, 0.0])]):
        manifest = load_value_pretrain_manifest(make_manifest(rows))
        with pytest.raises(ValueError, match=r"train\.jsonl:2: "):
            ValuePretrainDataset(manifest.train, manifest.objective)
    assert not cache.exists()
    assert not (tmp_path / "home").exists()


def test_small_file_is_not_cached(opened, cache, monkeypatch):
    monkeypatch.setattr(value_index, "CACHE_FROM_BYTES", 32 << 20)
    opened()
    assert not cache.exists()


def test_cache_on_a_full_disk_is_a_warning_and_leaves_nothing(opened, parsed, cache, tmp_path, caplog):
    # A file size limit fails a write as a full disk does, and needs no privileges.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        dataset = opened()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(dataset) == ROWS
    assert "the value index is not cached" in caplog.text
    assert f"{cache}: File too large" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "manifest.json", "train.jsonl"]
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file()]
