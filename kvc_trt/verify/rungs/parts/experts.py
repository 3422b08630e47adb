"""The operators of experts, alone, beside the reference; products with matrices in 4 or 8 bits within their bound.

An executor may round the input of such a product to 8 bits per block (`quantised.py`), and then does so twice
one after the other: the input of gate and up, and their result. The bound follows the error of the first rounding
through the gate: silu has a slope of at most 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from kvc_trt.backends.harness import Array, EngineOperator
from kvc_trt.models.config import ClampedGate, Experts
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.quantisation import BLOCK, dequantise, quantise
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, ROUTER, ROUTER_BIAS
from kvc_trt.operators.experts import GATE_GAIN, GATE_LIMIT, MATRICES
from kvc_trt.reference.model.experts import mixed, routed
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.rankings.array_errors import maximum_error

_HIDDEN, _INNER, _TOKENS = 96, 64, 9
_LEVELS, _SLOPE = 127, 1.1
_ROUNDING = 1e-5
"""Differences that the order of sums in float32 explains, relative to the largest result."""


class _OfExperts(EngineOperator, Protocol):
    @property
    def attributes(self) -> Mapping[str, int]:
        """The attributes that the engine's nodes share."""


@dataclass(frozen=True)
class ExpertCase:
    """Inputs of one call, and the same weights as the reference reads them."""

    part: Experts
    bits: int | None
    inputs: Mapping[str, Array]
    """The operator's inputs by name, in its order."""
    x: Array
    weights: Mapping[str, Array]
    """float32 tensors by the names of a layer."""
    clamped: ClampedGate | None = None

    @property
    def expected(self) -> Array:
        """The reference's result, float32 [tokens,hidden]."""
        weights = {name: torch.from_numpy(value) for name, value in self.weights.items()}
        result: Array = mixed(weights, torch.from_numpy(self.x), self.part, self.clamped).numpy()
        return result

    @property
    def bound(self) -> Array:
        """The most that rounding inputs to 8 bits changes each result; 0 where nothing is rounded."""
        if self.bits is None:
            return np.zeros_like(self.x)
        part, x = self.part, self.x
        logits = torch.from_numpy(x @ self.weights[ROUTER].T + self.weights.get(ROUTER_BIAS, 0))
        chosen, shares = (one.numpy() for one in routed(logits, part.chosen, normalised=part.normalised))
        stacks = [self.weights[name].reshape(part.count, -1, self.weights[name].shape[1]) for name in EXPERT_MATRICES]
        result = np.zeros_like(x)
        for token, place in np.ndindex(chosen.shape):
            gate, up, down = (stack[chosen[token, place]] for stack in stacks)
            biases = self._biases_of(chosen[token, place])
            result[token] += shares[token, place] * _bound_of(x[token], gate, up, down, biases, self.clamped)
        return result

    def _biases_of(self, expert: int) -> tuple[Array, Array]:
        """Return the biases of an expert's gate and up; 0 if there are none."""
        names = EXPERT_BIASES[:2]
        if self.clamped is None:
            return np.float32(0), np.float32(0)  # type: ignore[return-value]
        gate, up = (self.weights[name].reshape(self.part.count, -1)[expert] for name in names)
        return gate, up


