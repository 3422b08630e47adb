"""Cache formats for the tests of what moves state: every policy with one format, in turn; with the others on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS

FORMATS = tuple(name for name in CACHE_FORMATS if name != AUTO)
"""Every format whose caches hold codes."""


def in_formats(names: Sequence[str], first: int = 0) -> list[Any]:
    """Pairs of a name and a format. Only one pair of each name is not marked `exhaustive`, and formats take turns.

    `first` is the format of the first name, so that two tests take other pairs."""
    return [
        pytest.param(name, form, id=f"{name}-{form}", marks=[] if (number + first - at) % len(FORMATS) == 0 else EXTRA)
        for number, name in enumerate(names)
        for at, form in enumerate(FORMATS)
    ]


EXTRA = pytest.mark.exhaustive
