"""Fixed pieces of memory for handoffs: each is free, in use, or held for a reader until it has read, or is too late.

A reader elsewhere reads memory that it was told of, whether it was given back meanwhile or not. So pieces stay where
they are for good, every handoff has a random tag, and whoever comes too late finds bytes of another checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvc_trt.contexts.handoff import Bytes

HOLD_SECONDS = 30.0
"""The time that a handoff waits for its reader: longer than a reader ever waits for a handoff."""


class Held(NamedTuple):
    """A piece that a reader will read."""

    slot: int
    until: float


class Slots:
    """`count` pieces of `nbytes` bytes each. Used from one thread."""

    def __init__(self, count: int, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.arena = np.zeros((count, nbytes), np.uint8)
        """[count, nbytes]; where it lies never changes."""
        self._clock = clock
        self._free = list(range(count))
        self._held: dict[str, Held] = {}
        self.read = 0
        """Handoffs that were read."""
        self.expired = 0
        """Handoffs that nobody has read in time."""

    @property
    def free(self) -> int:
        """Number of pieces that can be taken."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Number of pieces that wait for their readers."""
        return len(self._held)

    @property
    def all_free(self) -> bool:
        """True if no piece is in use or held for a reader."""
        return len(self._free) == len(self.arena)

    def take(self) -> int | None:
        """Return a piece that is the caller's until it is held or given back; None if there is none."""
        return self._free.pop() if self._free else None

    def bytes_of(self, slot: int) -> Bytes:
        """Return a piece's bytes [nbytes], in place."""
        piece: Bytes = self.arena[slot]
        return piece

    def address(self, slot: int) -> int:
        """Return where a piece lies in this process."""
        return int(self.arena[slot].ctypes.data)

    def give_back(self, slot: int) -> None:
        """Make a piece free."""
        self._free.append(slot)

    def hold(self, slot: int, tag: str) -> None:
        """Keep a piece for the reader that knows `tag`."""
        self._held[tag] = Held(slot, self._clock() + HOLD_SECONDS)

    def release(self, tags: Iterable[str]) -> None:
        """Give back the pieces that were read, by their tags, and those whose readers are too late."""
        for tag in tags:
            found = self._held.pop(tag, None)
            if found is not None:
                self.read += 1
                self.give_back(found.slot)
        now = self._clock()
        for tag in [tag for tag, held in self._held.items() if now > held.until]:
            self.expired += 1
            self.give_back(self._held.pop(tag).slot)
