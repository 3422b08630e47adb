"""Cache formats for the tests of what moves state: every policy with one format, in turn; with the others on demand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.stored_tables import FORMATS

EXTRA = pytest.mark.exhaustive
DIFFERENT = (
    "full", "rocketkv", "rocketkv-mt", "sparq", "quest", "hybrid", "h2o", "streaming-llm", "snapkv", "duo-attention",
    "rocketkv, bounds in fp8", "quest, bounds in fp8",
)  # fmt: skip
"""Policies whose caches hold different things: bounds, places, whole caches, channels, scores, rings."""


def in_formats(names: Sequence[str], first: int = 0, usual: Collection[str] | None = None) -> list[Any]:
    """Pairs of a name and a format; formats take turns, so that a usual run has one pair of each name.

    The others are marked `exhaustive`, and so are all pairs of names that are not `usual`. `first` is the format of the
    first name, so that two tests take other pairs."""
    chosen = {name: FORMATS[(number + first) % len(FORMATS)] for number, name in enumerate(names)}
    return [
        pytest.param(name, form, marks=[] if form == one and (usual is None or name in usual) else EXTRA)
        for name, one in chosen.items()
        for form in FORMATS
    ]
