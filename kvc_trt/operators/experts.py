"""Operators of a feed-forward block of experts: a router chooses some for each token, and only those are computed.

A token's logits are its products with the router's rows. The `chosen` largest of them choose its experts, equal ones
the lowest index first. An expert's weight is its part of the softmax over all logits, divided by the sum of the chosen
parts if `normalised`. The result is the sum of weight * down(silu(gate(x)) * up(x)) over a token's experts. Experts
with a clamped gate (`ClampedGate`) have biases, and so has the router; its limit and gain are inputs.

The body takes the distinct experts of all tokens in ascending order, one after the other: it gathers an expert's
matrices and its tokens, so that a step reads the weights of the experts it chooses and of no others. It computes in
float32 whatever the tensors' type. An expert's tokens are followed by a copy of the first one: a product with a single
row adds up in another order than one with several, and a token's result must not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.operators.dimensions import INT32_MAX
from kvc_trt.operators.quantised_linear import BITS, BLOCK_SIZE, WIDE_INPUT, unpacked
from kvc_trt.operators.schema import CACHE, FLOAT, FLOAT16, UINT8, Attribute, Element, Operator, Tensor
from kvc_trt.operators.shapes import Layout, float32, one

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

CHOSEN = Attribute("chosen", 1, INT32_MAX, "experts of a token")
NORMALISED = Attribute("normalised", 0, 1, "1: the weights of a token's experts sum to one")
MATRICES = ("gate", "up", "down")
GATE_LIMIT, GATE_GAIN = "gate_limit", "gate_gain"
"""Inputs that hold the numbers of a clamped gate: no INT attribute can."""

Matrix = Callable[["Emitter", str, "Value"], "Value"]
"""Writes the float32 matrix [out,in] of one expert: emitter, name of the operator's matrix, index of the expert."""


def _write(emit: Emitter, _layout: Layout, *, clamped: bool = False) -> Mapping[str, Value]:
    def matrix(inner: Emitter, name: str, expert: Value) -> Value:
        return float32(inner, inner.Gather(name, expert))

    return {"y": emit.CastLike(_mixed(emit, matrix, clamped=clamped), "x")}


def _write_quantised(emit: Emitter, _layout: Layout, *, clamped: bool = False) -> Mapping[str, Value]:
    bits = emit.attribute("bits")

    def matrix(inner: Emitter, name: str, expert: Value) -> Value:
        packed, scales = (inner.Gather(f"{name}_{part}", expert) for part in ("packed", "scales"))
        return unpacked(inner, packed, scales, bits)

    return {"y": emit.Identity(_mixed(emit, matrix, clamped=clamped))}


def _clamped(emit: Emitter, gate: Value, up: Value) -> Value:
    """Write what the last matrix multiplies, FLOAT [n,Inner], of gate and up, for experts with a clamped gate."""
    gate = emit.Min(gate, GATE_LIMIT)
    up = emit.Max(emit.Min(up, GATE_LIMIT), emit.Neg(GATE_LIMIT))
    own = emit.Mul(gate, emit.Sigmoid(emit.Mul(gate, GATE_GAIN)))
    return str(emit.Mul(own, emit.Add(up, np.float32(1))))


def _gated(emit: Emitter, gate: Value, up: Value) -> Value:
    """Write what the last matrix multiplies, FLOAT [n,Inner], of gate and up, for experts with SwiGLU's gate."""
    return str(emit.Mul(emit.Mul(gate, emit.Sigmoid(gate)), up))


def _mixed(emit: Emitter, matrix: Matrix, *, clamped: bool) -> Value:
    """Write the sum over every token's experts, FLOAT [T,In]; if `clamped`, router and matrices have biases."""
    x = float32(emit, "x")
    experts, weights = _routed(emit, x, biased=clamped)
    found = emit.Unique(emit.Reshape(experts, [-1]), sorted=1)

    def add(inner: Emitter, iteration: Value, total: Value) -> Value:
        expert = inner.Gather(found, iteration)
        places = inner.Transpose(inner.NonZero(inner.Equal(experts, expert)), perm=[1, 0])
        tokens = inner.Slice(places, [0], [1], [1])
        again = inner.Concat(tokens, inner.Slice(tokens, [0], [1], [0]), axis=0)
        rows = inner.GatherND(x, again)

        def multiply(values: Value, name: str) -> Value:
            bias = [float32(inner, inner.Gather(f"{name}_bias", expert))] if clamped else []
            return str(inner.Gemm(values, matrix(inner, name, expert), *bias, transB=1))

        gate, up = (multiply(rows, name) for name in MATRICES[:2])
        result = multiply((_clamped if clamped else _gated)(inner, gate, up), MATRICES[2])
        own = inner.Slice(result, [0], [-1], [0])
        weighted = inner.Mul(own, inner.Unsqueeze(inner.GatherND(weights, places), [1]))
        return str(inner.ScatterND(total, tokens, weighted, reduction="add"))

    return emit.accumulate(emit.Size(found), emit.Mul(x, np.float32(0)), add)


