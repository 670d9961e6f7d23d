"""Whatever is done to any file of a chain, `miles verify` says which link broke."""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import canonical_json_bytes, readable_json_bytes, sealed, sha256_file
from miles.contracts.chain import _count_rows, first_broken, unchecked_checkpoints, verify_chain, write_link_record
from miles.contracts.verify_command import ProgressBar, add_arguments, run

# File, relative to the chain's root -> the link that must be named. "link record" files belong to the contract.
OWNERS = (
    ("data/manifest.json", "manifest"),
    ("data/train.jsonl", "train data"),
    ("data/heldout.jsonl", "held-out data"),
    ("data/conversion_report.json", "conversion report"),
    ("critic/value_pretrain_contract.json", "contract"),
    ("critic/value_pretrain_links/", "contract"),
    ("critic/iter_0000004/", "checkpoint"),
    ("eval_report.json", "evaluation report"),
    ("run/run.json", "run"),
    ("run/config.yaml", "run settings"),
    ("run/checkpoints/iter_0000003/", "run checkpoint"),
)
# The checkpoint of step 2 was superseded: no link of the chain speaks of it any more.
SUPERSEDED = "critic/iter_0000002/"


def owner(root: Path, file: Path) -> str | None:
    name = file.relative_to(root).as_posix()
    if name.startswith(SUPERSEDED):
        return None
    return next(link for prefix, link in OWNERS if name.startswith(prefix))


def broken_names(path: Path) -> list[str]:
    return [link.name for link in verify_chain(path) if not link.ok]


def test_verify_whole_chain_holds_from_every_entry(value_chain):
    entries = {
        value_chain.run: 9,
        value_chain.run / "run.json": 9,
        value_chain.report: 7,
        value_chain.critic: 6,
        value_chain.critic / "value_pretrain_contract.json": 6,
        value_chain.data / "manifest.json": 4,
        value_chain.critic / "iter_0000004": 6,
    }
    names = [link.name for link in verify_chain(value_chain.run)]
    assert names == [
        "manifest", "train data", "held-out data", "conversion report", "contract", "checkpoint",
        "evaluation report", "run", "run settings", "run checkpoint",
    ]  # fmt: skip
    for path, count in entries.items():
        links = verify_chain(path)
        assert first_broken(links) is None, (path, first_broken(links))
        assert len(links) == count + (path in (value_chain.run, value_chain.run / "run.json"))


def tamper_matrix(root: Path, files: list[Path], damage) -> dict[str, list[str]]:
    outcome = {}
    for file in files:
        original = file.read_bytes()
        damage(file, original)
        outcome[file.relative_to(root).as_posix()] = broken_names(root / "run")
        file.write_bytes(original)
    assert broken_names(root / "run") == []
    return outcome


def flip(position):
    def damage(file: Path, original: bytes) -> None:
        at = position(len(original))
        file.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip(lambda n: 0), id="flip the first byte"),
        pytest.param(flip(lambda n: n - 1), id="flip the last byte"),
        pytest.param(lambda file, original: file.write_bytes(original[:-1]), id="truncate by one byte"),
        pytest.param(lambda file, original: file.unlink(), id="delete"),
    ],
)
def test_verify_any_file_damaged_names_its_link(value_chain, damage):
    root = value_chain.root
    files = [f for f in value_chain.files() if f.name != "run.json"]
    for name, broken in tamper_matrix(root, files, damage).items():
        expected = owner(root, root / name)
        assert (broken[:1] == [expected]) if expected else broken == [], (name, broken)


def test_verify_small_files_flipped_anywhere_is_caught(value_chain):
    small = [
        value_chain.critic / "value_pretrain_contract.json",
        value_chain.run / "run.json",
        value_chain.critic / "iter_0000004" / "checkpoint_manifest.json",
        *sorted((value_chain.critic / "value_pretrain_links").iterdir()),
    ]
    for file in small:
        original = file.read_bytes()
        for at in range(0, len(original), 97):
            file.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
            broken = broken_names(value_chain.run)
            assert broken, (file, at)
        file.write_bytes(original)


def test_verify_report_alone_flipped_anywhere_is_caught(value_chain):
    original = value_chain.report.read_bytes()
    for at in range(0, len(original), 197):
        value_chain.report.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        try:
            caught = bool(broken_names(value_chain.report))
        except ValueError:
            caught = True
        assert caught, at


