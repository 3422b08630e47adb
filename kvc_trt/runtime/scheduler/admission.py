"""The order in which requests join, and the memory that they need."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvc_trt.errors import Busy, InputError
from kvc_trt.runtime.scheduler.ticket import Ticket
from kvc_trt.sizes import readable_size


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that rows and one prefill may use together."""

    limit: int
    """The limit in bytes."""
    row_bytes: int
    """The bytes of one row's state."""
    prefill_bytes: Callable[[int], float]
    """Return the bytes that a prefill uses while it runs, for the number of tokens of its prompt."""

    def needed(self, tokens: int, rows: int) -> float:
        """Return the bytes of `rows` running rows, and of one more while its prompt of `tokens` tokens is read."""
        return (rows + 1) * self.row_bytes + self.prefill_bytes(tokens)

    def fits(self, tokens: int, rows: int) -> bool:
        """Return whether a prompt of `tokens` tokens can join `rows` running rows."""
        return self.needed(tokens, rows) <= self.limit

    def check(self, tokens: int) -> None:
        """Raise InputError, with the numbers, if a prompt of `tokens` tokens does not fit even without other rows."""
        if not self.fits(tokens, 0):
            raise InputError(
                f"a prompt of {tokens} tokens needs {readable_size(self.needed(tokens, 0))} "
                f"({readable_size(self.row_bytes)} for its row, the rest while it is read), "
                f"expected at most {readable_size(self.limit)}",
                hint="shorten it, or give the scheduler more memory",
            )


class Queue:
    """Waiting requests, by priority, then in order of arrival."""

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
        """Insert a request by its priority and number."""
        insort(self._tickets, ticket, key=lambda one: (-one.priority, one.number))

    def first(self) -> Ticket:
        """Return the next request to join. No other may join before it, even if it would fit earlier."""
        return self._tickets[0]

    def remove(self, ticket: Ticket) -> None:
        """Remove a request."""
        self._tickets.remove(ticket)

    def clear(self) -> None:
        """Remove all requests."""
        self._tickets.clear()
