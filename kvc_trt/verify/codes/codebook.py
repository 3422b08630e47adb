"""The vectors of a test case, looked up by the value that a cache gives back: their codes and exact values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.cache_formats import FP8, VectorFormat
from kvc_trt.verify.codes.parts import read_parts, stored_parts, unpacked

Array = NDArray[Any]


class Codebook:
    """Translates the keys, or the values, of one test case between their forms.

    The reference sees the vectors that a cache gives back, the operator sees exact vectors and codes. Codes that do not
    belong to a vector of the case read as NaN.
    """

    def __init__(self, form: VectorFormat, head_size: int) -> None:
        self.form, self._size = form, head_size
        nothing = np.zeros((1, head_size), np.float32)
        free = [np.zeros_like(part) for part in stored_parts(nothing, form)]
        self._exact: list[Array] = [nothing]
        self._read: list[Array] = [nothing]
        self._parts: list[list[Array]] = [free]

    def store(self, exact: Array) -> NDArray[np.float32]:
        """Add exact vectors [...,D]; return the vectors that a cache gives back after storing them."""
        return self._add(exact, stored_parts(exact, self.form))

    def hold(self, exact: Array) -> NDArray[np.float32]:
        """Add vectors that a cache already holds, made of `exact` [...,D], zeros for free slots; return them read back.

        Some have codes other than those that storing the returned vectors again would make, so that an operator that
        encodes stored vectors a second time is found out.
        """
        parts = stored_parts(exact, self.form)
        smaller = _smaller(unpacked(parts[0], self.form), self.form)
        codes = np.where(exact[..., :1] > 0, smaller, unpacked(parts[0], self.form))
        parts[0] = codes[..., ::2] | codes[..., 1::2] << 4 if self.form.code_bits == 4 else codes
        free = ~exact.any(axis=-1, keepdims=True)
        return self._add(exact, [np.where(free, 0, part).astype(part.dtype) for part in parts])

    def _add(self, exact: Array, parts: Sequence[Array]) -> NDArray[np.float32]:
        read = read_parts(parts, self.form)
        self._exact.append(_flat(exact))
        self._read.append(_flat(read))
        self._parts.append([_flat(part) for part in parts])
        return read

    def exact(self, read: Array, dtype: Any) -> Array:
        """Return the exact vectors [...,D] of the vectors `read` that a cache gives back."""
        exact: Array = np.concatenate([table.astype(dtype) for table in self._exact])
        found: Array = exact[self._places(read)]
        return found.reshape(read.shape)

    def parts(self, read: Array) -> list[Array]:
        """Return the parts of the vectors `read` [...,D] that a cache gives back."""
        places, columns = self._places(read), zip(*self._parts, strict=True)
        return [np.concatenate(column)[places].reshape(*read.shape[:-1], -1) for column in columns]

    def codes(self, read: Array) -> Array:
        """Return the codes [...,D] of the vectors `read`, one for each channel."""
        return unpacked(self.parts(read)[0], self.form)

    def read(self, parts: Sequence[Array]) -> NDArray[np.float32]:
        """Return the vectors [...,D] that a cache with these parts gives back; NaN for parts outside of this book."""
        return self._known(np.concatenate([_bytes(part) for part in map(_flat, parts)], axis=-1), parts[0], self._rows)

    def read_codes(self, codes: Array) -> NDArray[np.float32]:
        """Return the vectors [...,D] that a cache gives back for codes [...,D] alone; NaN for unknown codes."""
        own = np.concatenate([unpacked(parts[0], self.form) for parts in self._parts])
        return self._known(_bytes(_flat(codes)), codes, _bytes(own))

    @property
    def _rows(self) -> Array:
        """The bytes of all parts of each vector, [N,.]."""
        columns = [_bytes(np.concatenate(column)) for column in zip(*self._parts, strict=True)]
        rows: Array = np.concatenate(columns, axis=-1)
        return rows

    def _known(self, wanted: Array, like: Array, rows: Array) -> NDArray[np.float32]:
        places, known = _look_up(wanted, rows)
        found: Array = np.where(known[:, None], np.concatenate(self._read)[places], np.float32(np.nan))
        return found.reshape(*like.shape[:-1], self._size)

    def _places(self, read: Array) -> Array:
        """Return the number of each vector; ValueError for one that is not in the book."""
        rows = _bytes(np.concatenate(self._read) + np.float32(0))
        places, known = _look_up(_bytes(_flat(read).astype(np.float32) + np.float32(0)), rows)
        if not known.all():
            raise ValueError(f"{int((~known).sum())} of {known.size} vectors are not of this case")
        return places


def _smaller(codes: Array, form: VectorFormat) -> Array:
    """Return codes of a vector that would be stored with another scale."""
    if form.code_bits == 4:
        return np.clip(codes, 1, 13)
    if form != FP8:
        return np.clip(codes, -90, 90)
    magnitude, sign = codes & 0x7F, codes & np.int8(-0x80)
    halved: Array = np.where(magnitude < 16, 0, magnitude - 8).astype(np.int8) | sign  # subnormal halves become zero
    return halved


def _flat(table: Array) -> Array:
    return np.ascontiguousarray(table).reshape(-1, table.shape[-1])


def _bytes(table: Array) -> NDArray[np.uint8]:
    """Return the bytes of each row, [N,.]."""
    return np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1)


def _look_up(wanted: NDArray[np.uint8], rows: NDArray[np.uint8]) -> tuple[Array, Array]:
    """Return for each wanted row the index of a row with the same bytes, and whether there is one."""
    keys, own = _hashed(wanted), _hashed(rows)
    order = np.argsort(own, kind="stable")
    places = order[np.minimum(np.searchsorted(own[order], keys), len(order) - 1)]
    return places, (rows[places] == wanted).all(axis=-1)


def _hashed(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    factors = np.random.default_rng(0).integers(1, 1 << 63, rows.shape[1], np.uint64)
    total = np.zeros(len(rows), np.uint64)
    for column, factor in zip(rows.T, factors, strict=True):
        total += column.astype(np.uint64) * factor
    return total
