"""Experts as matrices [out,in] of single projections, whose rows a checkpoint stores together.

A layer's experts are one tensor for gate and up, and one for down. In Qwen3.5 BASE is [experts,out,in], and the output
channels of up stand behind those of gate. In gpt-oss they alternate (gate first):

- in floats BASE is [experts,in,out], and BASE_bias [experts,out];
- in MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0) BASE_blocks is uint8
  [experts,out,in/32,16], two E2M1 numbers a byte, the first in the lower half, and BASE_scales uint8
  [experts,out,in/32]: a block's numbers are multiplied by 2^(scale - 127).

MXFP4 is widened when it is read, which is exact: its numbers have two significant bits. An engine's blocks of four bits
cannot hold them: E2M1 has magnitudes of up to 12 halves, and levels end at -8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.quantisation import BLOCK
from kvc_trt.models.weights import EXPERT_BIASES, EXPERT_MATRICES, WeightSource

MXFP4 = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of four bits: a sign, two bits of exponent, one of mantissa."""
_NAN, _BIAS = 255, 127
"""In E8M0, the byte that is no number, and the exponent of 1."""


def is_mxfp4(quantisation: object) -> bool:
    """True if config.json's `quantization_config` says that experts are stored in MXFP4."""
    return isinstance(quantisation, dict) and quantisation.get("quant_method") == MXFP4


class _Part(NamedTuple):
    """Where the rows of one of our tensors are."""

    stored: str
    """BASE, or BASE_bias of a bias."""
    first: int
    """Output channel of an expert's first row."""
    step: int
    rows: int
    """Rows of each expert."""
    outputs: int
    """Output channels of the stored tensor."""
    columns: int | None
    """Columns of a matrix; None for a bias."""


class FusedExperts:
    """A `WeightSource` over a checkpoint whose experts are stored together; its other tensors are as they are."""

    def __init__(self, source: WeightSource, config: ModelConfig, *, alternating: bool) -> None:
        """Read gpt-oss's form if `alternating`, else Qwen3.5's.

        InputError for a stored tensor of another shape or type than the configuration says.
        """
        self._source, self._experts = source, config.description.experts
        self._alternating, self._parts = alternating, _parts_of(config, alternating=alternating)
        self._stored = set(source.names())
        for part in self._parts.values():
            self._check(part)

    def names(self) -> list[str]:
        """Every matrix and bias of experts whose rows are there, and the other tensors under their own names."""
        found = [name for name, part in self._parts.items() if self._files_of(part)]
        used = {file for part in self._parts.values() for file in self._files_of(part)}
        return found + sorted(self._stored - used)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; of experts the rows of one under those of the one before."""
        if name not in self._parts:
            return tuple(self._source.shape(name))
        part = self._parts[name]
        rows = self._count * part.rows
        return (rows,) if part.columns is None else (rows, part.columns)

    def dtype(self, name: str) -> str:
        """Type that `read` returns: float32 for a tensor stored in MXFP4."""
        if name not in self._parts:
            return self._source.dtype(name)
        files = self._files_of(self._parts[name])
        return self._source.dtype(files[0]) if len(files) == 1 else "float32"

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor; reads the experts that have them."""
        if name not in self._parts:
            return self._source.read_rows(name, start, stop)
        part = self._parts[name]
        if start >= stop:
            return np.zeros((0, *self.shape(name)[1:]), numpy_dtype(self.dtype(name)))
        first, last = start // part.rows, -(-stop // part.rows)
        found = [
            self._rows(part, expert, max(start - expert * part.rows, 0), min(stop - expert * part.rows, part.rows))
            for expert in range(first, last)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self._source.fingerprint()

    @property
    def _count(self) -> int:
        assert self._experts is not None
        return self._experts.count

    def _files_of(self, part: _Part) -> list[str]:
        """Return the checkpoint's tensors that hold a part: one in floats, blocks and scales, or none."""
        if part.stored in self._stored:
            return [part.stored]
        packed = [part.stored + BLOCKS, part.stored + SCALES]
        return packed if part.columns is not None and self._stored.issuperset(packed) else []

    def _rows(self, part: _Part, expert: int, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop) of one expert."""
        channels = slice(part.first + start * part.step, part.first + (stop - 1) * part.step + 1, part.step)
        tables = [self._source.read_rows(file, expert, expert + 1)[0] for file in self._files_of(part)]
        if len(tables) == 2:
            return widened(tables[0][channels], tables[1][channels], part.stored + SCALES)
        (table,) = tables
        transposed = part.columns is not None and self._alternating
        return np.ascontiguousarray(table[:, channels].T if transposed else table[channels])

    def _check(self, part: _Part) -> None:
        """Raise InputError for a stored tensor of another shape or type."""
        files = self._files_of(part)
        if not files:
            return
        expected: list[tuple[int, ...]]
        if part.columns is None:
            expected = [(self._count, part.outputs)]
        elif len(files) == 1:
            matrix = (part.columns, part.outputs) if self._alternating else (part.outputs, part.columns)
            expected = [(self._count, *matrix)]
        else:
            blocks = (self._count, part.outputs, part.columns // BLOCK)
            expected = [(*blocks, BLOCK // 2), blocks]
        for file, shape in zip(files, expected, strict=True):
            if tuple(self._source.shape(file)) != shape:
                raise InputError(f"weights: {file} has shape {list(self._source.shape(file))}, expected {list(shape)}")
            if len(files) == 2 and self._source.dtype(file) != "uint8":
                raise InputError(f"weights: {file} is {self._source.dtype(file)}, expected uint8")


def alternating_gate(source: WeightSource, config: ModelConfig) -> FusedExperts:
    """Return the tensors of a checkpoint of gpt-oss."""
    return FusedExperts(source, config, alternating=True)


def gate_above_up(source: WeightSource, config: ModelConfig) -> FusedExperts:
    """Return the tensors of a checkpoint of Qwen3.5."""
    return FusedExperts(source, config, alternating=False)


def _parts_of(config: ModelConfig, *, alternating: bool) -> Mapping[str, _Part]:
    """Return where the rows of the experts' tensors are, by our names."""
    hidden, experts = config.hidden_size, config.description.experts
    assert experts is not None
    size, step = experts.size, 2 if alternating else 1
    sides = (
        ("gate_up_proj", 0, step, size, 2 * size, hidden),
        ("gate_up_proj", 1 if alternating else size, step, size, 2 * size, hidden),
        ("down_proj", 0, 1, hidden, hidden, size),
    )
    found = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for matrix, bias, (stored, first, each, rows, outputs, columns) in zip(
            EXPERT_MATRICES, EXPERT_BIASES, sides, strict=True
        ):
            base = f"{prefix}.mlp.experts.{stored}"
            found[f"{prefix}.{matrix}"] = _Part(base, first, each, rows, outputs, columns)
            if alternating:
                found[f"{prefix}.{bias}"] = _Part(f"{base}_bias", first, each, rows, outputs, None)
    return found


def widened(blocks: NDArray[np.uint8], scales: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Return the numbers of rows: blocks [n,in/32,16], scales [n,in/32] -> float32 [n,in]; InputError for NaN."""
    if (scales == _NAN).any():
        raise InputError(f"{name}: contains NaN weights")
    values = np.empty((*blocks.shape[:2], BLOCK), np.float32)
    values[..., 0::2], values[..., 1::2] = E2M1[blocks & 0xF], E2M1[blocks >> 4]
    with np.errstate(over="ignore"):
        wide: NDArray[np.float32] = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    return wide.reshape(len(blocks), blocks.shape[1] * BLOCK)
