"""What needles are hidden in: units of text, and how needles are put between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

SHORT_SENTENCES = (
    "The road is long.",
    "The fields are green.",
    "The sea is calm today.",
    "Here the path turns.",
    "Then it leads home again.",
)
"""Filler that is the same in every sample; nothing in it looks like an answer."""


class Drawn(Generic[Item]):
    """The first items of an endless stream, each drawn once, however often they are asked for."""

    def __init__(self, stream: Iterator[Item]) -> None:
        self._stream = stream
        self._items: list[Item] = []

    def first(self, count: int) -> list[Item]:
        """The first `count` items, or all where the stream ends sooner."""
        self._items += islice(self._stream, max(0, count - len(self._items)))
        return self._items[:count]


def repeated(units: Sequence[str]) -> Iterator[str]:
    """The units in order, again and again."""
    return cycle(units)


def insert_needles(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The units with needle i after the share depths[i] in [0, 1] of them; needles of one gap keep their order."""
    gaps = [round(depth * len(units)) for depth in depths]
    placed = sorted(zip(gaps, range(len(needles)), needles, strict=True), reverse=True)
    lines = list(units)
    for gap, _, needle in placed:
        lines.insert(gap, needle)
    return lines
