"""Each query head reads the pages whose bounds promise most: the cache of Quest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import FunctionProto

from kvc_trt.graph.caches.hybrid import prefill
from kvc_trt.graph.caches.prompt import compact_body
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import function as functions
from kvc_trt.operators import quest_attention
from kvc_trt.operators.emitter import Value
from kvc_trt.operators.shapes import Layout

__all__ = ["bodies", "decode", "prefill"]


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcQuestAttention."""
    rule, kinds = site.parameters, ("k_cache", "v_cache", "bounds")
    state = [f"{kind}.{site.name}" for kind in kinds]
    outputs = [step.attended, *(f"{kind}_out.{site.name}" for kind in kinds), f"selected.{site.name}"]
    functions.call(
        layers.emit, quest_attention.NAME, [step.query, step.key, step.value, *state, step.lengths], outputs,
        page_size=rule.page_size, top_k=rule.top_k, token_budget=rule.token_budget, dense_until=rule.dense_until,
    )  # fmt: skip
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcQuestAttention and KvcCompact."""
    shape = head_shape(layers.config, parameters)
    layout = Layout(shape, parameters.capacity, parameters.num_pages(), layers.weights.dtype)
    return {
        quest_attention.NAME: lambda: quest_attention.quest_attention(layout),
        **compact_body(layers, parameters),
    }
