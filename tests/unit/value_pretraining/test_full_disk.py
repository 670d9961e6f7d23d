"""A full disk at the contract and at the report: one error that names a file, what stood before still stands."""

import contextlib
import resource

import pytest

from miles.value_evaluation import write_eval_report
from miles.value_pretraining import (
    load_value_pretrain_contract,
    load_value_pretrain_manifest,
    write_value_pretrain_contract,
)


@contextlib.contextmanager
def files_of_at_most(size):
    """A limit on the size of files fails a write as a full disk does, and needs no privileges."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files_below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("room", [0, 200])
def test_contract_on_a_full_disk_leaves_the_earlier_one(make_manifest, value_row, tmp_path, room):
    manifest = load_value_pretrain_manifest(make_manifest([value_row(0)]))
    critic = tmp_path / "critic"

    def write(steps):
        write_value_pretrain_contract(
            critic, manifest=manifest, completed_steps=steps, model_identity="toy", seed=1, global_batch_size=1
        )

    write(3)
    before = files_below(critic)
    with files_of_at_most(room), pytest.raises(OSError, match=r"File too large: .*critic"):
        write(6)
    assert files_below(critic) == before
    assert load_value_pretrain_contract(critic)["completed_steps"] == 3
    write(6)
    assert load_value_pretrain_contract(critic)["completed_steps"] == 6


def test_contract_itself_on_a_full_disk_leaves_the_earlier_one(make_manifest, value_row, tmp_path, monkeypatch):
    manifest = load_value_pretrain_manifest(make_manifest([value_row(0)]))
    write = {"manifest": manifest, "model_identity": "toy", "seed": 1, "global_batch_size": 1}
    write_value_pretrain_contract(tmp_path / "critic", completed_steps=3, **write)
    contract = (tmp_path / "critic" / "value_pretrain_contract.json").read_bytes()
    # The record of the new contract may lie there already, from the save that was broken off.
    monkeypatch.setattr("miles.value_pretraining.write_link_record", lambda *words, **named: None)
    with files_of_at_most(len(contract) - 1), pytest.raises(OSError, match=r"File too large: .*critic"):
        write_value_pretrain_contract(tmp_path / "critic", completed_steps=6, **write)
    assert (tmp_path / "critic" / "value_pretrain_contract.json").read_bytes() == contract
    assert not list(tmp_path.rglob("*.tmp"))


def test_report_on_a_full_disk_is_not_there_and_can_be_written_later(tmp_path):
    path = tmp_path / "report.json"
    report = {"schema": "x", "batches": list(range(1000))}
    with files_of_at_most(500), pytest.raises(OSError, match=r"File too large: .*report\.json"):
        write_eval_report(path, report)
    assert list(tmp_path.iterdir()) == []
    write_eval_report(path, report)
    assert path.is_file()
