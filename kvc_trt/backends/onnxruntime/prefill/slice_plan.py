"""Plan the slices of a prefill from times measured on this machine and the time limit of a slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

EVEN_TRIES = 12
"""The number of limits tried below a given one: the longest block then is within 0.1% of the shortest possible."""
Measured: TypeAlias = tuple[int, int, float]
"""The first query of a block, the end of its queries, and the seconds that it took."""


@dataclass(frozen=True)
class Rates:
    """The cost of a layer: seconds per token, and per pair of a query and a key up to it."""

    token_seconds: float
    pair_seconds: float
    block_seconds: float = 0.0
    """The additional seconds of each block, whatever its size, for packing its matrices."""

    def seconds(self, first: int, last: int) -> float:
        """Return the seconds for the queries `first` to `last`, which read all keys up to themselves."""
        return self.block_seconds + self.token_seconds * (last - first) + self.pair_seconds * _pairs(first, last)


def fitted(near: Measured, far: Measured) -> Rates:
    """Return the rates that reproduce two measurements, of which `far` has more pairs per token."""
    per_token = [(seconds / (last - first), (first + last) / 2) for first, last, seconds in (near, far)]
    (near_seconds, near_keys), (far_seconds, far_keys) = per_token
    pair = max(0.0, (far_seconds - near_seconds) / (far_keys - near_keys))
    return Rates(max(0.0, near_seconds - pair * near_keys), pair)


def fitted_to_blocks(short: Measured, near: Measured, far: Measured) -> Rates:
    """Return the rates that also reproduce a third measurement, of a `short` block with few pairs."""
    pair = fitted(near, far).pair_seconds
    without_pairs = [(last - first, seconds - pair * _pairs(first, last)) for first, last, seconds in (short, near)]
    (few, few_seconds), (many, many_seconds) = without_pairs
    token = max(0.0, min((many_seconds - few_seconds) / (many - few), many_seconds / many))
    return Rates(token, pair, max(0.0, many_seconds - token * many))


def _pairs(first: int, last: int) -> float:
    return (last - first) * (first + last) / 2


def blocks(rates: Rates, tokens: int, grain: int, limit: float) -> list[tuple[int, int]]:
    """Cut `tokens` into blocks (first, last) of at most `limit` seconds: as few as possible, and as even as possible.

    A block has a multiple of `grain` tokens, at least one `grain`; the last block also gets the remainder.
    """
    found = _filled(rates, tokens, grain, limit)
    low, high = 0.0, min(limit, rates.seconds(0, tokens))
    for _ in range(EVEN_TRIES):
        middle = (low + high) / 2
        tried = _filled(rates, tokens, grain, middle)
        if len(tried) > len(found):
            low = middle
        else:
            found, high = tried, middle
    return found


def _filled(rates: Rates, tokens: int, grain: int, limit: float) -> list[tuple[int, int]]:
    """Return blocks that are each as long as the limit allows."""
    found, first = [], 0
    while first < tokens:
        last = first + grain
        while last + grain <= tokens and rates.seconds(first, last + grain) <= limit:
            last += grain
        if tokens - last < grain:
            last = tokens
        found.append((first, last))
        first = last
    return found


def grouped(seconds: Iterable[float], limit: float) -> Iterator[Sequence[int]]:
    """Yield groups of neighbouring pieces, by number: as many as take at most `limit` together, at least one."""
    group: list[int] = []
    taken = 0.0
    for number, one in enumerate(seconds):
        if group and taken + one > limit:
            yield group
            group, taken = [], 0.0
        group.append(number)
        taken += one
    if group:
        yield group
