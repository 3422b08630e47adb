"""Safetensors files: reading one that may be hostile, and writing one tensor by tensor.

A file is eight bytes of header length, a JSON header, then the tensors' bytes. The safetensors package checks that the
header describes the rest of the file exactly: every size equal to shape times item size, no overlap, no hole, no byte
left over. Beyond that, this module refuses files that readers could take in two ways (a name given twice, unknown
fields) and tensors that numpy cannot hold. Every refusal is an `InputError`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvc_trt.errors import InputError, describe
from kvc_trt.files.held import HeldFile
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.sources.tensor_file import TensorFile
from kvc_trt.sizes import readable_size

PADDING_PREFIX = "__padding__."
"""Byte tensors that our writer inserts so that the next tensor is aligned; hidden from `names`."""
ALIGNMENT = 64
PIECE_BYTES = 4 << 20
"""Every tensor starts at a multiple of this many bytes (a cache line), for executors that map the file."""
DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "U16": "uint16",
    "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64",
}  # fmt: skip
"""Name in the header -> numpy's or ml_dtypes' name."""
_HEADER_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 32
_MOST_BYTES = (1 << 63) - 1
LARGEST_HEADER = 16 << 20
"""Bytes; the header of 100,000 tensors has some 10 MiB."""

Chunks: TypeAlias = NDArray[Any] | Iterable[NDArray[Any]]
Bytes: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is; `offset` counts from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One validated file. The header is checked when opened; tensors are read one at a time, never mapped."""

    def __init__(self, source: str | Path | HeldFile) -> None:
        self._file = TensorFile(source)
        self.path = self._file.path
        try:
            self.metadata, self.entries, self.data_start = _read_header(self._file.descriptor, str(self.path))
        except BaseException:
            self._file.close()
            raise

    def names(self) -> list[str]:
        """Tensor names in the order of their bytes."""
        return [name for name in self.entries if not name.startswith(PADDING_PREFIX)]

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor in its stored dtype."""
        entry = self.entries[name]
        return self._read(name, 0, entry.nbytes).reshape(entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of the first axis, reading only their bytes."""
        entry = self.entries[name]
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise ValueError(f"{name}: rows {start}..{stop} of shape {list(entry.shape)}")
        row = entry.nbytes // entry.shape[0] if entry.shape[0] else 0
        return self._read(name, start * row, (stop - start) * row).reshape(stop - start, *entry.shape[1:])

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, a few MiB at a time: no memory is taken for a size that a file only claims."""
        entry = self.entries[name]
        for skip in range(0, entry.nbytes, PIECE_BYTES):
            count = min(PIECE_BYTES, entry.nbytes - skip)
            yield self._file.read(entry.offset + skip, count, f"tensor {name!r}").data

    def header_bytes(self) -> bytes:
        """The file's bytes in front of the tensors' data: length and header."""
        return self._file.read(0, self.data_start, "the header").tobytes()

    def digest(self) -> str:
        """SHA-256 (hex) of the file's bytes."""
        return self._file.digest()

    def close(self) -> None:
        """Close the file; it cannot be read afterwards."""
        self._file.close()

    def _read(self, name: str, skip: int, nbytes: int) -> NDArray[Any]:
        entry = self.entries[name]
        return self._file.read(entry.offset + skip, nbytes, f"tensor {name!r}").view(numpy_dtype(entry.dtype))


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
    write beside the target and rename. Raises ValueError where a piece differs from its plan.
    """
    pieces, places = serialised(tensors, metadata, progress)
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return places


def serialised(
    tensors: Sequence[TensorPlan],
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[Iterator[Bytes], dict[str, tuple[int, int]]]:
    """Return the bytes of a file, piece by piece, and the places; otherwise like `write_safetensors`."""
    header, places = _layout(tensors, metadata or {})
    return _bytes_of(header, tensors, places, progress), places


def _bytes_of(
    header: bytes,
    tensors: Sequence[TensorPlan],
    places: Mapping[str, tuple[int, int]],
    progress: Callable[[int], object] | None,
) -> Iterator[Bytes]:
    yield (start := len(header).to_bytes(8, "little") + header)
    position = len(start)
    for plan in tensors:
        offset, nbytes = places[plan.name]
        if offset > position:
            yield bytes(offset - position)
        for piece in _pieces(plan):
            yield piece
            if progress is not None:
                progress(len(piece))
        position = offset + nbytes


def _read_header(descriptor: int, source: str) -> tuple[dict[str, str], dict[str, TensorEntry], int]:
    """Check and read the header; returns the metadata, the tensors in the order of their bytes, and their start."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if LARGEST_HEADER < length <= os.fstat(descriptor).st_size - 8:
        raise InputError(
            f"{source}: a header of {readable_size(length)}; expected at most {readable_size(LARGEST_HEADER)}"
        )
    try:
        safe_open(f"/proc/self/fd/{descriptor}", framework="numpy", backend="pread")  # by number: the very file
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise InputError(
            f"{source}: not a safetensors file, or a damaged one: {describe(reason, 120)[1:-1]}",
            hint="compare its size with the original; a download or copy may have stopped early",
        ) from error
    try:
        header = json.loads(text := os.pread(descriptor, length, 8), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: header is not valid JSON ({describe(str(error))})") from error
    if not text.startswith(b"{"):
        raise InputError(f"{source}: header begins with {describe(text[:1])}, expected '{{'")
    metadata = header.pop("__metadata__", {})
    found = [(name, _entry_of(name, value, 8 + length, source)) for name, value in header.items()]
    return metadata, dict(sorted(found, key=lambda item: (item[1].offset, item[1].nbytes))), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate key {describe(name)}")
        result[name] = value
    return result


def _entry_of(name: str, value: Mapping[str, Any], data_start: int, source: str) -> TensorEntry:
    where = f"{source}: tensor {describe(name)}"
    if value.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where}: expected dtype, shape and data_offsets, found {describe(value)}")
    if value["dtype"] not in DTYPES:
        raise InputError(f"{where}: dtype {describe(value['dtype'])}, expected one of {', '.join(DTYPES)}")
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    dtype = DTYPES[value["dtype"]]
    # numpy counts the bytes of an empty array without the dimensions that are 0.
    extents = math.prod(extent for extent in shape if extent) * numpy_dtype(dtype).itemsize
    if len(shape) > _MAX_DIMENSIONS or extents > _MOST_BYTES:
        raise InputError(f"{where}: shape {describe(list(shape))} is more than an array can have")
    return TensorEntry(dtype, shape, data_start + begin, end - begin)


def _layout(tensors: Sequence[TensorPlan], metadata: dict[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the padded JSON header, and where each tensor goes."""
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
