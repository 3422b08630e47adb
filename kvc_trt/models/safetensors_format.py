"""What reader and writer of safetensors files share: the names of element types, and our padding tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PADDING_PREFIX = "__padding__."
"""Byte tensors that our writer inserts so that the next tensor is aligned; hidden from `names`."""

DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "U16": ("uint16", 2), "I16": ("int16", 2), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "U32": ("uint32", 4), "I32": ("int32", 4), "F32": ("float32", 4),
    "U64": ("uint64", 8), "I64": ("int64", 8), "F64": ("float64", 8),
}  # fmt: skip
"""Name in the header -> (numpy or ml_dtypes name, bytes per element)."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a name in `DTYPES`, bfloat16 and 8-bit floats included."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)
