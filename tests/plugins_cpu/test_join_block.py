"""KvcJoinBlock by the native library: the body's tables, with zeros behind the last token of a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from tests.graph.small_models import SingleNode, normal
from tests.plugins_cpu.native_node import NativeNode

BODY = JOIN_BLOCK.body(Layout(HeadShape(None, None, 0)))
CAPACITY = 50


def turn(rows: list[tuple[int, int]], block: int, seed: int = 0) -> list[np.ndarray]:
    """New keys and values, caches, stored and new tokens of every row."""
    batch = len(rows)
    new = [normal(seed + part, batch, 2, block, 12) for part in (0, 1)]
    caches = [normal(seed + part, batch, 2, CAPACITY, 12) for part in (2, 3)]
    return [*new, *caches, *(np.array(counts) for counts in zip(*rows, strict=True))]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, CAPACITY), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_the_table_holds_stored_then_new_tokens(
    library: Path, rows: list[tuple[int, int]], padding: int, seed: int
) -> None:
    arrays = turn(rows, max(new for _, new in rows) + padding, seed)
    found, body = NativeNode(BODY, {}, library, 2)(*arrays), SingleNode(BODY, {})(*arrays)
    np.testing.assert_array_equal(found["joined_lengths"], body["joined_lengths"])
    for name in ("k", "v"):
        assert found[name].shape == body[name].shape
        for row, (stored, new) in enumerate(rows):
            np.testing.assert_array_equal(found[name][row, :, : stored + new], body[name][row, :, : stored + new])
            assert not found[name][row, :, stored + new :].any()


@pytest.mark.parametrize(
    ("row", "message"),
    [((-1, 3), "cache_lengths: expected 0..50, found -1"), ((51, 3), "cache_lengths: expected 0..50, found 51"),
     ((3, 0), "lengths: expected 1..7, found 0"), ((3, 8), "lengths: expected 1..7, found 8")],
)  # fmt: skip
def test_lengths_that_no_table_holds_are_refused(library: Path, row: tuple[int, int], message: str) -> None:
    with pytest.raises(Exception, match=message):
        NativeNode(BODY, {}, library)(*turn([row], 7))