def test_verify_run_record_deleted_or_unsealed_is_refused(value_chain):
    record = value_chain.run / "run.json"
    content = json.loads(record.read_bytes())
    del content["seal_sha256"]
    record.write_bytes(readable_json_bytes(content))
    assert first_broken(verify_chain(value_chain.run)).name == "run"
    record.unlink()
    assert first_broken(verify_chain(value_chain.run)).detail == "missing"
    (value_chain.run / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds neither run\.json"):
        verify_chain(value_chain.run)


@pytest.mark.parametrize(
    "changes",
    [{"checkpoints": None}, {"starts": [3]}, {"value_pretraining": {}}, {"checkpoints": [{"path": "x"}]}],
)
def test_verify_run_record_malformed_but_sealed_is_a_broken_link(value_chain, changes):
    record = value_chain.run / "run.json"
    record.write_bytes(readable_json_bytes(sealed({**json.loads(record.read_bytes()), **changes})))
    link = first_broken(verify_chain(value_chain.run))
    assert link.name == "run"
    assert "malformed" in link.detail


def test_verify_two_files_swapped_is_caught(value_chain):
    first, second = sorted((value_chain.critic / "iter_0000004" / "weights").iterdir())
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    link = first_broken(verify_chain(value_chain.run))
    assert link.name == "checkpoint"
    assert str(first) in link.detail
    assert "SHA-256 mismatch" in link.detail


def test_verify_extra_file_in_checkpoint_is_caught(value_chain):
    (value_chain.critic / "iter_0000004" / "weights" / "__2_0.distcp").write_bytes(b"more")
    assert "not listed" in first_broken(verify_chain(value_chain.critic)).detail


def test_verify_older_contract_put_back_is_caught(value_chain):
    contract = value_chain.critic / "value_pretrain_contract.json"
    older = json.loads(contract.read_bytes())
    older["completed_steps"] = 2
    contract.write_bytes(canonical_json_bytes(older))
    for path in (value_chain.critic, value_chain.report, value_chain.run):
        link = first_broken(verify_chain(path))
        assert link.name == "contract"
    assert "no link record" in first_broken(verify_chain(value_chain.critic)).detail
    assert "the run says" in first_broken(verify_chain(value_chain.run)).detail


def test_verify_publication_interrupted_before_the_contract_says_so(value_chain):
    contract = value_chain.critic / "value_pretrain_contract.json"
    newer = json.loads(contract.read_bytes())
    newer["completed_steps"] = 6
    shutil.copytree(value_chain.critic / "iter_0000004", value_chain.critic / "iter_0000006")
    write_link_record(
        value_chain.critic,
        contract=canonical_json_bytes(newer),
        completed_steps=6,
        manifest_path=value_chain.data / "manifest.json",
    )
    link = first_broken(verify_chain(value_chain.critic))
    assert link.name == "contract"
    assert "step 6 was published too" in link.detail


def test_verify_forged_contract_with_other_steps_is_caught(value_chain):
    contract = value_chain.critic / "value_pretrain_contract.json"
    forged = json.loads(contract.read_bytes())
    forged["batch_plan"]["seed"] = 99
    contract.write_bytes(canonical_json_bytes(forged))
    assert "no link record" in first_broken(verify_chain(value_chain.critic)).detail


def test_verify_report_edited_and_resealed_is_caught_by_its_figures(value_chain):
    report = json.loads(value_chain.report.read_bytes())
    report["aggregate"]["token_weighted"]["metrics"]["explained_variance"] = 0.99
    value_chain.report.write_bytes(readable_json_bytes(sealed(report)))
    link = first_broken(verify_chain(value_chain.report))
    assert link.name == "evaluation report"
    assert "aggregate.token_weighted.metrics.explained_variance" in link.detail


def test_verify_report_of_another_split_is_caught(value_chain):
    report = json.loads(value_chain.report.read_bytes())
    report["manifest"]["split"] = "train"
    value_chain.report.write_bytes(readable_json_bytes(sealed(report)))
    assert "dataset_sha256" in first_broken(verify_chain(value_chain.report)).detail


def test_verify_checkpoint_rewritten_with_its_manifest_is_caught(value_chain):
    checkpoint = value_chain.critic / "iter_0000004"
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"other weights")
    write_checkpoint_manifest(checkpoint, iteration=4, role="critic")
    link = first_broken(verify_chain(value_chain.critic))
    assert link.name == "checkpoint"
    assert "the contract's link record says" in link.detail


