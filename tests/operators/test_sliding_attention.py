"""Attention over a prompt, and from a turn to a ring, where each token sees the last ones alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.operators.attention.sliding_attention import SLIDING_ATTENTION
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.operators.turns.extend_sliding import EXTEND_SLIDING_ATTENTION
from kvc_trt.reference.dense import causal_attention
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close

LAYOUT = Layout(HeadShape(None, None, 0))
LENGTH = 384


def sliding(window: int) -> SingleNode:
    return SingleNode(SLIDING_ATTENTION.body(LAYOUT), {"window": window})


def prompt() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return normal(0, 1, 8, LENGTH, 16), normal(1, 1, 2, LENGTH, 16), normal(2, 1, 2, LENGTH, 16)


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 300, LENGTH, 1000])
def test_each_token_of_a_prompt_sees_the_last_ones(window: int) -> None:
    expected = causal_attention(*(torch.from_numpy(part[0]).double() for part in prompt()), window=window)
    assert_close(sliding(window)(*prompt())["o"], expected[None].numpy(), 2e-6)


@pytest.mark.parametrize("last", [128, 256])
def test_the_last_queries_alone_get_the_same_bits(last: int) -> None:
    node, (query, keys, values) = sliding(70), prompt()
    some = np.ascontiguousarray(query[:, :, -last:])
    np.testing.assert_array_equal(node(some, keys, values)["o"], node(query, keys, values)["o"][:, :, -last:])


def test_right_padding_never_reaches_a_real_token() -> None:
    node, arrays = sliding(70), prompt()
    clean = node(*arrays)["o"][:, :, :130]
    for array in arrays:
        array[:, :, 130:] = 1e4
    np.testing.assert_array_equal(node(*arrays)["o"][:, :, :130], clean)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.lists(st.integers(0, 130), min_size=1, max_size=3), st.integers(1, 150))
def test_a_turn_sees_of_a_ring_what_is_within_the_window(window: int, stored: list[int], new: int) -> None:
    """The ring of a row that has stored n tokens holds token i in slot i modulo the window."""
    before = np.array(stored)
    used = np.minimum(before, window)
    text = [normal(seed, len(stored), 2, int(before.max()) + new, 8) for seed in (1, 2)]
    tables = [np.zeros((len(stored), 2, int(used.max()) + new, 8), np.float32) for _ in text]
    for whole, table in zip(text, tables, strict=True):
        for row, count in enumerate(stored):
            for token in range(max(0, count - window), count):
                table[row, :, token % window] = whole[row, :, token]
            table[row, :, used[row] : used[row] + new] = whole[row, :, count : count + new]
    query = normal(3, len(stored), 4, new, 8)
    body = EXTEND_SLIDING_ATTENTION.body(LAYOUT)
    found = SingleNode(body, {"capacity": window})(query, *tables, before)["o"]
    keys, values = (torch.from_numpy(whole).double() for whole in text)
    expected = reference.extend_attention(
        torch.from_numpy(query).double(), keys, values, torch.from_numpy(before),
        torch.full((len(stored),), new), window=window,
    )  # fmt: skip
    assert_close(found, expected.numpy(), 2e-6)
