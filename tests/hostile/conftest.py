"""Fixtures for the tests of hostile input."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)
