"""GGUF files as trees: version, counts, the metadata with their types, and the table of tensors.

A tree may claim anything: a count that is no number of entries, a text as a number. What cannot be written is refused
with ValueError, and everything else becomes bytes as a hostile writer would make them.
"""

from __future__ import annotations

import struct
from typing import Any

from tests.fuzz.mutation.trees import Codec

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.content, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def text(self) -> str:
        size = self.number("Q")
        start, self.at = self.at, self.at + size
        return self.content[start : self.at].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        return {"type": inner, "count": count, "items": [self.value(inner) for _ in range(count)]}


def _decode(content: bytes) -> Any:
    try:
        reader = _Reader(content)
        reader.at = 4
        version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
        if tensors > 1000 or pairs > 1000:
            raise ValueError("more than a seed has")
        found: dict[str, Any] = {"version": version, "tensor_count": tensors, "kv_count": pairs}
        found["kv"] = []
        for _ in range(pairs):
            key, kind = reader.text(), reader.number("I")
            found["kv"].append([key, kind, reader.value(kind)])
        found["tensors"] = []
        for _ in range(tensors):
            name, dimensions = reader.text(), reader.number("I")
            if dimensions > 1000:
                raise ValueError("more dimensions than a seed has")
            sizes = [reader.number("Q") for _ in range(dimensions)]
            found["tensors"].append([name, sizes, reader.number("I"), reader.number("Q")])
        found["data"] = [reader.at + -reader.at % _ALIGNMENT]
    except (struct.error, KeyError, MemoryError) as error:
        raise ValueError(str(error)) from error
    return found


def _encode(tree: Any, content: bytes) -> bytes:
    head = b"GGUF" + _number("I", tree["version"])
    head += _number("Q", tree["tensor_count"]) + _number("Q", tree["kv_count"])
    for key, kind, value in tree["kv"]:
        head += _text(key) + _number("I", kind) + _value(kind, value)
    for name, sizes, kind, offset in tree["tensors"]:
        head += _text(name) + _number("I", len(sizes)) + b"".join(_number("Q", size) for size in sizes)
        head += _number("I", kind) + _number("Q", offset)
    start = _decode(content)["data"][0]
    return head + bytes(-len(head) % _ALIGNMENT) + content[start:]


def _value(kind: Any, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        return (
            _number("I", value["type"])
            + _number("Q", value["count"])
            + b"".join(_value(value["type"], item) for item in value["items"])
        )
    return _number(_SCALARS.get(kind, "Q"), value)


def _text(value: Any) -> bytes:
    encoded = str(value).encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


def _number(letter: str, value: Any) -> bytes:
    if letter in "fd":
        try:
            return struct.pack("<" + letter, float(value))
        except (OverflowError, TypeError) as error:
            raise ValueError(str(error)) from error
    if letter == "?":
        return bytes([int(value) & 255]) if isinstance(value, int) else b"\x02"
    size = struct.calcsize("<" + letter)
    if isinstance(value, float) and value != value:
        raise ValueError("not a number")
    try:
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    except (OverflowError, TypeError) as error:
        raise ValueError(str(error)) from error


GGUF = Codec(_decode, _encode)
