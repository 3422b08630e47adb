"""SqueezeAttention's division as an operator: the reference's numbers, exactly, for every row on its own."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.operators.compaction.layer_budgets import LAYER_BUDGETS
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.reference.model.squeeze import squeeze
from tests.graph.small_models import SingleNode

SHARES = (0.2, 0.35, 1.0)
BUDGET, LEAST, MOST = 40, 8, 80


@lru_cache
def operator(layers: int, share: float) -> SingleNode:
    layout = Layout(HeadShape(None, None, 0), numbers={"budgeted_layers": layers, "squeeze_share": share})
    return SingleNode(LAYER_BUDGETS.body(layout), {"budget": BUDGET, "least": LEAST, "most": MOST})


@st.composite
def cosines(draw) -> np.ndarray:
    """Eighths repeat often and divide exactly; thirds round."""
    layers, unit = draw(st.sampled_from([1, 2, 3, 5, 9])), draw(st.sampled_from([8, 3]))
    numbers = st.lists(st.integers(-8, 8), min_size=2, max_size=2)
    return np.array(draw(st.lists(numbers, min_size=layers, max_size=layers)), np.float32) / np.float32(unit)


@settings(deadline=None, max_examples=60)
@given(cosines(), st.sampled_from(SHARES), st.integers(1, 200), st.integers(1, 200))
def test_the_operator_divides_as_the_reference(table: np.ndarray, share: float, one: int, other: int) -> None:
    found = operator(len(table), share)(table, np.array([one, other]))["budgets"]
    for row, length in enumerate((one, other)):
        expected = squeeze(
            table[:, row].tolist(), BUDGET, share=share, minimum=LEAST, maximum=min(MOST, length)
        ).budgets
        assert tuple(found[:, row]) == expected
