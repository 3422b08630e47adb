"""Fixed slots of memory for handoffs: each is free, in use, or held until its reader has read it or is too late.

A reader in another process reads the address that it was given, even if the slot has been reused meanwhile. So slots
never move, every handoff has a random tag, and a reader that is too late finds bytes with a wrong checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvc_trt.contexts.handoff import Bytes

HOLD_SECONDS = 30.0
"""The time for which a slot is held for its reader: longer than a reader ever waits for a handoff."""


class Held(NamedTuple):
    """A slot that is held for a reader, and the time at which that ends."""

    slot: int
    until: float


class Slots:
    """`count` slots of `nbytes` bytes each. To be used from one thread."""

    def __init__(self, count: int, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.arena = np.zeros((count, nbytes), np.uint8)
        """The memory of all slots, uint8 [count, nbytes]; its address never changes."""
        self._clock = clock
        self._free = list(range(count))
        self._held: dict[str, Held] = {}
        self.read = 0
        """The number of handoffs that were read."""
        self.expired = 0
        """The number of handoffs that were not read in time."""

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def held(self) -> int:
        """The number of slots that are held for readers."""
        return len(self._held)

    @property
    def all_free(self) -> bool:
        """True if no slot is in use or held for a reader."""
        return len(self._free) == len(self.arena)

    def take(self) -> int | None:
        """Take a free slot and return its index, for use until `hold` or `give_back`; None if none is free."""
        return self._free.pop() if self._free else None

    def bytes_of(self, slot: int) -> Bytes:
        """Return a slot's bytes [nbytes], a view of the arena."""
        piece: Bytes = self.arena[slot]
        return piece

    def address(self, slot: int) -> int:
        """Return the address of a slot in this process."""
        return int(self.arena[slot].ctypes.data)

    def give_back(self, slot: int) -> None:
        """Make a slot free."""
        self._free.append(slot)

    def hold(self, slot: int, tag: str) -> None:
        """Hold a slot for the reader that knows `tag`."""
        self._held[tag] = Held(slot, self._clock() + HOLD_SECONDS)

    def release(self, tags: Iterable[str]) -> None:
        """Free the slots with these tags, which were read, and those whose readers are too late."""
        for tag in tags:
            found = self._held.pop(tag, None)
            if found is not None:
                self.read += 1
                self.give_back(found.slot)
        now = self._clock()
        for tag in [tag for tag, held in self._held.items() if now > held.until]:
            self.expired += 1
            self.give_back(self._held.pop(tag).slot)