def _routed(emit: Emitter, x: Value, *, biased: bool) -> tuple[Value, Value]:
    """Write the experts of each token, INT64 [T,chosen], and their weights, FLOAT."""
    bias = [float32(emit, "router_bias")] if biased else []
    logits = emit.Gemm(x, float32(emit, "router"), *bias, transB=1)
    _, experts = emit.TopK(logits, one(emit, emit.attribute("chosen")), axis=1, outputs=2)
    parts = emit.GatherElements(emit.Softmax(logits, axis=1), experts, axis=1)
    total = emit.ReduceSum(parts, [1], keepdims=1)
    return experts, str(emit.Div(parts, emit.Where(emit.Equal(emit.attribute("normalised"), 1), total, np.float32(1))))


def _matrix(name: str) -> Tensor:
    return Tensor(name, CACHE, ("Experts", *_sides(name)))


def _quantised_matrix(name: str) -> tuple[Tensor, Tensor]:
    rows, columns = _sides(name)
    blocks = ("Experts", rows, f"{columns}Blocks")
    return Tensor(f"{name}_packed", UINT8, (*blocks, "Bytes")), Tensor(f"{name}_scales", FLOAT16, blocks)


def _sides(name: str) -> tuple[str, str]:
    return ("In", "Inner") if name == "down" else ("Inner", "In")


EXPERTS = Operator(
    name="KvcExperts",
    summary="A feed-forward block of experts, of which a router chooses some for each token.",
    inputs=(
        Tensor("x", CACHE, ("T", "In")),
        Tensor("router", CACHE, ("Experts", "In")),
        *(_matrix(name) for name in MATRICES),
    ),
    outputs=(Tensor("y", CACHE, ("T", "In")),),
    attributes=(CHOSEN, NORMALISED),
    write=_write,
)

QUANTISED_EXPERTS = Operator(
    name="KvcQuantisedExperts",
    summary="KvcExperts with matrices in 4 or 8 bits.",
    inputs=(
        Tensor("x", FLOAT, ("T", "In")),
        Tensor("router", FLOAT, ("Experts", "In")),
        *(part for name in MATRICES for part in _quantised_matrix(name)),
    ),
    outputs=(Tensor("y", FLOAT, ("T", "In")),),
    attributes=(CHOSEN, NORMALISED, BITS, BLOCK_SIZE, WIDE_INPUT),
    write=_write_quantised,
)


def _of_clamped(element: Element) -> tuple[Tensor, ...]:
    """Return the inputs that the operators with a clamped gate have in addition."""
    of_matrices = (Tensor(f"{name}_bias", element, ("Experts", _sides(name)[0])) for name in MATRICES)
    numbers = (Tensor(name, FLOAT, ("1",)) for name in (GATE_LIMIT, GATE_GAIN))
    return Tensor("router_bias", element, ("Experts",)), *of_matrices, *numbers


CLAMPED_EXPERTS = replace(
    EXPERTS,
    name="KvcClampedExperts",
    summary="KvcExperts with biases and a clamped gate.",
    inputs=(*EXPERTS.inputs, *_of_clamped(CACHE)),
    write=partial(_write, clamped=True),
)

QUANTISED_CLAMPED_EXPERTS = replace(
    QUANTISED_EXPERTS,
    name="KvcQuantisedClampedExperts",
    summary="KvcClampedExperts with matrices in 4 or 8 bits.",
    inputs=(*QUANTISED_EXPERTS.inputs, *_of_clamped(FLOAT)),
    write=partial(_write_quantised, clamped=True),
)

OF_EXPERTS = tuple(one.name for one in (EXPERTS, QUANTISED_EXPERTS, CLAMPED_EXPERTS, QUANTISED_CLAMPED_EXPERTS))
"""The operators of feed-forward blocks of experts."""
