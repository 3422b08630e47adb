"""The tie rule: larger first, among equals the lower index, NaN last."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kvc_trt.reference.selection import best, best_ascending


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf")]), min_size=1, max_size=40), st.data())
def test_order_of_equals(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(scores)))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    assert best(torch.tensor(scores), k).tolist() == expected
    assert best_ascending(torch.tensor(scores), k).tolist() == sorted(expected)


def test_nan_is_below_every_finite_value() -> None:
    scores = torch.tensor([torch.nan, -3e38, torch.nan, 1.0, -1e30])
    assert best(scores, 5).tolist() == [3, 4, 1, 0, 2]


def test_more_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"scores has shape \[3\]; cannot take k=4"):
        best(torch.zeros(3), 4)
