"""Caches that differ between layers, in a few lines: layers of equal room together, or one number per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Caches = Sequence[Mapping[str, Any]]
"""Of one layer: `heads` and `slots` of each cache."""

MOST_KINDS, LAYERS_PER_LINE = 8, 8


def layers_text(layers: Sequence[Caches]) -> str:
    """One line per kind of layer; where nearly every layer is a kind of its own, a few layers per line.

    Empty where all layers are alike and cache all their heads together.
    """
    kinds: dict[str, list[int]] = {}
    for number, caches in enumerate(layers):
        kinds.setdefault(_slots(caches), []).append(number)
    if len(kinds) == 1 and len(layers[0]) == 1:
        return ""
    if len(kinds) <= MOST_KINDS:
        return "\n".join(f"{_layers(numbers)}: {slots}" for slots, numbers in kinds.items())
    spans = range(0, len(layers), LAYERS_PER_LINE)
    return "\n".join(_span(start, layers[start : start + LAYERS_PER_LINE]) for start in spans)


def ranges(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as `0-2, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def _slots(caches: Caches) -> str:
    if len(caches) == 1:
        return f"{caches[0]['slots']:,} slots"
    return "; ".join(f"{_heads(cache['heads'])} of {cache['slots']:,} slots" for cache in caches)


def _heads(count: int) -> str:
    return f"{count} KV head{'s' * (count > 1)}"


def _span(start: int, layers: Sequence[Caches]) -> str:
    each = ", ".join(" + ".join(f"{cache['slots']:,}" for cache in caches) for caches in layers)
    return f"{_layers(range(start, start + len(layers)))}: {each} slots"
