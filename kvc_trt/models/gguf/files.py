"""The file of a model in GGUF, or the parts that it was split into, as one.

llama.cpp splits a large model into NAME-00001-of-00003.gguf and so on. The first part has the metadata; each has its
number, from 0 on, the number of parts, and its own tensors. They lie in one folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.gguf.header import MOST_TENSORS, GgufHeader, GgufTensor, read_header
from kvc_trt.models.sources.tensor_file import TensorFile

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 256


class GgufFiles:
    """The open files of one model, whose `header` has the tensors of all; InputError for parts that are not one model.

    Every other part is found by the name of the first.
    """

    def __init__(self, path: Path) -> None:
        self._files: list[TensorFile] = []
        self._file_of: dict[str, TensorFile] = {}
        try:
            first = self._opened(path)
            tensors: dict[str, GgufTensor] = {}
            self._take(first, tensors)
            for number, count in _others(first, path):
                self._take(self._part(path, number, count), tensors)
            self.header = GgufHeader(first.source, first.metadata, tensors)
            total = first.scalar(_TENSORS)
            if len(self._files) > 1 and total not in (None, len(tensors)):
                raise InputError(f"{first.source}: {_TENSORS} is {describe(total)}, but the parts have {len(tensors)}")
        except BaseException:
            self.close()
            raise

    def read(self, tensor: GgufTensor, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Read bytes of a tensor's data, from its byte `start` on."""
        return self._file_of[tensor.name].read(tensor.offset + start, nbytes, f"tensor {tensor.name!r}")

    def digest(self) -> str:
        """SHA-256 (hex) of the file; of several, that of their digests."""
        digests = [file.digest() for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\0".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()

    def _opened(self, path: Path) -> GgufHeader:
        self._files.append(TensorFile(path))
        return read_header(self._files[-1])

    def _part(self, first: Path, number: int, count: int) -> GgufHeader:
        header = self._opened(_name_of(first, number, count))
        found = header.scalar(_NUMBER), header.scalar(_COUNT)
        if found != (number, count):
            said = " of ".join(map(describe, found))
            raise InputError(f"{header.source}: {_NUMBER} is {said}, expected {number} of {count}")
        return header

    def _take(self, part: GgufHeader, tensors: dict[str, GgufTensor]) -> None:
        """Add the tensors of the file that was opened last; its metadata are not kept."""
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InputError(f"{part.source}: tensor {describe(name)} is in another part too")
            tensors[name], self._file_of[name] = tensor, self._files[-1]
        if len(tensors) > MOST_TENSORS:
            raise InputError(
                f"{part.source}: more than {MOST_TENSORS} tensors up to this part, expected at most as many"
            )


def _others(first: GgufHeader, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the number of each part behind the first, and the count; InputError unless the metadata of the first file
    call it the first part."""
    count, number = first.scalar(_COUNT), first.scalar(_NUMBER)
    if count in (None, 0, 1):
        return
    if type(count) is not int or not 1 < count <= _MOST_PARTS:
        raise InputError(f"{first.source}: {_COUNT} is {describe(count)}, expected at most {_MOST_PARTS} parts")
    if number != 0:
        named = _name_of(path, 0, count)
        raise InputError(
            f"{first.source}: {_NUMBER} is {describe(number)}, expected 0, that of the first part",
            hint=None if named == path else f"--model {named}",
        )
    for other in range(1, count):
        yield other, count


def _name_of(part: Path, number: int, count: int) -> Path:
    match = _NAME.fullmatch(part.name)
    if match is None or int(match[3]) != count:
        raise InputError(f"{part}: is one of {count} parts, expected a name that ends with -00001-of-{count:05d}.gguf")
    return part.with_name(f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf")
