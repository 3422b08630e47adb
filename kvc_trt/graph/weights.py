"""The weight file of an engine: one safetensors file that both graphs read in place, written tensor by tensor.

Matrices keep Hugging Face's names and [out, in] layout. Quantised matrices are two tensors, NAME.packed and
NAME.scales, in the layout of MatMulNBits. Projections that read the same input lie behind one another, so that a graph
may see them as one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.quantisation import BLOCK, dequantise, quantise_tensor
from kvc_trt.models.rope import rotary_tables
from kvc_trt.models.safetensors_file import SafetensorsFile
from kvc_trt.models.safetensors_format import numpy_dtype
from kvc_trt.models.safetensors_writer import TensorPlan, write_safetensors
from kvc_trt.models.weights import WeightSource, expected_tensors, row_chunks
from kvc_trt.progress import NullProgress, Progress

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
FLOAT_PRECISIONS: dict[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
QUANTISED_BITS: dict[str, int] = {"int8": 8, "int4": 4}
PRECISIONS = (*FLOAT_PRECISIONS, *QUANTISED_BITS)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROTARY = ("rotary.cos", "rotary.sin")
_MATRIX = re.compile(r".*_proj\.weight|lm_head\.weight")


def activation_dtype(precision: str) -> str:
    """Type of activations and cache for a precision of weights; quantised models compute in float32."""
    if precision not in PRECISIONS:
        raise InputError(f"--weights {precision}: expected one of {', '.join(PRECISIONS)}")
    return FLOAT_PRECISIONS.get(precision, "float32")


def write_weights(
    config: ModelConfig,
    source: WeightSource,
    path: str | Path,
    *,
    weights: str,
    length: int,
    progress: Progress | None = None,
) -> None:
    """Write the weight file of an engine whose sequences have at most `length` tokens.

    Memory for one quantised tensor, or one chunk of rows, at a time. Raises InputError naming the tensor where a
    weight is NaN or infinite, or does not fit the precision's range or blocks.
    """
    plans = [*_rotary_plans(config, length), *_weight_plans(config, source, weights)]
    metadata = {"format": "kvc-trt", "weights": weights, "block": str(BLOCK), "length": str(length)}
    total = sum(plan.nbytes for plan in plans)
    with (progress or NullProgress()).task("writing weights", total) as advance:
        write_safetensors(path, plans, metadata, advance)


def _rotary_plans(config: ModelConfig, length: int) -> list[TensorPlan]:
    shape = (length, config.head_size // 2)
    return [
        TensorPlan(name, "float32", shape, lambda part=part: rotary_tables(config, length)[part])  # type: ignore[misc]
        for part, name in enumerate(ROTARY)
    ]


def _weight_plans(config: ModelConfig, source: WeightSource, weights: str) -> list[TensorPlan]:
    dtype, bits = activation_dtype(weights), QUANTISED_BITS.get(weights)
    plans: list[TensorPlan] = []
    for group in _neighbours(config, quantised=bits is not None):
        if bits is not None and _MATRIX.fullmatch(group[0]):
            pairs = [_quantised_plans(source, name, bits) for name in group]
            plans += [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        else:
            stored = "float16" if bits is not None and group[0] == EMBEDDING else dtype
            plans += [_float_plan(source, name, stored) for name in group]
    return plans


def _neighbours(config: ModelConfig, *, quantised: bool) -> list[list[str]]:
    """All tensors of the file in its order; those in one list must touch."""
    names = list(expected_tensors(config))
    if quantised and HEAD not in names:
        names.append(HEAD)  # a tied head is quantised on its own, the embedding stays float16
    groups: dict[str, list[str]] = {}
    for name in names:
        shared = re.sub(r"\.[qkv]_proj\.", ".qkv.", re.sub(r"\.(gate|up)_proj\.", ".gate_up.", name))
        groups.setdefault(shared, []).append(name)
    return list(groups.values())


def _float_plan(source: WeightSource, name: str, dtype: str) -> TensorPlan:
    shape = tuple(source.shape(name))

    def make() -> Iterator[NDArray[Any]]:
        for start, stop in row_chunks(shape):
            rows = source.read_rows(name, start, stop)
            with np.errstate(over="ignore"):
                converted = rows.astype(numpy_dtype(dtype), copy=False)
            if not np.isfinite(converted.astype(np.float32, copy=False)).all():
                finite = np.isfinite(rows.astype(np.float32, copy=False)).all()
                problem = f"has weights outside the range of {dtype}" if finite else "contains NaN or infinite weights"
                raise InputError(f"{name}: {problem}")
            yield converted

    return TensorPlan(name, dtype, shape, make)


def _quantised_plans(source: WeightSource, name: str, bits: int) -> tuple[TensorPlan, TensorPlan]:
    """Packed values and scales, from one pass over the tensor: the scales are kept until they are written."""
    stored = HEAD if name == HEAD else name
    read_as = name if name in source.names() else EMBEDDING
    rows, columns = source.shape(read_as)
    blocks = columns // BLOCK
    kept: list[NDArray[np.float32]] = []

    def packed() -> NDArray[np.uint8]:
        values, scales = quantise_tensor(source, read_as, bits)
        kept.append(scales)
        return values

    return (
        TensorPlan(f"{stored}.packed", "uint8", (rows, blocks, BLOCK * bits // 8), packed),
        TensorPlan(f"{stored}.scales", "float32", (rows, blocks), kept.pop),
    )


@dataclass(frozen=True)
class Stored:
    """One tensor, or several that lie behind one another, as an initializer sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GraphWeights:
    """Where each tensor of a weight file lies; what a graph needs to refer to it without reading it."""

    def __init__(self, path: str | Path) -> None:
        """Read the header of the weight file. Graphs refer to it by its name and must be saved beside it."""
        file = SafetensorsFile(path)
        file.close()
        self.location = Path(path).name
        self.precision = file.metadata.get("weights", "")
        self.dtype = activation_dtype(self.precision)
        self.bits = QUANTISED_BITS.get(self.precision)
        self._entries = file.entries

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def stored(self, name: str) -> Stored:
        """Place of one tensor."""
        entry = self._entries[name]
        return Stored(name, entry.dtype, tuple(entry.shape), entry.offset, entry.nbytes)

    def joined(self, name: str, parts: list[str]) -> Stored | None:
        """The rows of several tensors as one, or None where they do not touch in the file."""
        pieces = [self.stored(part) for part in parts]
        for before, after in pairwise(pieces):
            if before.offset + before.nbytes != after.offset:
                return None
        first = pieces[0]
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        return Stored(name, first.dtype, shape, first.offset, sum(piece.nbytes for piece in pieces))