def expert_case(
    part: Experts, rng: np.random.Generator, *, tokens: int = _TOKENS, hidden: int = _HIDDEN, bits: int | None = None,
    dtype: str = "float32", ties: bool = False, clamped: ClampedGate | None = None,
) -> ExpertCase:  # fmt: skip
    """Draw a case; with `ties` inputs and router are small integers, so that many logits are exactly equal."""
    kind = numpy_dtype(dtype)
    sides = {"gate": (part.size, hidden), "up": (part.size, hidden), "down": (hidden, part.size)}
    x, router = (rng.standard_normal(shape) for shape in ((tokens, hidden), (part.count, hidden)))
    if ties:
        x, router = np.rint(x), np.rint(router)
        router[:, 4:] = 0
    else:
        router = router / hidden**0.5
    x, router = x.astype(kind), router.astype(kind)
    inputs: dict[str, Array] = {"x": x, "router": router}
    weights: dict[str, Array] = {ROUTER: router.astype(np.float32)}
    for matrix, name in zip(MATRICES, EXPERT_MATRICES, strict=True):
        rows, columns = sides[matrix]
        values = (rng.standard_normal((part.count * rows, columns)) / columns**0.5).astype(np.float32)
        if bits is None:
            values = values.astype(kind)
            inputs[matrix] = values.reshape(part.count, rows, columns)
        else:
            packed, scales = quantise(values, bits)
            values = dequantise(packed, scales, bits)
            for ending, stored in (("packed", packed), ("scales", scales)):
                inputs[f"{matrix}_{ending}"] = stored.reshape(part.count, rows, *stored.shape[1:])
        weights[name] = values.astype(np.float32)
    if clamped is not None:
        sizes: dict[str, tuple[int, ...]] = {"router_bias": (part.count,)}
        for matrix, name in zip(MATRICES, EXPERT_MATRICES, strict=True):
            sizes[f"{matrix}_bias"] = (part.count, len(weights[name]) // part.count)
        drawn = {name: rng.standard_normal(shape).astype(kind) for name, shape in sizes.items()}
        if ties:
            drawn["router_bias"][:] = 0
        inputs |= drawn
        numbers = {GATE_LIMIT: clamped.limit, GATE_GAIN: clamped.gain}
        inputs |= {name: np.array([value], np.float32) for name, value in numbers.items()}
        names = zip((ROUTER_BIAS, *EXPERT_BIASES), drawn.values(), strict=True)
        weights |= {name: values.astype(np.float32).reshape(-1) for name, values in names}
    return ExpertCase(part, bits, inputs, x.astype(np.float32), weights, clamped)


def check_experts(
    operator: EngineOperator, dtype: str, bar: float, seed: int, clamped: ClampedGate | None = None
) -> list[Check]:
    """Run the operator on random and on tying inputs, with the engine's attributes and a few more experts.

    `clamped` is the gate of the engine's experts, where it is not that of SwiGLU."""
    numbers = cast(_OfExperts, operator).attributes
    chosen, bits = numbers["chosen"], numbers.get("bits")
    part = Experts(chosen + 3, chosen, _INNER, normalised=bool(numbers["normalised"]))
    where, error = f"{operator.nodes} nodes: random, equal logits", 0.0
    for ties in (False, True):
        rng = np.random.default_rng([seed, ties])
        case = expert_case(part, rng, bits=bits, dtype=dtype if bits is None else "float32", ties=ties, clamped=clamped)
        (found,) = operator.run(**case.inputs)
        error = max(error, case_error(case, found))
    name = f"{operator.name} values" if bits is None else f"{operator.name} error / bound"
    return [at_most(name, "2 cases", error, bar if bits is None else 1.0, note=where)]


def case_error(case: ExpertCase, found: Array) -> float:
    """Return the largest error, relative to the largest result; of quantised matrices as a share of its bound."""
    expected = case.expected
    if case.bits is None:
        return maximum_error(found, expected)
    bound = case.bound + _ROUNDING * max(1.0, float(np.abs(expected).max(initial=0)))
    return float((np.abs(found - expected) / bound).max(initial=0))


def _bound_of(
    x: Array, gate: Array, up: Array, down: Array, biases: tuple[Array, Array], clamped: ClampedGate | None
) -> Array:
    """Return the bound of one expert's result for one token, [hidden]. Clamps move nothing apart."""
    step = _half_steps(x)
    gate_error, up_error = np.abs(gate) @ step, np.abs(up) @ step
    gates, ups, gain = gate @ x + biases[0], up @ x + biases[1], 1.0
    if clamped is not None:
        limit, gain = clamped.limit, clamped.gain
        gates, ups = np.minimum(gates, limit), np.clip(ups, -limit, limit) + 1
    activated = gates / (1 + np.exp(-gain * gates))
    error = _SLOPE * gate_error * (np.abs(ups) + up_error) + np.abs(activated) * up_error
    largest = np.abs(activated * ups) + error
    bound: Array = np.abs(down) @ (error + _half_steps(largest))
    return bound


def _half_steps(x: Array) -> Array:
    """Return half a step of rounding, for each element: a step is its block's largest magnitude / 127."""
    steps: Array = np.repeat(np.abs(x).reshape(-1, BLOCK).max(axis=1) / _LEVELS / 2, BLOCK)
    return steps
