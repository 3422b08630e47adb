"""The gateway's own work, before a frontend that this test makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.serving.dynamo.served import PYTHON, ROOT, require_environment

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]


def test_many_clients_wrong_paths_and_wrong_keys():
    require_environment()
    script = Path(__file__).with_name("gateway_story.py")
    told = subprocess.run(
        [str(PYTHON), str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=90,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    assert "all is well" in told.stdout
