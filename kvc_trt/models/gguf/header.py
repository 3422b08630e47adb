"""The header of a GGUF file that may be hostile: its metadata, and where each tensor is.

A file is magic, version, two counts, the metadata's keys and values, a table of tensors, and their data. Every count
and length is a number that somebody wrote: each is compared with the bytes that are left in the file before anything
of that size is read or allocated. Tensors lie within the file, at multiples of the alignment, without overlap. Every
refusal is an `InputError` that names the key or the tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.sources.tensor_file import TensorFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""A vocabulary of 256,000 tokens with its merges takes 15 MiB."""

BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "MXFP4": (32, 17),
}  # fmt: skip
"""Type of a tensor -> elements and bytes of one of its blocks; a row is a whole number of blocks."""
TYPE_NUMBERS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    30: "BF16", 39: "MXFP4",
}  # fmt: skip

Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | NDArray[Any] | list[str]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHORTEST_PAIR = 8 + 1 + 4 + 1
"""Bytes of the shortest key with its value: a key of one byte, a value of one."""
_SHORTEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_MOST_KEYS = 4096
MOST_TENSORS = 65_536
_MOST_TEXTS = 2_097_152
"""In all arrays together. Large models have 50 keys, 2,000 tensors, and 800,000 tokens and merges: a header of many
short entries would take ten times its own size in Python's objects."""
_LONGEST_NAME = 1024
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape as in Hugging Face (matrices are [out, in]), and its bytes, from the start of the file."""

    name: str
    type: str
    """A key of `BLOCKS`."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file: everything before its data."""

    source: str
    """The file, as error messages name it."""
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def scalar(self, key: str) -> Scalar | None:
        """The key's one value, None where it is absent; InputError for an array."""
        value = self.metadata.get(key)
        if isinstance(value, (np.ndarray, list)):
            raise InputError(f"{self.source}: {key} is an array of {len(value)}, expected one value")
        return value


def read_header(file: TensorFile) -> GgufHeader:
    """Read and check the header; InputError for any entry that does not describe the file."""
    cursor = _Cursor(file)
    if (magic := cursor.take(min(4, file.size), "magic")) != MAGIC:
        raise InputError(
            f"{file.path}: begins with {describe(magic)}, expected {describe(MAGIC)}: not a GGUF file",
            hint="of a Hugging Face checkpoint, name the directory: --model DIRECTORY",
        )
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        swapped = version & 0xFFFF == 0
        found = "in big-endian byte order" if swapped else f"of version {version}"
        raise cursor.wrong(f"is GGUF {found}, expected little-endian and version 2 or 3")
    tensor_count, pair_count = cursor.number("Q", "tensor count"), cursor.number("Q", "metadata count")
    cursor.check_count(pair_count, _SHORTEST_PAIR, "metadata keys", most=_MOST_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        key = cursor.text("a metadata key", _LONGEST_NAME)
        if key in metadata:
            raise cursor.wrong(f"metadata key {describe(key)} is given twice")
        metadata[key] = _value(cursor, key)
    cursor.check_count(tensor_count, _SHORTEST_TENSOR, "tensors", most=MOST_TENSORS)
    entries = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = _alignment(metadata, cursor)
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.wrong(f"tensor {describe(entry.name)} is given twice")
        tensors[entry.name] = _placed(entry, start, alignment, cursor)
    _check_overlap(tensors, cursor)
    return GgufHeader(str(file.path), metadata, tensors)


class _Cursor:
    """Reads the header from front to back, never beyond the end of the file or the longest header."""

    def __init__(self, file: TensorFile) -> None:
        self.position = 0
        self.size = file.size
        self.texts_left = _MOST_TEXTS
        self._file = file
        self._limit = min(file.size, MAX_HEADER_BYTES)
        self._buffer = bytearray()

    def wrong(self, problem: str) -> InputError:
        return InputError(f"{self._file.path}: {problem}")

    def check_count(self, count: int, shortest: int, what: str, *, most: int = MAX_HEADER_BYTES) -> None:
        left = self._limit - self.position
        if count * shortest > left:
            raise self.wrong(f"{count} {what} in a header of which {left} bytes are left: truncated, or not a header")
        if count > most:
            raise self.wrong(f"{count} {what}, expected at most {most}")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self._limit:
            left = self._limit - self.position
            rest = "are left" if self._limit == self.size else f"are left of the {MAX_HEADER_BYTES} of a header"
            raise self.wrong(f"{what} takes {count} bytes at byte {self.position}, but {left} {rest}")
        while len(self._buffer) < end:
            more = min(_CHUNK, self._limit - len(self._buffer))
            self._buffer += self._file.read(len(self._buffer), more, "the header").data
        taken = bytes(memoryview(self._buffer)[self.position : end])
        self.position = end
        return taken

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, longest: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q", what)
        if length > longest:
            raise self.wrong(f"{what} takes {length} bytes, expected at most {longest}")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is {describe(raw)}, expected UTF-8") from error


def _value(cursor: _Cursor, key: str) -> Value:
    what = f"metadata key {describe(key)}"
    kind = cursor.number("I", what)
    if kind == _STRING:
        return cursor.text(what)
    if kind in _SCALARS:
        scalar: Value = cursor.number(_SCALARS[kind], what)
        return scalar
    if kind != _ARRAY:
        raise cursor.wrong(f"{what} has a value of type {kind}, which GGUF does not have")
    inner, count = cursor.number("I", what), cursor.number("Q", what)
    if inner == _STRING:
        cursor.check_count(count, 8, f"texts of {what}", most=cursor.texts_left)
        cursor.texts_left -= count
        return [cursor.text(what) for _ in range(count)]
    if inner not in _SCALARS:
        raise cursor.wrong(f"{what} is an array of type {inner}, expected one of numbers or text")
    dtype = np.dtype("<" + _SCALARS[inner])
    cursor.check_count(count, dtype.itemsize, f"numbers of {what}")
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)


