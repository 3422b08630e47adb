"""Tensors that a checkpoint stores in pieces, one for each expert, as one tensor: their rows one under the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.weights import WeightSource


class StackedWeights:
    """A `WeightSource` over another one, of which some tensors are the pieces of one; InputError if pieces differ."""

    def __init__(self, source: WeightSource, stacks: Mapping[str, Sequence[str]]) -> None:
        """Take the pieces of each tensor in order; a tensor that lacks any of them is not one of `names`."""
        stored = set(source.names())
        self._source = source
        self._stacks = {name: pieces for name, pieces in stacks.items() if stored.issuperset(pieces)}
        self._starts = {name: self._starts_of(pieces) for name, pieces in self._stacks.items()}

    def names(self) -> list[str]:
        """Every tensor that is put together, and those that are a piece of none."""
        pieces = {piece for stack in self._stacks.values() for piece in stack}
        return [*self._stacks, *(name for name in self._source.names() if name not in pieces)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        if name not in self._stacks:
            return tuple(self._source.shape(name))
        return (self._starts[name][-1], *self._source.shape(self._stacks[name][0])[1:])

    def dtype(self, name: str) -> str:
        """Stored type of one tensor, which its pieces share."""
        return self._source.dtype(self._stacks[name][0] if name in self._stacks else name)

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor; reads nothing of pieces that have none of them."""
        if name not in self._stacks:
            return self._source.read_rows(name, start, stop)
        pieces, starts = self._stacks[name], self._starts[name]
        first = min(bisect_right(starts, start) - 1, len(pieces) - 1)
        parts = [
            self._source.read_rows(piece, max(start, begin) - begin, min(stop, end) - begin)
            for piece, begin, end in zip(pieces[first:], starts[first:-1], starts[first + 1 :], strict=True)
            if begin < stop or begin == starts[first]
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self._source.fingerprint()

    def _starts_of(self, pieces: Sequence[str]) -> list[int]:
        """Return the first row of each piece, and the number of rows of all."""
        first = pieces[0]
        for piece in pieces:
            found, expected = ((tuple(self._source.shape(one)), self._source.dtype(one)) for one in (piece, first))
            if found != expected:
                raise InputError(
                    f"weights: {piece} is {found[1]} {list(found[0])}, expected {expected[1]} {list(expected[0])}, "
                    f"as {first} is"
                )
        return list(accumulate((self._source.shape(piece)[0] for piece in pieces), initial=0))
