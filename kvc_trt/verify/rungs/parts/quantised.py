"""The operators on quantised matrices, alone: rows are exactly as stored, products within the error of rounded inputs.

An input rounded to 8 bits per block is off by half a step at most, a step being the block's largest magnitude / 127.
So a product with the dequantised matrix w may be off by sum(step / 2 * |w|): the bound, which no right kernel exceeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np

from kvc_trt.backends.harness import Array, EngineOperator
from kvc_trt.models.quantisation import dequantise
from kvc_trt.operators.quantised_linear import QUANTISED_LINEAR, QUANTISED_ROWS
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.rankings.array_errors import exact

QUANTISED = (QUANTISED_LINEAR.name, QUANTISED_ROWS.name)

_LEVELS = 127
_ROWS, _TABLE, _BLOCKS = 3, 64, 4
_ROUNDING = 1.001
"""The arithmetic of both sides rounds in float32."""


class _Quantised(EngineOperator, Protocol):
    @property
    def attributes(self) -> Mapping[str, int]:
        """The attributes that the engine's nodes share."""


def check_quantised(operator: EngineOperator, seed: int) -> list[Check]:
    """Run the operator on one random matrix with the engine's attributes."""
    quantised, rng = cast(_Quantised, operator), np.random.default_rng(seed)
    where = f"{operator.nodes} nodes"
    if operator.name == QUANTISED_ROWS.name:
        return [at_most(f"{operator.name} rows", f"{_ROWS} rows", _rows_error(quantised, rng), 0.0, note=where)]
    error = _product_error(quantised, rng)
    sample = "{in_features} x {out_features}".format(**quantised.attributes)
    return [at_most(f"{operator.name} error / bound", sample, error, _ROUNDING, note=where)]


def _rows_error(operator: _Quantised, rng: np.random.Generator) -> float:
    packed, scales, matrix = _matrix(operator, rng, _TABLE, _BLOCKS)
    rows = rng.integers(0, _TABLE, _ROWS)
    (found,) = operator.run(rows=rows, packed=packed, scales=scales)
    return exact(found, matrix[rows])


def _product_error(operator: _Quantised, rng: np.random.Generator) -> float:
    """Return the largest error of a product as a share of its bound."""
    block = operator.attributes["block"]
    outputs, blocks = operator.attributes["out_features"], operator.attributes["in_features"] // block
    packed, scales, matrix = _matrix(operator, rng, outputs, blocks)
    x = rng.standard_normal((_ROWS, blocks * block), dtype=np.float32)
    steps = np.abs(x).reshape(_ROWS, blocks, block).max(axis=2) / _LEVELS
    (found,) = operator.run(x=x, packed=packed, scales=scales)
    bound = np.repeat(steps / 2, block, axis=1) @ np.abs(matrix.T)
    return float((np.abs(found - x @ matrix.T) / bound).max())


def _matrix(operator: _Quantised, rng: np.random.Generator, rows: int, blocks: int) -> tuple[Array, Array, Array]:
    """Return a random matrix: packed, scales, and the dequantised values."""
    bits, block = operator.attributes["bits"], operator.attributes["block"]
    width = block * bits // 8
    packed = np.frombuffer(rng.bytes(rows * blocks * width), np.uint8).reshape(rows, blocks, width)
    scales = rng.uniform(0.5, 1, (rows, blocks)).astype(np.float16)
    return packed, scales, dequantise(packed, scales, bits)