class EngineWeights:
    """A `WeightSource` over an engine's weight file: the values its graphs compute with, dequantised on read."""

    def __init__(self, path: str | Path) -> None:
        self._file = SafetensorsFile(path)
        self._bits = QUANTISED_BITS.get(self._file.metadata.get("weights", ""), 0)

    def names(self) -> list[str]:
        """Hugging Face names, in the order of the file; a quantised tied head is listed, for it has its own values."""
        names = (name.removesuffix(".packed") for name in self._file.names() if not name.endswith(".scales"))
        return [name for name in names if name not in ROTARY]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        if self._is_quantised(name):
            rows, blocks = self._file.entries[f"{name}.scales"].shape
            return rows, blocks * BLOCK
        return tuple(self._file.entries[name].shape)

    def dtype(self, name: str) -> str:
        """Type that `read` returns: float32 for a quantised tensor."""
        return "float32" if self._is_quantised(name) else self._file.entries[name].dtype

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a tensor."""
        if not self._is_quantised(name):
            return self._file.read_rows(name, start, stop)
        packed = self._file.read_rows(f"{name}.packed", start, stop)
        return dequantise(packed, self._file.read_rows(f"{name}.scales", start, stop), self._bits)

    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return self._file.digest()

    def _is_quantised(self, name: str) -> bool:
        return f"{name}.packed" in self._file.entries
