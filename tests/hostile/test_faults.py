"""The short form of `make faults`: a few fixed moments; `python -m tests.hostile.faults` has the long one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hostile.faults.moments import spread


@pytest.mark.slow
def test_commands_survive_injected_faults():
    command = [sys.executable, "-m", "tests.hostile.faults", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("short ")]) == 6


@pytest.mark.parametrize(("count", "wanted", "moments"), [(3, 5, [1, 2, 3]), (9, 3, [1, 5, 9]), (7, 1, [7])])
def test_fault_moments_are_spread_from_the_first_to_the_last(count, wanted, moments):
    assert spread(count, wanted) == moments
