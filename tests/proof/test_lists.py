from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.proof.lists import MOST_HEADS, decode, digest_at, encode

ASCENDING = st.lists(st.integers(0, 200_000), max_size=12, unique=True).map(sorted)
ANY_ORDER = st.lists(st.integers(0, 2**31 - 1), max_size=8)
HEADS = st.lists(st.one_of(ASCENDING, ANY_ORDER), min_size=1, max_size=5)


def table(rows, extra=0):
    lists = np.full((len(rows), max(map(len, rows), default=0) + extra), -1, np.int32)
    for head, row in enumerate(rows):
        lists[head, : len(row)] = row
    return lists


def written(number):
    """One number as the format says, without a loop over arrays."""
    low, high = number % 128, number // 128
    return bytes([low]) if high == 0 else bytes([low | 128]) + written(high)


@given(HEADS, st.integers(0, 3))
def test_the_bytes_are_those_of_the_format(rows, extra):
    expected = written(len(rows))
    for row in rows:
        expected += written(len(row))
        for before, entry in zip([-1, *row], row, strict=False):
            step = entry - before - 1
            expected += written(2 * step if step >= 0 else -2 * step - 1)
    assert encode(table(rows, extra)) == expected


@given(HEADS, st.integers(0, 3))
def test_lists_read_back(rows, extra):
    assert np.array_equal(decode(encode(table(rows, extra))), table(rows))


@given(st.binary(max_size=40))
def test_no_other_bytes_are_read_as_a_list(data):
    try:
        found = decode(data)
    except InputError:
        return
    assert encode(found) == data


def test_a_hole_in_a_list_is_kept():
    lists = np.array([[3, -1, 5, -1]])
    assert decode(encode(lists)).tolist() == [[3, -1, 5]]
    assert encode(lists) != encode(np.array([[3, 5, -1, -1]]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "of 0 heads, expected 1 to"),
        (written(MOST_HEADS + 1), f"of {MOST_HEADS + 1} heads"),
        (written(2) + written(0), "lists of 2 heads end after 1"),
        (written(1) + written(5) + written(1), "a list of 5 tokens ends after 1"),
        (written(1) + written(0) + written(0), "followed by something else"),
        (b"\x81", "in the middle of a number"),
        (b"\x81\x00\x00", "not written in the shortest way"),
        (b"\xff\xff\xff\xff\xff\x01", "not written in the shortest way"),
        (written(1) + written(1) + written(2**34), "holds a value that is no index"),
        (written(1) + written(1) + written(1), "holds a value that is no index"),
        (written(4000) + written(20_000) + written(0) * (20_000 + 3999), "expected at most"),
    ],
)
def test_hostile_bytes_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        decode(data)


def test_a_digest_is_of_its_place():
    data = encode(np.array([[1, 2]]))
    assert digest_at(3, 7, data) == hashlib.sha256(b"kvc-trt lists, cache 3, step 7\n" + data).digest()
    assert len({digest_at(cache, step, data) for cache in range(3) for step in range(3)}) == 9
