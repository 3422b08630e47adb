"""Selects a run's tests from all that were collected, and orders them.

`make test` and `make test-all` take a sample of large products of parameters, one in n cases of what is marked
`one_in(n)`, and nothing of what is marked `exhaustive`; `make test-everything` (`pytest --everything`) takes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias
from zlib import crc32

import pytest

REAL_MODEL, ITS_WEIGHT = "smollm2_gguf", 12
"""The fixture of a real model's file, and how many tests marked `slow` one that takes it is as long as."""
Values: TypeAlias = Mapping[str, Hashable]
"""The value of each parameter of one test of a product."""


def add_option(parser: pytest.Parser) -> None:
    """Add `--everything` to pytest."""
    text = "run products of parameters in full, and the tests marked `exhaustive`"
    parser.addoption("--everything", action="store_true", help=text)


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of this run in `items`, those of the longest files first."""
    if not config.option.everything:
        left_out = _beyond_pairs(items) | _between_samples(items)
        left_out |= {item for item in items if item.get_closest_marker("exhaustive")}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    _longest_files_first(items)


def covering_pairs(products: Sequence[Values]) -> list[int]:
    """Positions, ascending, of some `products` that hold every pair of values of two parameters which occurs in any.

    Greedy: the one with the most pairs that are not covered yet, of equals the first. A product of parameters with
    a, b, c, ... values, a >= b the most, shrinks from a * b * c * ... to little more than a * b.
    """
    wanted = [_pairs(values) for values in products]
    uncovered, chosen = set().union(*wanted), []
    while uncovered:
        best = max(range(len(wanted)), key=lambda place: len(wanted[place] & uncovered))
        chosen.append(best)
        uncovered -= wanted[best]
    return sorted(chosen)


def _pairs(values: Values) -> set[Hashable]:
    """Pairs of (parameter, value); the values themselves where there is one parameter."""
    named = sorted(values.items(), key=lambda item: item[0])
    return set(combinations(named, min(2, len(named))))


def _beyond_pairs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests marked `pairwise` that are no part of the sample of their function."""
    left_out: set[pytest.Item] = set()
    for tests in _marked(items, "pairwise").values():
        chosen = set(covering_pairs([_values(test) for test in tests]))
        left_out.update(test for place, test in enumerate(tests) if place not in chosen)
    return left_out


def evenly(products: Sequence[Values], count: int, first: int) -> list[int]:
    """Positions, ascending, of one in `count` products (rounded up), in which values occur about equally often.

    Those at a distance of `count` come first, from the position `first` on.
    """
    used: Counter[Hashable] = Counter()
    left = sorted(range(len(products)), key=lambda place: ((place - first) % count, place))
    chosen = []
    for _ in range(-(-len(products) // count)):
        best = min(left, key=lambda place: sum(used[value] for value in products[place].items()))
        used.update(products[best].items())
        left.remove(best)
        chosen.append(best)
    return sorted(chosen)


def _between_samples(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests marked `one_in(n)` that are no part of the sample of their function.

    Where it begins follows from the function's name: among several functions every policy or family has its turn.
    """
    left_out: set[pytest.Item] = set()
    for name, tests in _marked(items, "one_in").items():
        (count,) = tests[0].get_closest_marker("one_in").args
        chosen = set(evenly([_values(test) for test in tests], count, crc32(name.encode()) % count))
        left_out.update(test for place, test in enumerate(tests) if place not in chosen)
    return left_out


def _marked(items: Sequence[pytest.Item], mark: str) -> dict[str, list[pytest.Function]]:
    """Return the tests of each function with this mark, by the function's name."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(mark):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return functions


def _values(test: pytest.Function) -> Values:
    return {name: repr(value) for name, value in test.callspec.params.items()}


def _longest_files_first(items: list[pytest.Item]) -> None:
    """Sort files by their number of tests marked `slow`, so that no process is left with a long one at the end.

    Files that start servers come before all: they wait more than they compute. One test of a real model counts as many.
    """
    weights: dict[str, tuple[bool, int]] = {}
    for item in items:
        serves, slow = weights.get(_file(item), (False, 0))
        serves = serves or any(item.get_closest_marker(name) for name in ("dynamo", "triton"))
        length = ITS_WEIGHT if REAL_MODEL in getattr(item, "fixturenames", ()) else 1
        weights[_file(item)] = serves, slow + length * bool(item.get_closest_marker("slow"))
    items.sort(key=lambda item: weights[_file(item)], reverse=True)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
