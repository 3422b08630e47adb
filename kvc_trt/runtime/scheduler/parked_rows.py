"""Rows that a scheduler keeps for another turn after their answer has ended, and the turns that wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.scheduler.ticket import Ticket


@dataclass
class ParkedRow:
    """One row that is kept after its answer has ended."""

    row: int
    """The row's number in the session."""
    last: Ticket
    """The ticket of its last answer."""
    since: float
    """The time at which that answer ended, on the scheduler's clock."""
    turn: Ticket | None = None
    """The ticket of the turn that waits to be read; None if there is none."""


class ParkedRows:
    """All parked rows of a scheduler. Not thread-safe: the owner holds a lock."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"stay_seconds must be over 0, found {seconds}")
        self._seconds = seconds
        self._rows: list[ParkedRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_work(self) -> bool:
        """True if a turn waits to be read, or a row must leave because its ticket was cancelled."""
        return any(one.turn is not None or one.last.cancelled for one in self._rows)

    @property
    def turns(self) -> list[Ticket]:
        """The tickets of the turns that wait to be read."""
        return [one.turn for one in self._rows if one.turn is not None]

    def add(self, row: int, last: Ticket, now: float) -> None:
        """Keep a row after the answer of ticket `last`."""
        self._rows.append(ParkedRow(row, last, now))

    def ask(self, last: Ticket, turn: Ticket) -> None:
        """Queue a turn for its row; InputError unless `last` is the row's last answer and no other turn waits."""
        self.check(last)
        self._of(last).turn = turn

    def check(self, last: Ticket) -> None:
        """Raise InputError unless a turn can follow the answer of ticket `last` now."""
        if not isinstance(last, Ticket):
            raise InputError(f"a turn follows {describe(last)}, expected the ticket of an answer")
        what = f"request {last.number}"
        if not last.request.stay:
            raise InputError(f"{what}: its row does not stay for a turn", hint="submit it with stay=True")
        if not last.done:
            raise InputError(f"{what} is being answered; a turn comes after its answer")
        found = [one for one in self._rows if one.last is last]
        if not found:
            raise InputError(f"{what}: its row has left, or a later turn was answered since")
        if found[0].turn is not None:
            raise InputError(f"{what}: another turn waits for its row (request {found[0].turn.number})")

    def next(self, fits: Callable[[Ticket], bool]) -> ParkedRow | None:
        """Remove and return the row of the first turn that fits: by priority, then by number."""
        asked = [one for one in self._rows if one.turn is not None and fits(one.turn)]
        first = min(asked, key=_order, default=None)
        if first is not None:
            self._rows.remove(first)
        return first

    def leaving(self, has_to_end: Callable[[Ticket], bool], now: float, closed: bool) -> list[ParkedRow]:
        """Remove and return the rows that were cancelled, whose waiting turn has to end, or that are kept for too long.

        A row without a turn leaves after the `seconds` of this object, or at once if the scheduler is `closed`.
        """
        return self.take_out(lambda one: self._leaves(one, has_to_end, now, closed))

    def take_out(self, leaves: Callable[[ParkedRow], bool]) -> list[ParkedRow]:
        """Remove and return the rows for which `leaves` returns True."""
        gone = [one for one in self._rows if leaves(one)]
        self._rows = [one for one in self._rows if one not in gone]
        return gone

    def _leaves(self, one: ParkedRow, has_to_end: Callable[[Ticket], bool], now: float, closed: bool) -> bool:
        if one.last.cancelled:
            return True
        if one.turn is not None:
            return has_to_end(one.turn)
        return closed or now - one.since >= self._seconds

    def clear(self) -> list[ParkedRow]:
        """Remove and return all rows."""
        gone, self._rows = self._rows, []
        return gone

    def _of(self, last: Ticket) -> ParkedRow:
        return next(one for one in self._rows if one.last is last)


def _order(one: ParkedRow) -> tuple[int, int]:
    assert one.turn is not None
    return -one.turn.priority, one.turn.number
