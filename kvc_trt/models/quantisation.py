"""Block quantisation of weight matrices in the layout of ONNX Runtime's `com.microsoft::MatMulNBits`.

Symmetric, one float16 scale per row and block of input channels. The scale maps the element of largest magnitude to
the end of the integer range that has one value more (-8 or -128), so the whole range is used; scales may be negative.
It is rounded away from zero before the elements are, so that its rounding cuts no element off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.weights import WeightSource, row_chunks

BLOCK = 32
SUPPORTED_BITS = (4, 8)
Packed = NDArray[np.uint8]
Scales = NDArray[np.float16]

_CHUNK_ELEMENTS = 1 << 18
"""Small enough that the temporaries of one chunk stay in the second-level cache."""
_NEGLIGIBLE = np.float32(1e-30)
"""A block whose largest magnitude is below this is stored as zeros (its reciprocal scale would overflow)."""


class KeptBlocks(NamedTuple):
    """Rows of a matrix [n, blocks * 32] whose checkpoint stores it in blocks: nothing is quantised a second time."""

    packed: Packed
    """[n, blocks, 16 or 32]"""
    scales: Scales
    """[n, blocks]"""
    offsets: NDArray[np.float32] | None
    """[n, blocks], added to all elements of a block; None where all are zero."""


@runtime_checkable
class BlockSource(WeightSource, Protocol):
    """A source some of whose matrices are stored in blocks that an engine can hold."""

    def block_bits(self, name: str) -> int | None:
        """Bits of a tensor's elements; None for floats. InputError for blocks that an engine cannot hold exactly."""
        ...

    def has_offsets(self, name: str) -> bool:
        """True if the blocks of a matrix have offsets."""
        ...

    def read_blocks(self, name: str, start: int, stop: int) -> KeptBlocks:
        """Rows [start, stop) of a matrix in blocks, as an engine stores them."""
        ...


def quantise(weight: NDArray[np.float32], bits: int, block: int = BLOCK) -> tuple[Packed, Scales]:
    """Quantise `weight` [N, K] to (packed uint8 [N, K/block, block*bits/8], scales float16 [N, K/block]).

    Element i of a block is `(q_i - 2^(bits-1)) * scale`; with 4 bits, element 2j is the low nibble of byte j.
    Rows are independent: quantising row ranges one after the other gives the same bytes.
    Raises `InputError` where K is not a multiple of `block`, a weight is NaN or infinite, or a scale exceeds float16.
    """
    rows, columns = _check(weight.shape, bits, block)
    blocks = columns // block
    packed = np.empty((rows, blocks, block * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float16)
    for start, stop in row_chunks((rows, columns), _CHUNK_ELEMENTS):
        chunk = np.ascontiguousarray(weight[start:stop], dtype=np.float32).reshape(-1, block)
        scale, levels = _round_blocks(chunk, bits)
        scales[start:stop] = scale.reshape(-1, blocks)
        packed[start:stop] = _pack(levels, bits).reshape(stop - start, blocks, -1)
    return packed, scales


def quantised_chunks(source: WeightSource, name: str, bits: int, block: int = BLOCK) -> Iterator[tuple[Packed, Scales]]:
    """`quantise` one tensor of a source, by consecutive ranges of its rows: memory for one of them only."""
    shape = source.shape(name)
    _check(shape, bits, block, name)
    for start, stop in row_chunks(shape):
        try:
            values = source.read_rows(name, start, stop).astype(np.float32, copy=False)
            found = quantise(values, bits, block)
        except InputError as error:
            raise InputError(f"{name}: {error.message}", hint=error.hint) from error
        yield found


def dequantise(packed: Packed, scales: Scales | NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The float32 matrix [N, K] that `packed` [N, K/block, block*bits/8] and `scales` [N, K/block] describe."""
    if bits not in SUPPORTED_BITS or packed.ndim != 3 or scales.shape != packed.shape[:2]:
        raise ValueError(
            f"packed {packed.shape}, scales {scales.shape}, bits {bits}: expected [N, blocks, bytes], [N, blocks], 4|8"
        )
    rows, blocks, width = packed.shape
    values = np.empty((rows, blocks, width * 8 // bits), np.float32)
    if bits == 4:
        values[..., 0::2] = packed & 0xF
        values[..., 1::2] = packed >> 4
    else:
        values[...] = packed
    values -= np.float32(1 << (bits - 1))
    values *= scales[..., None]
    return values.reshape(rows, -1)


def _check(shape: tuple[int, ...], bits: int, block: int, name: str = "weight") -> tuple[int, int]:
    if bits not in SUPPORTED_BITS:
        raise InputError(f"quantisation to {bits} bits: expected 4 or 8")
    if block < 16 or block & (block - 1):
        raise InputError(f"quantisation block {block}: expected a power of two, at least 16")
    if len(shape) != 2 or shape[1] % block or 0 in shape:
        raise InputError(
            f"{name}: shape {list(shape)} cannot be quantised, expected [out, in] with in a multiple of {block}",
            hint="build with --weights fp32 or fp16 instead",
        )
    return shape[0], shape[1]


def _round_blocks(chunk: NDArray[np.float32], bits: int) -> tuple[Scales, Packed]:
    """Scales [blocks] and integer levels uint8 [blocks, block] of float32 [blocks, block]."""
    middle = np.float32(1 << (bits - 1))
    largest, smallest = chunk.max(axis=1), chunk.min(axis=1)
    extreme = np.where(-smallest > largest, smallest, largest)
    if not np.isfinite(extreme).all() or not np.isfinite(largest).all():
        raise InputError("contains NaN or infinite weights")
    extreme[np.abs(extreme) < _NEGLIGIBLE] = 0
    scale = _away_from_zero(extreme / -middle)
    if not np.isfinite(scale).all():
        raise InputError(f"has weights outside the range of int{bits}")
    reciprocal = np.divide(np.float32(1), scale, out=np.zeros_like(extreme), where=scale != 0, dtype=np.float32)
    scaled = chunk * reciprocal[:, None]
    scaled += middle + np.float32(0.5)  # the cast truncates, so this rounds to nearest
    np.minimum(scaled, 2 * middle - 1, out=scaled)
    return scale, scaled.astype(np.uint8)


def _away_from_zero(scale: NDArray[np.float32]) -> Scales:
    """Round to float16 of at least the same magnitude."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = scale.astype(np.float16)
    smaller = np.abs(rounded.astype(np.float32)) < np.abs(scale)
    return np.where(smaller, np.nextafter(rounded, np.copysign(np.float16(np.inf), scale.astype(np.float16))), rounded)


def _pack(levels: Packed, bits: int) -> Packed:
    if bits == 8:
        return levels
    pairs = levels.view("<u2")  # low byte: even element, high byte: odd element
    packed: Packed = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed
