from __future__ import annotations

import pytest

from kvc_trt import progress


@pytest.fixture(autouse=True)
def no_line_for_what_a_busy_machine_made_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count the lines of an error; a task of over a second would add one."""
    monkeypatch.setattr(progress, "SECONDS_WORTH_REPORTING", 3600.0)
