"""The inputs of a kind, each by its number: the same for the same seed, on any day and in any process."""

from __future__ import annotations

from random import Random

from tests.fuzz.kind import Kind

LARGEST_SOURCE = 1 << 13
"""Bytes of a specimen that is spoiled too; what is larger shows what it has to show as it is, and takes time."""


class Inputs:
    """Number 0 and following are the seeds as they are, then the specimens; all others are spoiled ones."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._seeds = list(kind.seeds())
        specimens = list(kind.specimens())
        self._whole = [*self._seeds, *specimens]
        self._sources = [*self._seeds, *(content for content in specimens if len(content) <= LARGEST_SOURCE)]

    @property
    def valid(self) -> int:
        """The number of seeds; all of them must be accepted."""
        return len(self._seeds)

    @property
    def whole(self) -> int:
        """The number of unspoiled inputs, which come first: seeds and specimens."""
        return len(self._whole)

    def __getitem__(self, number: int) -> bytes:
        if number < len(self._whole):
            return self._whole[number]
        random = Random(f"{self._seed} {self._kind.name} {number}")
        # Most of what a specimen shows, it shows as it is: seeds are spoiled more often.
        content = random.choice(self._seeds if random.random() < 0.9 else self._sources)
        for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5))):
            content = random.choice(self._kind.mutators)(random, content, self._sources)
        return content
