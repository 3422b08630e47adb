"""Every token is scored by a few channels, the best are read: the cache of SparQ, keys in both layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import FunctionProto

from kvc_trt.graph.caches.prompt import PromptLayer, store_whole
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import function as functions
from kvc_trt.operators import sparq_attention
from kvc_trt.operators.emitter import Value
from kvc_trt.operators.shapes import Layout, float32


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """The whole prompt, its keys once more channel by channel, and the sum of its values."""
    emit, name = layers.emit, site.name
    store_whole(layers, prompt, site)
    emit.Transpose(f"k_cache.{name}", perm=[0, 1, 3, 2], outputs=[f"channels.{name}"])
    emit.ReduceSum(float32(emit, f"v_cache.{name}"), [2], keepdims=0, outputs=[f"value_sum.{name}"])


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcSparqAttention."""
    rule, kinds = site.parameters, ("k_cache", "v_cache", "channels", "value_sum")
    state = [f"{kind}.{site.name}" for kind in kinds]
    outputs = [step.attended, *(f"{kind}_out.{site.name}" for kind in kinds), f"selected.{site.name}"]
    functions.call(
        layers.emit, sparq_attention.NAME, [step.query, step.key, step.value, *state, step.lengths], outputs,
        top_r=rule.top_r, top_k=rule.top_k, token_budget=rule.token_budget, dense_until=rule.dense_until,
    )  # fmt: skip
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcSparqAttention."""
    layout = Layout(head_shape(layers.config, parameters), parameters.capacity, None, layers.weights.dtype)
    reallocate = parameters.reallocate
    return {sparq_attention.NAME: lambda: sparq_attention.sparq_attention(layout, reallocate=reallocate)}
