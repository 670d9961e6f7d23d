"""The report that opens online training: passed, on held-out rows, of this very critic."""

import json

import pytest

from miles.contracts.canonical import readable_json_bytes, sealed
from miles.value_pretraining import check_passed_report, contract_sha256


def edited(chain, edit) -> str:
    """Path of the chain's report after `edit`, sealed again."""
    report = json.loads(chain.report.read_text())
    report.pop("seal_sha256")
    edit(report)
    path = chain.root / "edited.json"
    path.write_bytes(readable_json_bytes(sealed(report)))
    return str(path)


def test_passed_report_of_the_critic_is_accepted(value_chain):
    check_passed_report(str(value_chain.report), contract_digest=contract_sha256(value_chain.critic))


def test_passed_report_on_the_rows_that_were_trained_on_is_refused(value_chain):
    path = edited(value_chain, lambda report: report["manifest"].update(split="train"))
    with pytest.raises(ValueError, match="speaks of the train split, a critic passes its gate on held-out rows"):
        check_passed_report(path, contract_digest=contract_sha256(value_chain.critic))


def test_passed_report_of_another_critic_is_refused(value_chain):
    with pytest.raises(ValueError, match=r"checkpoint.contract_sha256 is .*, the contract of --critic-load is 0000"):
        check_passed_report(str(value_chain.report), contract_digest="0" * 64)
