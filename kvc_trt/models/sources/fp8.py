"""Checkpoints whose matrices are stored in eight bits: float8_e4m3fn, with one scale for a matrix or for each row.

The names are those of compressed-tensors, FBGEMM and AutoFP8: the value of NAME.weight is the stored number times
NAME.weight_scale. Scales of activations and caches are ignored: nothing here rounds either. Scales of two-dimensional
blocks (`weight_scale_inv`) are refused: TensorRT's parser takes a scale for a tensor, for a row, or for a block within
a row.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.models.weights import FLOAT_DTYPES, WeightSource
from kvc_trt.validation import ForeignSchema, validated

FP8 = "float8_e4m3fn"
SCALE = "_scale"
BLOCKS = "one scale per matrix or per row; TensorRT's parser does not take scales of two-dimensional blocks"
_BLOCK_SCALE = "_scale_inv"
_ASIDE = re.compile(r".*\.(input_scale|input_scale_ub|output_scale|[qkv]_scale)")
_NAN = 0x7F
"""The bits of float8_e4m3fn's only NaN, without its sign. It has no infinities."""


class _QuantisationConfig(ForeignSchema):
    quant_method: Literal["compressed-tensors", "fbgemm_fp8", "fp8"]
    weight_block_size: Any = None
    config_groups: dict[str, dict[str, Any]] = Field(default_factory=dict)


class _GroupWeights(ForeignSchema):
    type: Literal["float"]
    num_bits: Literal[8]
    strategy: str


def check_quantisation(given: object, source: str) -> None:
    """Raise InputError unless config.json's `quantization_config` is one whose matrices this module reads."""
    settings = validated(_QuantisationConfig, given, source)
    if settings.weight_block_size is not None:
        raise InputError(f"{source}: weight_block_size is {describe(settings.weight_block_size)}, expected {BLOCKS}")
    if settings.quant_method != "compressed-tensors":
        return
    for name, group in settings.config_groups.items():
        where = f"{source}.config_groups.{name}.weights"
        weights = validated(_GroupWeights, group.get("weights"), where)
        if weights.strategy not in ("tensor", "channel"):
            raise InputError(f"{where}.strategy is {describe(weights.strategy)}, expected {BLOCKS}")


class Fp8Source:
    """A checkpoint with fp8 matrices as a `WeightSource` of floats, and the same matrices as they are stored."""

    def __init__(self, stored: WeightSource) -> None:
        """Raises InputError for a matrix without its scale, and for scales of another shape."""
        self._stored = stored
        names = stored.names()
        self.matrices = frozenset(name for name in names if stored.dtype(name) == FP8)
        """Tensors that are stored in fp8."""
        known = set(names)
        for name in self.matrices:
            _check_scale(stored, name, known)
        self._scales = {name: name + SCALE for name in self.matrices}

    def names(self) -> list[str]:
        """Every tensor but the scales."""
        scales = set(self._scales.values())
        return [name for name in self._stored.names() if name not in scales and not _ASIDE.fullmatch(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        return self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Type that `read` returns: float32 for a tensor in fp8."""
        return "float32" if name in self.matrices else self._stored.dtype(name)

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor, times its scale."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a tensor, times their scales."""
        if name not in self.matrices:
            return self._stored.read_rows(name, start, stop)
        return dequantise(self.read_fp8_rows(name, start, stop), self.row_scales(name)[start:stop])

    def read_fp8_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one of `matrices` as they are stored; InputError for NaN."""
        rows = self._stored.read_rows(name, start, stop)
        if ((rows.view(np.uint8) & 0x7F) == _NAN).any():
            raise InputError(f"{name}: contains NaN weights")
        return rows

    def row_scales(self, name: str) -> NDArray[np.float32]:
        """The scale of each row of one of `matrices`, float32 [out]; a scale of the whole matrix is repeated."""
        scales = self._stored.read(self._scales[name]).astype(np.float32).reshape(-1)
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise InputError(f"{self._scales[name]}: expected positive numbers, found {float(scales.min())}")
        rows: NDArray[np.float32] = np.broadcast_to(scales, (self.shape(name)[0],)).copy()
        return rows

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self._stored.fingerprint()


def dequantise(rows: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply float8_e4m3fn rows [out, in] by their scales [out]; the result is float32."""
    values: NDArray[np.float32] = rows.astype(np.float32)
    values *= scales[:, None]
    return values


def as_floats(stored: WeightSource) -> WeightSource:
    """Return the source itself, or an `Fp8Source` over it if it has fp8 matrices; InputError for other 8-bit types."""
    names = stored.names()
    blocks = [name for name in names if name.endswith(_BLOCK_SCALE)]
    if blocks:
        raise InputError(f"weights: {blocks[0]} has shape {list(stored.shape(blocks[0]))}, expected {BLOCKS}")
    if other := [name for name in names if stored.dtype(name) == "float8_e5m2"]:
        raise InputError(f"weights: {other[0]} is float8_e5m2, expected {FP8} or one of {', '.join(FLOAT_DTYPES)}")
    return Fp8Source(stored) if any(stored.dtype(name) == FP8 for name in names) else stored


def _check_scale(stored: WeightSource, name: str, names: set[str]) -> None:
    shape, scale = stored.shape(name), name + SCALE
    if len(shape) != 2:
        raise InputError(f"weights: {name} is {FP8} of shape {list(shape)}, expected a matrix [out, in]")
    if scale not in names:
        raise InputError(f"weights: {name} is {FP8}, but there is no {scale}")
    found = tuple(stored.shape(scale))
    if found not in ((), (1,), (1, 1), (shape[0],), (shape[0], 1)):
        raise InputError(f"weights: {scale} has shape {list(found)}, expected {BLOCKS}")
    if stored.dtype(scale) not in FLOAT_DTYPES:
        raise InputError(f"weights: {scale} is {stored.dtype(scale)}, expected one of {', '.join(FLOAT_DTYPES)}")
