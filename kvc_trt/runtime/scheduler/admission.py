"""Which request joins next: the queue's order, and what the memory has room for."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvc_trt.errors import Busy, InputError
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.sizes import readable_size


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that rows and one prefill may take together."""

    limit: int
    """Bytes."""
    row_bytes: int
    """Bytes of one row's state."""
    prefill_bytes: Callable[[int], float]
    """Bytes that the prefill of a prompt of so many tokens takes while it runs."""

    def needed(self, tokens: int, rows: int) -> float:
        """Return the bytes of `rows` running rows and one that joins with a prompt of so many tokens."""
        return (rows + 1) * self.row_bytes + self.prefill_bytes(tokens)

    def fits(self, tokens: int, rows: int) -> bool:
        """Whether a prompt of so many tokens can join so many rows."""
        return self.needed(tokens, rows) <= self.limit

    def check(self, tokens: int) -> None:
        """Raise InputError, with the numbers, for a prompt that does not fit even alone."""
        if not self.fits(tokens, 0):
            raise InputError(
                f"a prompt of {tokens} tokens needs {readable_size(self.needed(tokens, 0))} "
                f"({readable_size(self.row_bytes)} for its row, the rest while it is read), "
                f"expected at most {readable_size(self.limit)}",
                hint="shorten it, or give the scheduler more memory",
            )


class Queue:
    """Requests that wait: those of higher priority first, equal ones in the order in which they came."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"the queue's limit must be at least 1, found {limit}")
        self._limit = limit
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._tickets))

    def check_room(self) -> None:
        """Raise Busy for a full queue."""
        if len(self._tickets) >= self._limit:
            raise Busy(
                f"busy: {len(self._tickets)} requests wait, which is the queue's limit",
                hint="ask again later, or give the scheduler a longer queue",
            )

    def add(self, ticket: Ticket) -> None:
        """Put a request in its place."""
        insort(self._tickets, ticket, key=lambda one: (-one.priority, one.number))

    def first(self) -> Ticket:
        """Return the request whose turn it is. Nothing overtakes it, not even what would fit earlier."""
        return self._tickets[0]

    def remove(self, ticket: Ticket) -> None:
        """Take a request out."""
        self._tickets.remove(ticket)

    def clear(self) -> None:
        """Take all requests out."""
        self._tickets.clear()