def test_verify_chain_moved_as_a_whole_still_holds(value_chain, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.move(value_chain.root, moved)
    assert first_broken(verify_chain(moved / "run")) is None
    assert first_broken(verify_chain(moved / "critic")) is None


def test_verify_row_count_differs_from_manifest_is_caught(make_manifest, value_row):
    path = make_manifest([value_row(0), value_row(1)])
    manifest = json.loads(path.read_text())
    manifest["train"]["num_samples"] = 3
    path.write_text(json.dumps(manifest))
    assert "row count mismatch" in first_broken(verify_chain(path)).detail


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([b"x", b" ", b"\n", b"\r", b"\t\n", b"yy\n"]), max_size=30).map(b"".join),
    st.integers(1, 7),
)
def test_rows_counted_in_pieces_of_any_size_equal_lines_that_are_not_blank(data, size):
    with tempfile.NamedTemporaryFile() as file, mock.patch("miles.contracts.chain.CHUNK_BYTES", size):
        file.write(data)
        file.flush()
        assert _count_rows(Path(file.name)) == sum(bool(line.strip()) for line in data.split(b"\n"))


class Bytes:
    """Progress that only counts."""

    def __init__(self) -> None:
        self.total, self.done = -1, 0

    def start(self, total_bytes: int) -> None:
        assert self.done == 0
        self.total = total_bytes

    def __call__(self, count: int) -> None:
        self.done += count


def test_verify_progress_knows_the_bytes_to_hash_before_the_first_is_hashed(value_chain):
    seen = Bytes()
    verify_chain(value_chain.run, progress=seen)
    shards = [f for f in value_chain.files() if f.suffix == ".distcp" and SUPERSEDED.split("/")[1] not in f.parts]
    assert seen.done == seen.total >= sum(f.stat().st_size for f in [*shards, value_chain.data / "train.jsonl"])


def test_progress_bar_shows_share_rate_and_time_left():
    bar = ProgressBar()
    bar.start(400_000_000)
    bar(100_000_000)
    assert bar.line(0.5) == f"  [{'#' * 8}{'.' * 22}]  25% of 400 MB, 200 MB/s, 2 s left"


def interrupt(futures):
    raise KeyboardInterrupt


def write_checkpoint_manifest_of_size(folder: Path) -> None:
    """Make the manifest agree with the files' sizes, which are looked at first, and not with their bytes."""
    path = folder / "checkpoint_manifest.json"
    manifest = json.loads(path.read_bytes())
    for entry in manifest["files"]:
        entry["size"] = (folder / entry["path"]).stat().st_size
    path.write_bytes(canonical_json_bytes(sealed(manifest)))


def test_verify_interrupted_ends_without_hashing_the_rest(value_chain, monkeypatch):
    big = value_chain.critic / "iter_0000002" / "weights" / "__0_0.distcp"
    with big.open("wb") as stream:
        stream.truncate(4 << 30)
    write_checkpoint_manifest_of_size(big.parent.parent)
    monkeypatch.setattr("miles.contracts.artifact.wait", interrupt)
    seen, threads = Bytes(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        verify_chain(value_chain.critic / "iter_0000002", progress=seen)
    while threading.active_count() > threads:
        time.sleep(0.01)
    assert seen.done < seen.total / 2


def command(path: Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(path)]))


def test_verify_command_prints_one_line_per_link_and_exit_codes(value_chain, capsys):
    assert command(value_chain.run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert all(line.startswith("ok ") for line in lines[:-2])
    assert lines[-2] == f"not part of the chain, not checked: {value_chain.critic / 'iter_0000002'}"
    assert lines[-1] == "verified: 10 links hold"
    (value_chain.data / "train.jsonl").write_bytes(b"{}\n")
    assert command(value_chain.run) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"first broken link: train data: {value_chain.data / 'train.jsonl'}: SHA-256 mismatch")
    assert command(value_chain.root / "nothing") == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_verify_checkpoint_of_a_contract_walks_back_to_its_data(value_chain):
    links = verify_chain(value_chain.critic / "iter_0000004")
    assert first_broken(links) is None
    assert {link.name for link in links} >= {"manifest", "train data", "contract", "checkpoint"}
    (alone,) = verify_chain(value_chain.critic / "iter_0000002")
    assert alone.detail.endswith("no contract or run that pins it was checked")


def replace_by(kind: str, path: Path) -> None:
    if kind == "loop":
        path.symlink_to(path.name)
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("loop", os.strerror(errno.ELOOP)), ("named pipe", "is not a regular file"), ("folder", "is a folder")],
)
def test_verify_no_regular_file_in_the_place_of_any_is_a_broken_link(value_chain, kind, reason):
    root = value_chain.root
    for prefix, owner in OWNERS:
        file = next(f for f in value_chain.files() if f.relative_to(root).as_posix().startswith(prefix))
        kept = file.rename(root / "kept")
        replace_by(kind, file)
        broken = first_broken(verify_chain(value_chain.run))
        assert broken.name == owner, prefix
        in_folder = prefix.endswith("/")
        assert in_folder or reason in broken.detail, prefix
        if file.is_dir():
            file.rmdir()
        kept.replace(file)
    assert first_broken(verify_chain(value_chain.run)) is None


