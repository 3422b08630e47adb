"""An open file of tensors, read by offset and never mapped: a file that shrinks is an error, not a crash."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile
from kvc_trt.files.inputs import open_input


class TensorFile:
    """A regular file, open for reading; anything else is an `InputError`. A file that is held is not opened again."""

    def __init__(self, source: str | Path | HeldFile) -> None:
        if isinstance(source, HeldFile):
            self.path, self._file = source.path, io.FileIO(os.dup(source.descriptor), "rb")
        else:
            self.path = Path(source)
            self._file = open_input(self.path)
        self.size = os.fstat(self.descriptor).st_size

    @property
    def descriptor(self) -> int:
        """The number of the open file; ValueError once it is closed."""
        return self._file.fileno()

    def read(self, offset: int, nbytes: int, what: str) -> NDArray[np.uint8]:
        """`nbytes` bytes from `offset` on; InputError, naming `what`, where the file ends before them.

        The caller has checked both numbers against `size`: memory for the result is allocated at once.
        """
        buffer = np.empty(nbytes, np.uint8)
        view, filled = buffer.data, 0
        while filled < nbytes:
            count = os.preadv(self.descriptor, [view[filled : filled + (1 << 30)]], offset + filled)
            if count == 0:
                raise InputError(f"{self.path}: ends inside {what}; it was changed while being read")
            filled += count
        return buffer

    def digest(self) -> str:
        """SHA-256 (hex) of the file's bytes."""
        digest, position = hashlib.sha256(), 0
        while block := os.pread(self.descriptor, 1 << 22, position):
            digest.update(block)
            position += len(block)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file; it cannot be read afterwards."""
        self._file.close()
