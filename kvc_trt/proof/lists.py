"""Index lists as bytes, in one way only, and the digest of a list at its place in an answer.

The lists of one cache at one step are a table [heads, width] of integers, -1 past the end of a list. Its bytes are, as
unsigned numbers: how many heads there are; then for each head the length of its list without the -1 at the end, and
each entry as the difference from one more than the entry before it (from 0 for the first). Lists ascend, so these
differences are small and never negative; in a wrong list they may be negative, so they are kept in a zigzag code (0,
-1, 1, -2 become 0, 1, 2, 3). A number is written seven bits a byte, the lowest first; all bytes but the last have the
highest bit set, and the last is not 0 unless it is the only one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError

Lists = NDArray[Any]
"""Integers [heads, width], -1 past the end of a list."""

MOST_HEADS, MOST_ENTRIES = 4096, 1 << 26
"""The most heads, and the most entries, in the lists of one cache at one step; no model has as many."""
_BITS, _MORE = 7, 0x80
_LONGEST_NUMBER = 5
"""The most bytes of a number, which is below 2^35."""


def encode(lists: Lists) -> bytes:
    """Return the bytes of lists [heads, width]."""
    heads, width = lists.shape
    places = np.arange(width + 1)
    counts = ((lists >= 0) * places[1:]).max(axis=1, initial=0)
    entries = lists.astype(np.int64)
    steps = entries.copy()
    steps[:, 1:] -= entries[:, :-1] + 1
    numbers = np.column_stack([counts, (steps << 1) ^ (steps >> 63)])
    return _written(np.concatenate([[heads], numbers[places <= counts[:, None]]]))


def decode(data: bytes) -> Lists:
    """Return the lists [heads, longest] in these bytes; InputError for bytes that `encode` does not write."""
    rows = decode_rows(data)
    longest = max(map(len, rows), default=0)
    if len(rows) * longest > MOST_ENTRIES:
        found = f"{len(rows)} heads and up to {longest} tokens"
        raise InputError(f"lists of {found}, expected at most {MOST_ENTRIES} entries")
    table = np.full((len(rows), longest), -1, np.int32)
    for head, row in enumerate(rows):
        table[head, : len(row)] = row
    return table


def decode_rows(data: bytes) -> list[NDArray[np.int64]]:
    """Return the list of each head, without the -1 past its end; InputError for bytes that `encode` does not write.

    Its memory is proportional to the bytes. A table of the same lists can be a thousand times larger if one is long.
    """
    entries, bounds = _entries(data)
    return np.split(entries, bounds[1:-1])


def check_lists(data: bytes) -> None:
    """Raise InputError for bytes that `encode` does not write, in a time proportional to the bytes."""
    _entries(data)


def _entries(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the entries of all heads, one after the other, and the bounds [heads + 1] of each head's entries."""
    numbers = _read(np.frombuffer(data, np.uint8))
    ends = _ends(numbers)
    coded = np.delete(numbers, np.concatenate([[0], ends[:-1]]))
    steps = np.where(coded % 2 == 1, -((coded + 1) // 2), coded // 2) + 1
    summed = np.concatenate([[0], np.cumsum(steps)])
    bounds = ends - np.arange(1, len(ends) + 1)
    lengths = np.diff(bounds)
    entries = summed[1:] - np.repeat(summed[bounds[:-1]], lengths) - 1
    last = entries[bounds[1:][lengths > 0] - 1]
    if (last < 0).any() or (np.abs(entries) > np.iinfo(np.int32).max).any():
        raise InputError("a list of tokens holds a value that is no index")
    return entries, bounds


def _ends(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the number of heads ends, and the list of each head; InputError unless these are all numbers."""
    heads = int(numbers[0]) if len(numbers) else 0
    if not 1 <= heads <= MOST_HEADS:
        raise InputError(f"lists of tokens of {heads} heads, expected 1 to {MOST_HEADS}")
    end, all_of_them = 1, len(numbers)
    ends = [end]
    for head in range(heads):
        if end >= all_of_them:
            raise InputError(f"lists of {heads} heads end after {head}")
        count = numbers.item(end)
        end += 1 + count
        if end > all_of_them:
            raise InputError(f"a list of {count} tokens ends after {count - end + all_of_them}")
        ends.append(end)
    if end != all_of_them:
        raise InputError(f"lists of {heads} heads are followed by something else")
    return np.array(ends)


def digest_at(cache: int, step: int, data: bytes) -> bytes:
    """Return the SHA-256 of the bytes of a cache's lists at a step: 0 is the prompt's compaction, then decode steps."""
    place = f"kvc-trt lists, cache {cache}, step {step}\n".encode()
    return hashlib.sha256(place + data).digest()


def _written(numbers: NDArray[np.int64]) -> bytes:
    longest = max(1, -(-int(numbers.max()).bit_length() // _BITS))
    lengths = np.ones(len(numbers), np.int64)
    for size in range(1, longest):
        lengths += numbers >> (_BITS * size) != 0
    ends = np.cumsum(lengths)
    written = np.empty(int(ends[-1]), np.uint8)
    for byte in range(longest):
        has = lengths > byte
        more = np.where(lengths[has] > byte + 1, _MORE, 0)
        written[ends[has] - lengths[has] + byte] = ((numbers[has] >> (_BITS * byte)) & (_MORE - 1)) | more
    return written.tobytes()


def _read(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(data < _MORE)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise InputError("a list of tokens ends in the middle of a number")
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    lengths = ends - starts + 1
    if (lengths > _LONGEST_NUMBER).any() or ((data[ends] == 0) & (lengths > 1)).any():
        raise InputError("a list of tokens has a number that is not written in the shortest way")
    numbers = np.zeros(len(ends), np.int64)
    for byte in range(_LONGEST_NUMBER):
        has = lengths > byte
        numbers[has] |= (data[starts[has] + byte].astype(np.int64) & (_MORE - 1)) << (_BITS * byte)
    return numbers