@pytest.mark.parametrize("name", ["loop.jsonl", "n" * 300, "file/train.jsonl"])
def test_verify_manifest_of_a_path_that_cannot_be_opened_is_a_broken_link(make_manifest, value_row, name):
    path = make_manifest([value_row(0)])
    (path.parent / "loop.jsonl").symlink_to("loop.jsonl")
    (path.parent / "file").write_bytes(b"")
    content = json.loads(path.read_bytes())
    content["train"]["path"] = name
    path.write_text(json.dumps(content))
    links = verify_chain(path)
    assert [(link.name, link.ok) for link in links] == [("manifest", True), ("train data", False)]


@pytest.mark.parametrize("name", ["loop.json", "n" * 300, "zero\0byte"])
def test_verify_conversion_report_of_a_path_that_cannot_be_opened_is_a_broken_link(value_chain, name):
    manifest = value_chain.data / "manifest.json"
    (value_chain.data / "loop.json").symlink_to("loop.json")
    content = json.loads(manifest.read_bytes())
    content["provenance"]["conversion_report"]["path"] = name
    manifest.write_bytes(readable_json_bytes(content))
    assert first_broken(verify_chain(manifest)).name == "conversion report"


def test_verify_file_without_permission_is_a_broken_link(value_chain, monkeypatch):
    real = Path.open

    def refuse(self, *words, **options):
        if self.name == "train.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *words, **options)

    monkeypatch.setattr(Path, "open", refuse)
    link = first_broken(verify_chain(value_chain.run))
    assert (link.name, link.detail) == ("train data", f"{value_chain.data / 'train.jsonl'}: Permission denied")


@pytest.mark.parametrize("name", ["train.jsonl", "copy.jsonl"])
def test_verify_held_out_rows_that_are_the_train_rows_are_a_broken_link(value_chain, name):
    data, manifest = value_chain.data, value_chain.data / "manifest.json"
    if name == "copy.jsonl":
        shutil.copy(data / "train.jsonl", data / name)
    content = json.loads(manifest.read_bytes())
    content["heldout"] = {**content["train"], "path": name}
    manifest.write_bytes(readable_json_bytes(content))
    link = first_broken(verify_chain(manifest))
    assert link.name == "held-out data"
    assert "the held-out rows are the rows trained on" in link.detail


def test_unchecked_checkpoints_are_superseded_ones_and_those_a_run_never_recorded(value_chain):
    superseded = value_chain.critic / "iter_0000002"
    stray = value_chain.run / "checkpoints" / "iter_0000009"
    other = value_chain.run / "critic" / "iter_0000001"
    for folder in (stray, other):
        shutil.copytree(superseded, folder)
    links = verify_chain(value_chain.run)
    assert first_broken(links) is None
    assert set(unchecked_checkpoints(links)) == {superseded, stray, other}
    assert unchecked_checkpoints(verify_chain(value_chain.critic)) == [superseded]
    assert unchecked_checkpoints(verify_chain(value_chain.data / "manifest.json")) == []


def test_verify_command_says_which_file_it_wants(value_chain, capsys):
    assert command(value_chain.data) == 2
    assert capsys.readouterr().err.endswith(f"; give {value_chain.data / 'manifest.json'} for a data set\n")
    assert command(value_chain.data / "train.jsonl") == 2
    assert capsys.readouterr().err.endswith("a file of rows is checked by what pins it; give its manifest\n")
    loop = value_chain.root / "loop"
    loop.symlink_to("loop")
    assert command(loop) == 2
    assert capsys.readouterr().err == f"miles verify: {loop}: {os.strerror(errno.ELOOP)}\n"


def test_verify_command_path_is_a_device_names_it(capsys):
    assert command(Path("/dev/null")) == 2
    assert capsys.readouterr().err == "miles verify: /dev/null: neither a file nor a folder\n"


def test_verify_command_needs_no_torch_ray_or_megatron(value_chain):
    code = (
        "import sys, argparse; from miles.contracts.verify_command import *; p = argparse.ArgumentParser();"
        "add_arguments(p); rc = run(p.parse_args(sys.argv[1:]));"
        "assert not {'torch', 'ray', 'megatron', 'numpy', 'pydantic'} & set(sys.modules); sys.exit(rc)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(value_chain.run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_describe_contract_digest_is_the_files(value_chain):
    record = json.loads((value_chain.run / "run.json").read_bytes())["value_pretraining"]
    assert record["contract_sha256"] == sha256_file(value_chain.critic / "value_pretrain_contract.json")
    assert record["eval_report_sha256"] == sha256_file(value_chain.report)
