"""Keys and values as a cache stores them, made by the reference in the tensors that graphs have."""

from __future__ import annotations

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, VectorFormat
from kvc_trt.operators.schema import Tensor, part_names
from kvc_trt.operators.tensors import K_CACHE, V_CACHE

CACHES = K_CACHE, V_CACHE
FORMATS = tuple(name for name in CACHE_FORMATS if name != AUTO)


def stored(values: np.ndarray, vector: VectorFormat) -> list[np.ndarray]:
    """Return the parts of `values` [...,D]: codes as bytes, scales, and minima where there are some."""
    made = reference.store(torch.from_numpy(np.asarray(values, np.float32)), format=vector.name)
    codes = made.codes.view(torch.uint8).numpy()
    if vector.code_bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    parts = [codes.view(np.int8), made.scales.numpy()]
    if vector.scale_bytes == 1:
        parts[1] = parts[1].view(np.int8)
    return parts if made.minima is None else [*parts, made.minima.numpy()]


def read_back(values: np.ndarray, vector: VectorFormat) -> np.ndarray:
    """Return what a cache that stores `values` [...,D] gives, float32."""
    return reference.store(torch.from_numpy(np.asarray(values, np.float32)), format=vector.name).values().numpy()


def gathered(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the rows of `table` [B,G,S,.] at `indices` [B,G,C], with zeros where an index is -1."""
    rows = np.take_along_axis(table, np.maximum(indices, 0)[..., None].astype(np.int64), axis=2)
    return np.where(indices[..., None] >= 0, rows, np.zeros((), table.dtype))


def parts_of(
    keys: np.ndarray, values: np.ndarray, form: str, tensors: tuple[Tensor, Tensor] = CACHES
) -> dict[str, np.ndarray]:
    """Return the parts of keys and values by the names that they have as an operator's tensors."""
    own = CACHE_FORMATS[form]
    parts = [part for table, vector in ((keys, own.keys), (values, own.values)) for part in stored(table, vector)]
    return dict(zip(parts_names(form, tensors), parts, strict=True))


def parts_names(form: str, tensors: tuple[Tensor, Tensor] = CACHES) -> list[str]:
    """Return the names of the parts of keys and values."""
    own = CACHE_FORMATS[form]
    both = zip(tensors, (own.keys, own.values), strict=True)
    return [name for tensor, vector in both for name in part_names(tensor, vector)]


def unpacked(codes: np.ndarray, vector: VectorFormat) -> np.ndarray:
    """Return codes INT8 [...,D], one for each channel."""
    if vector.code_bits == 8:
        return codes
    byte = codes.view(np.uint8)
    return np.stack([byte & 15, byte >> 4], axis=-1).reshape(*codes.shape[:-1], -1).view(np.int8)
