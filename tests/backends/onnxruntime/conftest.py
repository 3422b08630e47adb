from __future__ import annotations

import pytest

from tests.plugins_cpu.libraries import library

__all__ = ["library"]


@pytest.fixture(scope="session")
def rocketkv(make_program):
    return make_program("rocketkv, a skipped layer")
