"""SqueezeAttention inside the prefill graph: one cosine per layer, then budgets, then all layers are trimmed."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.base.graph_context import CacheLayer, PromptBatch
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.operators.compaction.layer_budgets import LAYER_BUDGETS
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.shapes import count_to, float32, size

_SMALLEST_NORM = 1e-16
"""Smallest product of two squared norms, so that a row of zeros gives no NaN."""


def cosine(emit: Emitter, prompt: PromptBatch, before: Value, after: Value) -> Value:
    """Return the mean cosine between two residual streams [T,hidden] over each prompt's tokens, FLOAT [1,B]."""
    before, after = float32(emit, before), float32(emit, after)
    product = emit.ReduceSum(emit.Mul(before, after), [1], keepdims=0)
    squares = [emit.ReduceSumSquare(stream, [1], keepdims=0) for stream in (before, after)]
    per_token = emit.Div(product, emit.Sqrt(emit.Max(emit.Mul(*squares), _SMALLEST_NORM)))
    by_row = emit.Reshape(per_token, prompt.grid)
    real = emit.Less(count_to(emit, size(emit, by_row, 1)), emit.Unsqueeze(prompt.lengths, [1]))
    total = emit.ReduceSum(emit.Where(real, by_row, 0.0), [1], keepdims=0)
    return str(emit.Unsqueeze(emit.Div(total, emit.Cast(prompt.lengths, to=TensorProto.FLOAT)), [0]))


def trim_layers(
    layers: Layers, parameters: PolicyParameters, prompt: PromptBatch, sites: Sequence[CacheSite],
    cosines: Sequence[Value],
) -> None:  # fmt: skip
    """Write the caches of all `sites` whose layers have one of the `cosines`, in the same order."""
    emit, division = layers.emit, parameters.division
    assert division is not None, "its budgets are set for each prompt"
    tokens = prompt.lengths if division.of_prompt else emit.Expand([division.most], emit.Shape(prompt.lengths))
    inputs = {"cosines": emit.Concat(*cosines, axis=0), "prompt_lengths": tokens}
    budgets = LAYER_BUDGETS.call(emit, inputs, budget=division.budget, least=division.least, most=division.most)[
        "budgets"
    ]
    for row, site in enumerate(sites):
        rule = site.parameters
        cache = CacheLayer(emit, layers.config, rule, site.layer, site.name)
        rule.eviction.trim(cache, emit.Gather(budgets, row), prompt.lengths, bounds=rule.has_pages)
