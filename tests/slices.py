"""Runs a prefill in slices to its end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Yielded, Result = TypeVar("Yielded"), TypeVar("Result")


def result_of(
    slices: Generator[Yielded, Any, Result], between: Callable[[], object] = lambda: None
) -> tuple[Result, list[Yielded]]:
    """Return what the generator returns and what it yields; call `between` after each value."""
    yielded: list[Yielded] = []
    while True:
        try:
            yielded.append(next(slices))
        except StopIteration as end:
            return end.value, yielded
        between()
