"""Reading one safetensors file that may be hostile.

A file is eight bytes of header length, a JSON header, then the tensors' bytes. Before anything is believed, the header
must be short enough, unambiguous (no duplicate keys), and describe the rest of the file exactly: every size equal to
shape times item size, no overlap, no hole, no byte left over. Every violation is an `InputError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.models.fields import describe
from kvc_trt.models.safetensors_format import DTYPES, PADDING_PREFIX, numpy_dtype
from kvc_trt.models.safetensors_writer import TensorPlan, write_safetensors

__all__ = ["SafetensorsFile", "TensorEntry", "TensorPlan", "write_safetensors"]

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 32
_MAX_EXTENT = (1 << 63) - 1


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies; `offset` counts from the start of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One validated file. The header is checked when opened; tensors are read one at a time, never mapped."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = _open_regular(self.path)
        try:
            size = os.fstat(self._file.fileno()).st_size
            header, data_start = _read_header(self._file, size, str(self.path))
            self.metadata, self.entries = _parse_entries(header, data_start, size, str(self.path))
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

    def digest(self) -> str:
        """SHA-256 (hex) of the file's bytes."""
        digest, position = hashlib.sha256(), 0
        while block := os.pread(self._file.fileno(), 1 << 22, position):
            digest.update(block)
            position += len(block)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file; it cannot be read afterwards."""
        self._file.close()

    def _read(self, name: str, skip: int, nbytes: int) -> NDArray[Any]:
        entry = self.entries[name]
        buffer = np.empty(nbytes, np.uint8)
        view, filled = buffer.data, 0
        while filled < nbytes:
            count = os.preadv(self._file.fileno(), [view[filled : filled + (1 << 30)]], entry.offset + skip + filled)
            if count == 0:
                raise InputError(f"{self.path}: ends inside tensor {name!r}; it was changed while being read")
            filled += count
        return buffer.view(numpy_dtype(entry.dtype))


def _open_regular(path: Path) -> Any:
    """Open for reading without ever blocking on a pipe or device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _read_header(file: Any, size: int, source: str) -> tuple[Mapping[str, Any], int]:
    if size < 8:
        raise InputError(f"{source}: {size} bytes, too short for a safetensors file")
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if length < 2 or length > MAX_HEADER_BYTES:
        raise InputError(f"{source}: header length {length}, expected 2..{MAX_HEADER_BYTES} bytes")
    if length > size - 8:
        raise InputError(f"{source}: header length {length} exceeds the {size - 8} bytes that follow; truncated?")
    try:
        text = os.pread(file.fileno(), length, 8).decode("utf-8")
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: header is not valid JSON ({describe(str(error))})") from error
    if not text.startswith("{") or not isinstance(header, dict):
        raise InputError(f"{source}: header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_entries(
    header: Mapping[str, Any], data_start: int, size: int, source: str
) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise InputError(f"{source}: __metadata__ must map names to strings")
    found = [
        (name, _parse_entry(name, value, data_start, source))
        for name, value in header.items()
        if name != "__metadata__"
    ]
    found.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    position = data_start
    for name, entry in found:
        if entry.offset != position:
            kind = "overlaps its predecessor" if entry.offset < position else "leaves a hole before it"
            raise InputError(f"{source}: tensor {describe(name)} {kind} (byte {entry.offset}, expected {position})")
        position += entry.nbytes
    if position != size:
        raise InputError(f"{source}: {size} bytes, but the header describes {position}; truncated or trailing bytes")
    return metadata, dict(found)


def _parse_entry(name: str, value: object, data_start: int, source: str) -> TensorEntry:
    where = f"{source}: tensor {describe(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where}: expected dtype, shape and data_offsets, found {describe(value)}")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise InputError(f"{where}: dtype {describe(kind)}, expected one of {', '.join(DTYPES)}")
    if not _are_extents(shape) or len(shape) > _MAX_DIMENSIONS:
        raise InputError(f"{where}: shape {describe(shape)}, expected a list of sizes")
    if not _are_extents(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"{where}: data_offsets {describe(offsets)}, expected [begin, end]")
    dtype, item_size = DTYPES[kind]
    nbytes = math.prod(shape) * item_size
    if nbytes != offsets[1] - offsets[0]:
        raise InputError(
            f"{where}: {kind} {describe(shape)} does not take the {offsets[1] - offsets[0]} bytes of its data_offsets"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: name is not valid Unicode") from error
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_extents(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_EXTENT for item in value)
