"""Log lines carry level and source; the process identity is JSON-safe; the model-parallel size is a product."""

import json
import os
import subprocess
import sys

import pytest

from miles.config import Args
from miles.utils.audit_utils.process_identity import MainProcessIdentity
from miles.utils.megatron_args_utils import compute_megatron_world_size_except_dp


def test_log_line_has_level_and_source_and_libraries_are_quiet() -> None:
    program = (
        "import logging, sys; from miles.config import Args; from miles.utils.logging_utils import configure_logger\n"
        "args = Args.build(log_level=sys.argv[1])\n"
        "for _ in range(2): configure_logger(args, source='actor:3')\n"
        "for name in ('miles.x', 'httpx'):\n"
        "    for level in ('debug', 'info', 'warning'): getattr(logging.getLogger(name), level)(f'{name} {level}')\n"
    )

    def said(level: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program, level], capture_output=True, text=True, check=True, timeout=60
        )
        return [line.split(" ", 1)[1] for line in done.stderr.splitlines()]

    assert said("INFO") == [
        "I [actor:3] miles.x: miles.x info",
        "W [actor:3] miles.x: miles.x warning",
        "W [actor:3] httpx: httpx warning",
    ]
    assert len(said("DEBUG")) == 6
    assert said("ERROR") == []


def test_identity_names_this_process() -> None:
    identity = MainProcessIdentity()
    assert json.loads(json.dumps(identity.to_dict()))["pid"] == os.getpid()
    assert str(os.getpid()) in str(identity)


def test_identity_of_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert MainProcessIdentity().user == str(os.getuid())


def test_world_size_without_data_parallelism_is_tp_times_pp_times_cp() -> None:
    args = Args.build(tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=5)
    assert compute_megatron_world_size_except_dp(args) == 30
    assert compute_megatron_world_size_except_dp(Args.build()) == 1
