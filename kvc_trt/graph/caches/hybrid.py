"""Pages are scored by the bounds of their keys, the best are read: the cache of RocketKV and of hybrid attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import FunctionProto

from kvc_trt.graph.caches.prompt import PromptLayer, compact_body, store_compacted
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import function as functions
from kvc_trt.operators import hybrid_attention, shapes
from kvc_trt.operators.emitter import Value


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """KvcCompact also makes the page bounds; where nothing is evicted, its budget is the longest prompt."""
    store_compacted(layers, prompt, site, f"bounds.{site.name}")


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcHybridAttention."""
    rule, kinds = site.parameters, ("k_cache", "v_cache", "bounds")
    state = [f"{kind}.{site.name}" for kind in kinds]
    outputs = [step.attended, *(f"{kind}_out.{site.name}" for kind in kinds), f"selected.{site.name}"]
    functions.call(
        layers.emit, hybrid_attention.NAME, [step.query, step.key, step.value, *state, step.lengths], outputs,
        page_size=rule.page_size, top_r=rule.top_r, top_k=rule.top_k,
        token_budget=rule.token_budget, dense_until=rule.dense_until,
    )  # fmt: skip
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcHybridAttention and KvcCompact; capacity and pages are numbers in the body where all layers have the same."""
    alike = parameters.layer_budgets is None
    capacity, pages = (parameters.capacity, parameters.num_pages()) if alike else (None, None)
    layout = shapes.Layout(head_shape(layers.config, parameters), capacity, pages, layers.weights.dtype)
    return {
        hybrid_attention.NAME: lambda: hybrid_attention.hybrid_attention(layout),
        **compact_body(layers, parameters),
    }
