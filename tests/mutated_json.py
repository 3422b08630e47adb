"""JSON documents with one value replaced, at every path and by values of every type."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

DROPPED = object()
"""In place of a value: its key, or its entry of a list, is left out."""


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: tuple[Any, ...] = (
    DROPPED, None, True, False, 0, 1, -1, 3, 2**31, 10**18, 10**30, 10**4000, 0.0, 0.5, -2.5, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "x", "8", "fp16", "\ud800", "\x1b[31m", "x" * 100_000, "../x",
    "f" * 64, [], [1], [0.5, None], ["x", "y"], [[1, 2], [3]], nested(150), nested(700), {}, {"x": 1}, {"": {"y": []}},
)  # fmt: skip


def mutations(document: Any) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Every path of a document with everything that takes its place: a value, one key more, one entry more or less."""
    for path, value in paths(document):
        yield from ((path, replacement) for replacement in VALUES)
        if isinstance(value, dict):
            yield path, {**value, "unheard_of": 1}
        if isinstance(value, list) and value:
            yield path, value[:-1]
            yield path, [*value, value[-1]]


def paths(document: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for name, value in inside:
        yield (*path, name), value
        if isinstance(value, (dict, list)):
            yield from paths(value, (*path, name))


def replaced(document: dict[str, Any], path: tuple[int | str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    *parents, last = path
    section: Any = changed
    for parent in parents:
        section = section[parent]
    if value is DROPPED:
        del section[last]
    else:
        section[last] = value
    return changed
