"""Haystacks: units of text, needles between them, and the number of units that fit a target length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Generic, TypeVar

from kvc_trt.errors import InputError
from kvc_trt.tasks.task import Encode

Item = TypeVar("Item")

SHORT_SENTENCES = (
    "The road is long.",
    "The fields are green.",
    "The sea is calm today.",
    "Here the path turns.",
    "Then it leads home again.",
)
"""Filler that is the same in every sample; nothing in it looks like an answer."""


class FirstItems(Generic[Item]):
    """The first items of an endless stream, each drawn once, however often they are asked for."""

    def __init__(self, stream: Iterator[Item]) -> None:
        self._stream = stream
        self._items: list[Item] = []

    def first(self, count: int) -> list[Item]:
        """The first `count` items, or all where the stream ends sooner."""
        self._items += islice(self._stream, max(0, count - len(self._items)))
        return self._items[:count]


def repeated(units: Sequence[str]) -> Iterator[str]:
    """Repeat the units in order, without end."""
    return cycle(units)


def insert_needles(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The units with needle i after the share depths[i] in [0, 1] of them; needles of one gap keep their order."""
    gaps = [round(depth * len(units)) for depth in depths]
    placed = sorted(zip(gaps, range(len(needles)), needles, strict=True), reverse=True)
    lines = list(units)
    for gap, _, needle in placed:
        lines.insert(gap, needle)
    return lines


def fit_units(
    render: Callable[[int], str],
    *,
    task: str,
    encode: Encode,
    target_tokens: int,
    max_new_tokens: int,
    minimum: int = 1,
    maximum: int | None = None,
) -> int:
    """The largest n in [minimum, maximum] with tokens(render(n)) + max_new_tokens <= target_tokens.

    `render` gives the whole prompt with n units and must be pure. The length at the returned n was measured, so it fits
    even where the length is not monotone in n; where it is, n is the largest. Units of at least one token are never
    more than `target_tokens`, which bounds the search for any tokenizer. InputError if `minimum` units do not fit.
    """
    room = target_tokens - max_new_tokens

    def tokens(units: int) -> int:
        return len(encode(render(units)))

    fits, below = minimum, tokens(minimum)
    if below > room:
        raise InputError(
            f"{task}: the shortest prompt has {below} tokens and {max_new_tokens} more are generated, "
            f"the target is {target_tokens}",
            hint=f"use a target of at least {below + max_new_tokens} tokens",
        )
    last = max(minimum, target_tokens if maximum is None else min(target_tokens, maximum))
    excess, above = fits, below
    while above <= room:  # doubling: no prompt is encoded far beyond the target
        fits, below = excess, above
        if fits == last:
            return fits
        excess = min(last, 2 * fits + 1)
        above = tokens(excess)
    halve = False
    while excess - fits > 1:  # a prompt is about as long as its units are many; halving in turn bounds the steps
        share = 0.5 if halve else (room - below) / (above - below)
        probe = min(max(fits + int(share * (excess - fits)), fits + 1), excess - 1)
        if (found := tokens(probe)) <= room:
            fits, below = probe, found
        else:
            excess, above = probe, found
        halve = not halve
    return fits
