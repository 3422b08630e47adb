"""The candidates: every method at token budgets that fit a row's bytes, as an engine of that length allocates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from kvc_trt.accuracy.grid import Variant
from kvc_trt.errors import InputError
from kvc_trt.policies import BASELINE

RowBytes = Callable[[Variant], int]
"""Bytes of cache that an engine allocates for one sequence. InputError where there is no engine of that budget."""
STEP = 32
"""Token budgets are multiples of this."""
SMALLER = (1.0, 0.5)
"""Shares of the largest budget that fits at which a method is tried too: a smaller one may do as well."""


@dataclass(frozen=True)
class Candidate:
    """A method at one budget, and what a row of it takes."""

    variant: Variant
    row_bytes: int

    def __str__(self) -> str:
        return str(self.variant)


@dataclass(frozen=True)
class Candidates:
    """What is tried, the smallest rows first, and why methods are not."""

    fitting: tuple[Candidate, ...]
    refused: Mapping[str, str]
    """By method: what its smallest engine takes, or why there is none."""


def methods(
    policies: Iterable[str], formats: Sequence[str] = (), settings: Mapping[str, Sequence[str]] | None = None
) -> Iterator[str]:
    """Every policy in every cache format, with every combination of its own settings.

    `formats` are values of `kv_cache`; `settings` are, by policy, alternatives such as `pool_kernel=7:window=32`; an
    empty one is the policy as it is.
    """
    for policy in dict.fromkeys(policies):
        for own, form in product((settings or {}).get(policy, ("",)), ("", *formats)):
            parts = (policy, own, f"kv_cache={form}" if form else "")
            yield ":".join(part for part in parts if part)


def candidates(names: Iterable[str], row_bytes: RowBytes, limit: int, longest: int) -> Candidates:
    """The methods at the largest token budget of at most `longest` whose row has at most `limit` bytes, and at parts.

    A row's bytes never shrink when the budget grows, so the largest that fits is found by halving.
    """
    found: dict[Variant, Candidate] = {}
    refused: dict[str, str] = {}
    for name in names:
        if Variant(name, None).name == BASELINE:
            largest: int | None = None
        else:
            largest = _largest(name, row_bytes, limit, longest)
        budgets = [None] if largest is None else [_multiple(largest * share) for share in SMALLER]
        for budget in budgets:
            variant = Variant(name, budget)
            try:
                size = row_bytes(variant)
            except InputError as error:
                refused.setdefault(name, error.message)
                continue
            if size <= limit:
                found[variant] = Candidate(variant, size)
            else:
                refused.setdefault(name, f"a row takes {size:,} bytes, and {limit:,} are given")
        if any(variant.policy == name for variant in found):
            refused.pop(name, None)
    ordered = sorted(found.values(), key=lambda one: (one.row_bytes, str(one)))
    return Candidates(tuple(ordered), refused)


def _largest(name: str, row_bytes: RowBytes, limit: int, longest: int) -> int:
    """The largest budget that fits, in steps; the smallest one that has an engine where none fits."""

    def fits(steps: int) -> bool:
        try:
            return row_bytes(Variant(name, steps * STEP)) <= limit
        except InputError:
            return True  # too small for the method: larger ones are tried

    low, high = 1, max(1, longest // STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * STEP


def _multiple(budget: float) -> int:
    return max(STEP, int(budget) // STEP * STEP)
