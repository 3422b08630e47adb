"""Where the rows of a prefill wait until they are inserted: in the last rows of the buffers, which nobody decodes yet.

A session never asks for more prompts than there are free rows, and its active rows are the prefix of the buffers. So a
prefill needs no second set of caches for the rows it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class StagedRows:
    """The rows of one prefill, at `first` and behind it."""

    first: int
    count: int
    _lost: set[int] = field(default_factory=set)
    """Rows of the prefill whose place was taken by another."""

    def take(self, source_row: int, row: int) -> int | None:
        """Row to copy to `row` for prefilled row `source_row`; None where it lies there already.

        Inserted one after the other behind the active rows, no row ever takes the place of one that is still waited
        for. ValueError for one whose place was taken.
        """
        if not 0 <= source_row < self.count:
            raise ValueError(f"prefilled row {source_row}: the prefill had {self.count} rows")
        if source_row in self._lost:
            raise ValueError(f"prefilled row {source_row} was overwritten: insert rows in the order of their prompts")
        place = row - self.first
        if place == source_row:
            return None
        self._lost.add(place)
        return self.first + source_row
