"""An engine's weight file: one safetensors file that both graphs read in place, written tensor by tensor.

Matrices keep Hugging Face's names and [out, in] layout. Quantised matrices are two tensors, NAME.packed and
NAME.scales, in the layout of `kvc_trt.operators.quantised_linear`; a tied head is the embedding's two. Blocks kept
from a GGUF file may also have NAME.offsets, added to all elements of a block. fp8 matrices are NAME, with a float32
scale per row in NAME.scales.
Projections that read the same input are adjacent, so that a graph can use them as one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kvc_trt.files.held import HeldFile
from kvc_trt.graph.weight_plans import (
    EMBEDDING,
    FLOAT_PRECISIONS,
    HEAD,
    KEEP,
    OFFSETS,
    PACKED,
    PRECISIONS,
    QUANTISED_BITS,
    ROTARY,
    SCALES,
    Precision,
    activation_dtype,
    rotary_plans,
    weight_plans,
)
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.quantisation import BLOCK, dequantise
from kvc_trt.models.sources import fp8
from kvc_trt.models.sources.safetensors_file import SafetensorsFile, write_safetensors
from kvc_trt.models.weights import WeightSource
from kvc_trt.progress import NullProgress, Progress

__all__ = [
    "EMBEDDING",
    "FLOAT_PRECISIONS",
    "HEAD",
    "KEEP",
    "OFFSETS",
    "PACKED",
    "PRECISIONS",
    "QUANTISED_BITS",
    "ROTARY",
    "EngineWeights",
    "GraphWeights",
    "Precision",
    "StoredInitializer",
    "activation_dtype",
    "write_weights",
]


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

    Needs memory for one chunk of rows and the scales of one tensor at a time. Raises InputError, naming the tensor, if
    a weight is NaN, infinite, or does not fit the format's range or blocks.
    """
    plans = [*rotary_plans(config, length), *weight_plans(config, source, weights)]
    metadata = {"format": "kvc-trt", "weights": weights, "block": str(BLOCK), "length": str(length)}
    total = sum(plan.nbytes for plan in plans)
    with (progress or NullProgress()).task("writing weights", total) as advance:
        write_safetensors(path, plans, metadata, advance)


@dataclass(frozen=True)
class StoredInitializer:
    """One tensor, or several adjacent ones, in the form of an initializer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GraphWeights:
    """The offsets of a weight file's tensors: with them a graph refers to tensors without reading them."""

    def __init__(self, source: str | Path | HeldFile) -> None:
        """Read the header of the weight file. Graphs refer to the file by name and must be saved beside it."""
        file = SafetensorsFile(source)
        file.close()
        self.location = file.path.name
        self.precision = file.metadata.get("weights", "")
        self.dtype = activation_dtype(self.precision)
        self.bits = QUANTISED_BITS.get(self.precision)
        self._entries = file.entries

    @property
    def quantised(self) -> bool:
        """Return whether there are matrices in 4 or 8 bits."""
        return any(name.endswith(PACKED) for name in self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is stored in fp8 with scales."""
        return self._entries[name].dtype == fp8.FP8

    def stored(self, name: str) -> StoredInitializer:
        """Return where one tensor is stored."""
        entry = self._entries[name]
        return StoredInitializer(name, entry.dtype, tuple(entry.shape), entry.offset, entry.nbytes)

    def joined(self, name: str, parts: list[str]) -> StoredInitializer | None:
        """Return the rows of several tensors as one, or None if they are not adjacent in the file or not alike."""
        pieces = [self.stored(part) for part in parts]
        for before, after in pairwise(pieces):
            alike = (before.dtype, before.shape[1:]) == (after.dtype, after.shape[1:])
            if before.offset + before.nbytes != after.offset or not alike:
                return None
        first = pieces[0]
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        return StoredInitializer(name, first.dtype, shape, first.offset, sum(piece.nbytes for piece in pieces))


class EngineWeights:
    """A `WeightSource` over an engine's weight file: the values its graphs compute with, dequantised on read."""

    def __init__(self, source: str | Path | HeldFile) -> None:
        self._file = SafetensorsFile(source)
        precision = self._file.metadata.get("weights", "")
        self._computed = activation_dtype(precision)

    def names(self) -> list[str]:
        """Return the Hugging Face names in file order; in older engines a quantised tied head has its own values."""
        names = (name.removesuffix(PACKED) for name in self._file.names() if not name.endswith((SCALES, OFFSETS)))
        return [name for name in names if not name.startswith(ROTARY)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor; matrices are [out, in]."""
        if self._is_quantised(name):
            rows, blocks = self._file.entries[name + SCALES].shape
            return rows, blocks * BLOCK
        return tuple(self._file.entries[name].shape)

    def dtype(self, name: str) -> str:
        """Return the type that `read` returns: float32 for a quantised tensor, the activations' type for fp8."""
        if self._is_quantised(name):
            return "float32"
        stored = self._file.entries[name].dtype
        return self._computed if stored == fp8.FP8 else stored

    def read(self, name: str) -> NDArray[Any]:
        """Read one whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows [start, stop) of a tensor."""
        if self._is_quantised(name):
            packed = self._file.read_rows(name + PACKED, start, stop)
            bits = packed.shape[-1] * 8 // BLOCK
            values = dequantise(packed, self._file.read_rows(name + SCALES, start, stop), bits)
            if name + OFFSETS in self._file.entries:
                by_block = values.reshape(stop - start, -1, BLOCK)  # a view
                by_block += self._file.read_rows(name + OFFSETS, start, stop)[..., None]
            return values
        rows = self._file.read_rows(name, start, stop)
        if self._file.entries[name].dtype != fp8.FP8:
            return rows
        values = fp8.dequantise(rows, self._file.read_rows(name + SCALES, start, stop))
        return values.astype(numpy_dtype(self._computed))

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._file.digest()

    def _is_quantised(self, name: str) -> bool:
        return name + PACKED in self._file.entries
