"""The first tokens and the last ones: the cache of StreamingLLM and of sliding windows, a ring behind the sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from onnx import FunctionProto, TensorProto

from kvc_trt.graph.caches.prompt import PromptLayer
from kvc_trt.graph.caches.step import StepLayer, head_shape
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.operators import function as functions
from kvc_trt.operators import recent_attention
from kvc_trt.operators.emitter import Value
from kvc_trt.operators.shapes import size


def prefill(layers: Layers, prompt: PromptLayer, site: CacheSite) -> None:
    """The first and the last tokens of each row, ascending, so that the slot behind the sinks is overwritten first."""
    emit, rule = layers.emit, site.parameters
    rows = emit.Unsqueeze(prompt.batch.lengths, [1])
    slots = np.arange(rule.capacity)
    skipped = emit.Mul(emit.Max(emit.Sub(rows, rule.capacity), 0), (slots >= rule.sinks).astype(np.int64))
    index = emit.Add(skipped, slots)
    stored = emit.Less(slots, rows)
    emit.Min(prompt.batch.lengths, rule.capacity, outputs=[f"lengths.{site.name}"])
    keys = prompt.plain_keys() if rule.positions == "cache" else prompt.keys
    each_head = emit.Concat([1], size(emit, keys, 1), [1], axis=0)
    indices = emit.Expand(emit.Unsqueeze(emit.Where(stored, index, -1), [1]), each_head)
    emit.Cast(indices, to=TensorProto.INT32, outputs=[f"indices.{site.name}"])
    place = emit.Unsqueeze(emit.Max(indices, 0), [3])
    occupied = emit.Unsqueeze(stored, [1, 3])
    for rows_of, name in ((keys, "k_cache"), (prompt.values, "v_cache")):
        kept, zero = emit.GatherND(rows_of, place, batch_dims=2), emit.CastLike(np.float32(0), rows_of)
        emit.Where(occupied, kept, zero, outputs=[f"{name}.{site.name}"])


def decode(layers: Layers, step: StepLayer, site: CacheSite) -> Value:
    """KvcRecentAttention, or KvcRankedRecentAttention where positions are counted in the cache."""
    rule = site.parameters
    caches = [f"k_cache.{site.name}", f"v_cache.{site.name}"]
    outputs = [step.attended, f"k_cache_out.{site.name}", f"v_cache_out.{site.name}"]
    attributes = {"capacity": rule.capacity, "sinks": rule.sinks}
    if rule.positions == "cache":
        query, key = step.plain()
        inputs = [query, key, step.value, *caches, step.lengths, *layers.rotary_tables()]
        functions.call(layers.emit, recent_attention.RANKED_NAME, inputs, outputs, **attributes)
    else:
        inputs = [step.query, step.key, step.value, *caches, step.lengths]
        functions.call(layers.emit, recent_attention.NAME, inputs, outputs, **attributes)
    return step.attended


def bodies(layers: Layers, parameters: PolicyParameters) -> Mapping[str, Callable[[], FunctionProto]]:
    """KvcRecentAttention and KvcRankedRecentAttention."""
    shape = head_shape(layers.config, parameters)
    return {
        recent_attention.NAME: lambda: recent_attention.recent_attention(shape),
        recent_attention.RANKED_NAME: lambda: recent_attention.ranked_recent_attention(shape),
    }
