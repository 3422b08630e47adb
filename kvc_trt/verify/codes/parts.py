"""The parts of stored vectors in the form of a graph, encoded and decoded by the reference.

A part is a tensor [...,.]: codes INT8 (two to a byte if they have 4 bits), scales or the bytes of exponents, and
minima if the format has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_trt import reference
from kvc_trt.models.cache_formats import FP8, VectorFormat
from kvc_trt.operators.cached_vectors import CachedVectors
from kvc_trt.operators.schema import Tensor, part_names
from kvc_trt.operators.tensors import K_CACHE, V_CACHE

if TYPE_CHECKING:
    from kvc_trt.models.cache_formats import CacheFormat

Array = NDArray[Any]
CACHES = K_CACHE, V_CACHE


def stored_parts(vectors: Array, form: VectorFormat) -> list[Array]:
    """Return the parts of exact `vectors` [...,D]."""
    made = reference.store(torch.from_numpy(np.asarray(vectors, np.float32)), format=form.name)
    codes = made.codes.view(torch.uint8).numpy()
    if form.code_bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    scales = made.scales.numpy()
    numbers = [scales.view(np.int8) if form.scale_bytes == 1 else scales]
    if made.minima is not None:
        numbers.append(made.minima.numpy())
    return [codes.view(np.int8), *numbers]


def read_parts(parts: Sequence[Array], form: VectorFormat) -> NDArray[np.float32]:
    """Return the vectors [...,D] that parts stand for; a free slot, whose parts are all 0, reads as 0."""
    codes = torch.from_numpy(np.ascontiguousarray(unpacked(parts[0], form)).view(np.uint8))
    scales = torch.from_numpy(np.ascontiguousarray(parts[1]))
    if form == FP8:
        codes, scales = codes.view(torch.float8_e4m3fn), scales.view(torch.uint8)
    elif not form.grouped:
        codes = codes.view(torch.int8)
    minima = torch.from_numpy(np.ascontiguousarray(parts[2])) if form.grouped else None
    read: NDArray[np.float32] = reference.Stored(codes, scales, minima).values().numpy()
    return read


def unpacked(codes: Array, form: VectorFormat) -> Array:
    """Return codes INT8 [...,D], one for each channel."""
    return CachedVectors((codes,), form).codes()


def parts_by_name(tensor: Tensor, form: VectorFormat | None, tensors: Mapping[str, Array], suffix: str) -> list[Array]:
    """Return the parts of an operator's tensor among `tensors`, whose names end in `suffix`."""
    return [tensors[name + suffix] for name in part_names(tensor, form)]


def read_caches(
    state: Mapping[str, Array], name: str, form: CacheFormat, rows: int | None = None
) -> tuple[Array, Array]:
    """Return the keys and values [B,G,C,D] that the first `rows` rows of the cache `name` give back."""
    keys, values = (
        read_table(state, tensor, vector, f".{name}", rows)
        for tensor, vector in zip(CACHES, (form.keys, form.values), strict=True)
    )
    return keys, values


def read_table(
    tensors: Mapping[str, Array], tensor: Tensor, form: VectorFormat | None, suffix: str, rows: int | None = None
) -> Array:
    """Return the values that the first rows of an operator's tensor give back; names in `tensors` end in `suffix`."""
    parts = [part[:rows] for part in parts_by_name(tensor, form, tensors, suffix)]
    return parts[0] if form is None else read_parts(parts, form)