def _tensor(cursor: _Cursor) -> GgufTensor:
    """Read one entry of the table; its offset still counts from the start of the data."""
    name = cursor.text("a tensor's name", _LONGEST_NAME)
    what = f"tensor {describe(name)}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.wrong(f"{what} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.number("Q", what) for _ in range(dimensions))[::-1]
    kind, offset = cursor.number("I", what), cursor.number("Q", what)
    if kind not in TYPE_NUMBERS:
        raise cursor.wrong(f"{what} is of type {_type_name(kind)}, expected one of {', '.join(BLOCKS)}")
    elements, size = BLOCKS[TYPE_NUMBERS[kind]]
    count = 1
    for extent in shape:
        count *= extent
    if count == 0 or shape[-1] % elements:
        raise cursor.wrong(
            f"{what} has shape {list(shape)}, expected rows of a multiple of {elements} ({TYPE_NUMBERS[kind]})"
        )
    return GgufTensor(name, TYPE_NUMBERS[kind], shape, offset, count // elements * size)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"{kind}, which is unknown"


def _alignment(metadata: Mapping[str, Value], cursor: _Cursor) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 1 <= alignment <= _MAX_ALIGNMENT and not alignment & (alignment - 1)
    if not is_power or isinstance(alignment, bool):
        raise cursor.wrong(
            f"general.alignment is {describe(alignment)}, expected a power of two up to {_MAX_ALIGNMENT}"
        )
    assert isinstance(alignment, int)
    return alignment


def _placed(entry: GgufTensor, start: int, alignment: int, cursor: _Cursor) -> GgufTensor:
    what = f"tensor {describe(entry.name)}"
    if entry.offset % alignment:
        raise cursor.wrong(f"{what} has offset {entry.offset}, expected a multiple of {alignment}")
    begin, end = start + entry.offset, start + entry.offset + entry.nbytes
    if end > cursor.size:
        raise InputError(
            f"{cursor.wrong(what).message} takes bytes {begin} to {end}, but the file has {cursor.size}",
            hint="compare its size with the original; a download or copy may have stopped early",
        )
    return GgufTensor(entry.name, entry.type, entry.shape, begin, entry.nbytes)


def _check_overlap(tensors: Mapping[str, GgufTensor], cursor: _Cursor) -> None:
    for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if before.offset + before.nbytes > after.offset:
            raise cursor.wrong(f"tensors {describe(before.name)} and {describe(after.name)} overlap")
