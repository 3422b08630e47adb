"""Blocks of a GGUF file in an engine's layout, value for value: nothing is quantised a second time.

An engine's element is `(q - 2^(bits-1)) * scale`, plus the block's offset where the matrix has offsets. Q4_0 and Q8_0
say just that. Q4_1 says `q * scale + minimum`: its offset is `minimum + 8 * scale`, a float32 that is exact for weights
below 1 in magnitude; where a larger one is not, the tensor is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.gguf.header import BLOCKS
from kvc_trt.models.quantisation import KeptBlocks

KEPT_BITS: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types whose blocks an engine can hold, and the bits of their elements there."""
WITH_OFFSETS = frozenset({"Q4_1"})
_HALF = BLOCKS["Q4_0"][0] // 2
"""Elements i and i + 16 of a block share a byte in GGUF; 2i and 2i + 1 do in an engine."""


def kept_blocks(raw: NDArray[np.uint8], kind: str, where: str) -> KeptBlocks:
    """Blocks of rows of bytes [n, bytes]; InputError, naming `where`, for values that the layout does not hold."""
    elements, size = BLOCKS[kind]
    blocks = raw.reshape(len(raw), -1, size)
    scales = _halves(blocks, 0)
    if not np.isfinite(scales).all():
        raise InputError(f"{where}: contains NaN or infinite weights")
    if kind == "Q8_0":
        levels = blocks[..., size - elements :] ^ np.uint8(0x80)  # from two's complement to an offset of 128
        return KeptBlocks(levels, scales, None)
    packed = nibbles_side_by_side(blocks[..., size - _HALF :])
    return KeptBlocks(packed, scales, _offsets(blocks, scales, where) if kind in WITH_OFFSETS else None)


def _offsets(blocks: NDArray[np.uint8], scales: NDArray[np.float16], where: str) -> NDArray[np.float32]:
    minima = _halves(blocks, 2).astype(np.float32)
    eighths = scales.astype(np.float32) * np.float32(8)
    offsets: NDArray[np.float32] = minima + eighths
    if not np.isfinite(offsets).all():
        raise InputError(f"{where}: contains NaN or infinite weights")
    if not np.array_equal(offsets, minima.astype(np.float64) + eighths):  # 53 bits hold every such sum exactly
        raise InputError(
            f"{where}: its minima and scales are too far apart to be added exactly in float32",
            hint="--weights fp32 holds their values, --weights int8 quantises them anew",
        )
    return offsets


def _halves(blocks: NDArray[np.uint8], start: int) -> NDArray[Any]:
    """The float16 number of each block that begins at byte `start`."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def nibbles_side_by_side(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """From elements i and i + 16 in byte i to elements 2i and 2i + 1 in byte i."""
    levels = np.concatenate([stored & 0xF, stored >> 4], axis=-1)
    packed: NDArray[np.uint8] = levels[..., 0::2] | (levels[..., 1::2] << 4)
    return packed
