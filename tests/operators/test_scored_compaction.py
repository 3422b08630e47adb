"""An operator that a rank makes: the rest of its schema and its body is the same for every method."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.operators.attention.heavy_hitter_attention import RECENT, SLOT_POSITIONS
from kvc_trt.operators.compaction.compact import COMPACT
from kvc_trt.operators.compaction.keep_best import among_row
from kvc_trt.operators.compaction.scored import scored_compaction
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.shapes import HeadShape, Layout, count_to, float32, size
from kvc_trt.operators.tensors import BOUNDS
from tests.graph.small_models import SingleNode, normal

LENGTHS, BUDGET, CAPACITY = np.array([9, 4, 2]), 4, 6
PAGING = {"page_size": 2, "fp8_bounds": 0}


def even_first(emit, tables):
    """Even positions before odd ones."""
    columns = count_to(emit, size(emit, "k", 2))
    even = float32(emit, emit.Equal(emit.Mod(columns, 2), 0))
    by_head = emit.Expand(even, emit.Concat(emit.Shape("k", end=2), [1], axis=0))
    return among_row(emit, by_head, emit.Less(columns, emit.Reshape("prompt_lengths", [-1, 1, 1])))


def made(**more):
    return scored_compaction("KvcCompactEven", "Keep even positions.", even_first, **more)


def names(parts):
    return [one.name for one in parts]


@pytest.mark.parametrize(("state", "more"), [(BOUNDS, PAGING), (SLOT_POSITIONS, {})], ids=["bounds", "slot_positions"])
def test_the_tokens_of_highest_rank_stay(monkeypatch, state, more):
    operator = made(state=state)
    monkeypatch.setitem(OPERATORS, operator.name, operator)
    body = operator.body(Layout(HeadShape(None, None, 0), dtype="float32"))
    node = SingleNode(body, {"prompt_budget": BUDGET, "capacity": CAPACITY, **more})
    keys, values = (normal(seed, 3, 2, 9, 8) for seed in range(2))
    found = node(keys, values, LENGTHS)
    expected = [[0, 2, 4, 6, -1, -1], [0, 1, 2, 3, -1, -1], [0, 1, -1, -1, -1, -1]]
    assert found["indices"][:, 0].tolist() == found["indices"][:, 1].tolist() == expected
    assert found["cache_lengths"].tolist() == [4, 4, 2]
    stored = found["indices"][..., None] >= 0
    rows = np.maximum(found["indices"], 0)[..., None]
    for name, source in (("k_cache", keys), ("v_cache", values)):
        np.testing.assert_array_equal(found[name], np.where(stored, np.take_along_axis(source, rows, axis=2), 0))
    if state is SLOT_POSITIONS:
        np.testing.assert_array_equal(found["slot_positions"], found["indices"])
    else:
        np.testing.assert_array_equal(found["bounds"][0, :, :8, 0], keys[0][:, [0, 2]].max(axis=1))


def test_inputs_of_a_rank_are_added_to_the_schema():
    operator = made(state=SLOT_POSITIONS, inputs=(COMPACT.inputs[0],), extra=(RECENT,), budget="all heads alike")
    assert [one.name for one in operator.inputs] == ["q_window", "k", "v", "prompt_lengths"]
    assert [one.name for one in operator.outputs] == [
        "k_cache",
        "v_cache",
        "slot_positions",
        "cache_lengths",
        "indices",
    ]
    assert [one.name for one in operator.attributes] == ["prompt_budget", "capacity", "recent"]
    assert operator.attributes[0].summary == "all heads alike"


def test_one_with_page_bounds_differs_from_kvc_compact_by_the_rank_alone():
    operator = made()
    assert names(operator.outputs) == names(COMPACT.outputs)
    assert [name for name in names(COMPACT.attributes) if name != "pool_kernel"] == names(operator.attributes)
    assert operator.formulas == COMPACT.formulas
