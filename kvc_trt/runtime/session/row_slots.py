"""The place of each row of a session in the buffers: active rows first, then rows that wait for a turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from kvc_trt.runtime.executor import Executor
from kvc_trt.runtime.session.row import Row


class RowSlots:
    """The rows of a session. A step runs the first places, so every change keeps the active rows contiguous there.

    If the executor fails to move a row, the places of rows are unknown, and all rows are dropped.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.active: list[Row] = []
        """The rows that a step feeds, in buffer order."""
        self.waiting: list[Row] = []
        """The rows that wait for a turn after their answer, in buffer order behind the active ones."""

    def __len__(self) -> int:
        return len(self.active) + len(self.waiting)

    def holds(self, identity: int) -> bool:
        """Return whether the row with this number is in the session."""
        return any(row.identity == identity for row in (*self.active, *self.waiting))

    def find(self, identity: int) -> Row:
        """Return the row with this number; ValueError if it has left."""
        for row in (*self.active, *self.waiting):
            if row.identity == identity:
                return row
        rows = tuple(row.identity for row in (*self.active, *self.waiting))
        raise ValueError(
            f"row {identity} is not in the session; rows: {rows}. "
            "A row leaves when its answer ends, unless its request says stay=True"
        )

    def place(self, row: Row) -> int:
        """Return the place of a row in the buffers."""
        if row in self.active:
            return self.active.index(row)
        return len(self.active) + self.waiting.index(row)

    def join(self, row: Row) -> int:
        """Put a row behind the active ones; return its place in the buffers, which the caller has to write."""
        place = len(self.active)
        with self._or_forgotten():
            if self.waiting:
                self.executor.move(place, len(self))
                self.waiting.append(self.waiting.pop(0))
        self.active.append(row)
        return place

    def leave(self, leaving: Row) -> None:
        """Remove a row; the last row of its kind takes its place."""
        with self._or_forgotten():
            if leaving in self.waiting:
                self._fill(leaving, self.waiting, len(self.active))
                return
            self._fill(leaving, self.active, 0)
            if self.waiting:
                self.executor.move(len(self), len(self.active))
                self.waiting.insert(0, self.waiting.pop())

    def leave_all(self, leaving: Iterable[Row]) -> None:
        """Remove several rows."""
        for row in tuple(leaving):
            self.leave(row)

    def wait(self, row: Row) -> None:
        """Let an active row wait for a turn."""
        row.own_answer()
        with self._or_forgotten():
            self._swap(self.place(row), len(self.active) - 1)
        self.active[self.active.index(row)] = self.active[-1]
        self.active.pop()
        self.waiting.insert(0, row)

    def resume(self, row: Row) -> None:
        """Make a waiting row active again."""
        with self._or_forgotten():
            self._swap(self.place(row), len(self.active))
        self.waiting[self.waiting.index(row)] = self.waiting[0]
        self.waiting.pop(0)
        self.active.append(row)

    def forget(self) -> None:
        """Drop all rows without touching the buffers: a row that joins later overwrites its whole place."""
        self.active.clear()
        self.waiting.clear()

    @contextmanager
    def _or_forgotten(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def _fill(self, leaving: Row, rows: list[Row], start: int) -> None:
        hole, last = rows.index(leaving), rows.pop()
        if last is not leaving:
            self.executor.move(start + len(rows), start + hole)
            rows[hole] = last

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            kept = [(name, np.array(tensor)) for name, tensor in self.executor.read_row(one).items()]
            self.executor.move(other, one)
            self.executor.write_row(other, kept)
