"""Signals before a program has anything to clean up."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from miles.utils.audit_utils.interrupts import end_in_one_line
end_in_one_line("program.py")
os.kill(os.getpid(), signal.Signals({number}))
print("went on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_early_signal_ends_in_one_line(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(number=int(number))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == "program.py: interrupted before a device was reserved\n"
