"""Write a linear layer (Gated DeltaNet) into the prefill, the decode or the extend graph.

Such a layer keeps the tensors `STATE` of its operators for a row. Graphs read and write them like a cache's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.graph.decoder import by_row, read, with_update
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.weights import (
    CONVOLUTION,
    DECAY,
    DECAY_BIAS,
    LINEAR_DECAY,
    LINEAR_GATE,
    LINEAR_MIXED,
    LINEAR_NORM,
    LINEAR_OUTPUT,
    LINEAR_WRITE,
)
from kvc_trt.operators.linear.delta_rule import DELTA_RULE
from kvc_trt.operators.linear.delta_step import DELTA_STEP
from kvc_trt.operators.linear.tokens import LAST_INPUTS, MEMORY, STATE
from kvc_trt.operators.tensors import updated

if TYPE_CHECKING:
    from kvc_trt.graph.layers import Layers
    from kvc_trt.methods.base.graph_context import PromptBatch, TurnBatch
    from kvc_trt.models.config import Linear
    from kvc_trt.operators.emitter import Value
    from kvc_trt.operators.schema import Operator

Shaped = Callable[["Value"], "Value"]


def prefill_linear_layer(layers: Layers, batch: PromptBatch, x: Value, layer: int) -> Value:
    """Pass prompts' residual stream [T,hidden] through a linear layer, which writes its state."""
    emit, part = layers.emit, _part(layers, layer)
    rows = emit.Shape(batch.lengths)
    shapes = {
        LAST_INPUTS.name: ([part.kernel - 1, part.channels], numpy_dtype(layers.weights.dtype).type(0)),
        MEMORY.name: ([part.value_heads, part.key_size, part.value_size], np.float32(0)),
    }
    empty = {
        name: str(emit.Expand(np.asarray(zero), emit.Concat(rows, shape, axis=0)))
        for name, (shape, zero) in shapes.items()
    }
    outputs = {updated(one).name: f"{one.name}.{layer}" for one in STATE}
    return _many_tokens(layers, batch, x, layer, empty, outputs)


def extend_linear_layer(layers: Layers, batch: TurnBatch, x: Value, layer: int) -> Value:
    """Pass turns' residual stream [T,hidden] through a linear layer, which reads and writes its state."""
    return _many_tokens(layers, batch, x, layer, *_state(layer))


def decode_linear_layer(layers: Layers, x: Value, layer: int) -> Value:
    """Pass one token of each row [B,hidden] through a linear layer, which reads and writes its state."""
    state, outputs = _state(layer)
    return _layer(layers, x, layer, (DELTA_STEP, state, outputs), _as_it_is, layers.feed_forward_joined)


def _state(layer: int) -> tuple[dict[str, Value], dict[str, str]]:
    """Return the state before by the names of an operator's inputs, and after by those of its outputs."""
    names = [updated(one).name for one in STATE]
    return {one.name: f"{one.name}.{layer}" for one in STATE}, {name: f"{name}.{layer}" for name in names}


def _many_tokens(
    layers: Layers, batch: PromptBatch, x: Value, layer: int, state: Mapping[str, Value], outputs: Mapping[str, str]
) -> Value:
    taking_in = DELTA_RULE, {**state, "lengths": batch.lengths}, outputs
    return _layer(layers, x, layer, taking_in, partial(by_row, layers, batch), layers.feed_forward)


def _layer(
    layers: Layers, x: Value, layer: int, taking_in: tuple[Operator, Mapping[str, Value], Mapping[str, str]],
    shaped: Shaped, feed_forward: Callable[[Value, str], Value],
) -> Value:  # fmt: skip
    """Write the layer around the operator that takes tokens in; `shaped` gives rows [T,...] the shape that it wants."""
    emit, name = layers.emit, f"model.layers.{layer}"
    normed = read(layers, x, f"{name}.input_layernorm")
    operator, inputs, outputs = taking_in
    mixed = layers.linear_joined(normed, [f"{name}.{one}" for one in LINEAR_MIXED])
    products = {"mixed": mixed, "write": layers.linear(normed, f"{name}.{LINEAR_WRITE}")}
    products["decay"] = layers.linear(normed, f"{name}.{LINEAR_DECAY}")
    given = {one: shaped(product) for one, product in products.items()}
    weights = {"convolution": CONVOLUTION, "decay_log": DECAY, "decay_bias": DECAY_BIAS}
    given |= {one: layers.tensor(f"{name}.{stored}") for one, stored in weights.items()}
    named = {"output": f"{name}.read", **outputs}
    found = operator.call(emit, {**given, **inputs}, named)["output"]
    part = _part(layers, layer)
    by_head = emit.Reshape(found, [-1, part.value_heads, part.value_size])
    result = layers.norm_rows(by_head, f"{name}.{LINEAR_NORM}")
    gate = layers.linear(normed, f"{name}.{LINEAR_GATE}")
    gated = emit.Mul(emit.Reshape(result, [-1, part.values]), emit.Mul(gate, emit.Sigmoid(gate)))
    update = layers.linear(gated, f"{name}.{LINEAR_OUTPUT}")
    return with_update(layers, x, normed, update, name, feed_forward)[0]


def _part(layers: Layers, layer: int) -> Linear:
    part = layers.config.attention(layer).linear
    assert part is not None, "it is linear"
    return part


def _as_it_is(rows: Value) -> Value:
    return rows
