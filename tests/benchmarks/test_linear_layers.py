"""The benchmark of linear layers runs what it says beside the native operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.linear_layers import by_bodies
from kvc_trt.engine.program import read_graph
from kvc_trt.models.config import Attention, Linear, ModelDescription
from tests.small_model import SMALL

PART = Linear(key_heads=2, value_heads=4, key_size=16, value_size=8, kernel=4)
MODEL = replace(SMALL, description=ModelDescription(attention=(Attention(linear=PART), Attention(gated=True))))
DELTA = {"KvcDeltaRule", "KvcDeltaStep"}


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_bodies_stand_in_place_of_the_operators_of_linear_layers(graph, make_program):
    whole = read_graph(getattr(make_program("rocketkv", model=MODEL), graph))
    inlined = by_bodies(whole)
    operators = [{node.op_type for node in one.graph.node} for one in (whole, inlined)]
    assert operators[0] & DELTA
    assert not operators[1] & DELTA
    assert {"KvcCompact", "KvcHybridAttention"} & operators[1]
