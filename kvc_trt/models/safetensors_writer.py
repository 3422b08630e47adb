"""Writing a safetensors file tensor by tensor: memory for one tensor, or one chunk of it, at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.safetensors_format import DTYPES, PADDING_PREFIX, numpy_dtype

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes (a cache line), for executors that map the file."""
_HEADER_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}

Chunks: TypeAlias = NDArray[Any] | Iterable[NDArray[Any]]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to write. `make` returns it whole, or as an iterable of consecutive pieces of its first axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Chunks]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


def write_safetensors(
    path: str | Path,
    tensors: Sequence[TensorPlan],
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, tuple[int, int]]:
    """Write the tensors in the given order; returns name -> (offset from the start of the file, bytes).

    `make` is called once per tensor, in order, so two tensors made from one source may share work. `progress` is
    called with the number of bytes just written. The file is flushed to disk; on any error it is left incomplete, so
    write beside the target and rename. Raises ValueError where a piece is not what its plan says.
    """
    header, places = _layout(tensors, metadata or {})
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for plan in tensors:
            offset, _ = places[plan.name]
            file.write(b"\0" * (offset - file.tell()))
            for piece in _pieces(plan):
                file.write(piece)
                if progress is not None:
                    progress(len(piece))
        file.flush()
        os.fsync(file.fileno())
    return places


def _layout(tensors: Sequence[TensorPlan], metadata: dict[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The padded JSON header, and where each tensor goes."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    relative: dict[str, tuple[int, int]] = {}
    position = 0
    for plan in tensors:
        if plan.name in entries or plan.name == "__metadata__" or plan.name.startswith(PADDING_PREFIX):
            raise ValueError(f"tensor name {plan.name!r} is taken or reserved")
        if gap := -position % ALIGNMENT:  # the format allows no holes: fill with a tensor of bytes
            entries[f"{PADDING_PREFIX}{len(relative)}"] = _entry("uint8", (gap,), position, gap)
            position += gap
        entries[plan.name] = _entry(plan.dtype, plan.shape, position, plan.nbytes)
        relative[plan.name] = (position, plan.nbytes)
        position += plan.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    start = 8 + len(header)
    return header, {name: (start + offset, nbytes) for name, (offset, nbytes) in relative.items()}


def _entry(dtype: str, shape: tuple[int, ...], position: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": _HEADER_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + nbytes]}


def _pieces(plan: TensorPlan) -> Iterable[memoryview]:
    made = plan.make()
    rows = 0
    for array in [made] if isinstance(made, (np.ndarray, np.generic)) else made:
        if array.dtype != numpy_dtype(plan.dtype) or array.shape[1:] != plan.shape[1:]:
            found, planned = f"{array.dtype}{list(array.shape)}", f"{plan.dtype}{list(plan.shape)}"
            raise ValueError(f"{plan.name}: piece {found}, planned {planned}")
        rows += array.shape[0] if array.ndim else 1
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    if rows != (plan.shape[0] if plan.shape else 1):
        raise ValueError(f"{plan.name}: {rows} rows made, planned {list(plan.shape)}")
