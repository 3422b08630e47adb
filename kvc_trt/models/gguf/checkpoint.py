"""A GGUF file as a checkpoint: its configuration, its weights one tensor or range of rows at a time, its tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.gguf.architecture import model_config
from kvc_trt.models.gguf.header import GgufTensor, read_header
from kvc_trt.models.gguf.kept_blocks import KEPT_BITS, WITH_OFFSETS, kept_blocks
from kvc_trt.models.gguf.names import ROPE_FACTORS, hugging_face_name, in_halves, interleaved_heads
from kvc_trt.models.gguf.tokenizer import tokenizer_contents
from kvc_trt.models.quantisation import KeptBlocks
from kvc_trt.models.sources.tensor_file import TensorFile

_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that are read as they are; blocks are dequantised to float32."""


class GgufCheckpoint:
    """A `WeightSource` over one file, by Hugging Face's names, with `.config` and the tokenizer's files.

    The header is checked when opened. Values are not: NaN and infinite weights show when a build reads them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = TensorFile(self.path)
        try:
            self.header = read_header(self._file)
            self.config = model_config(self.header, lambda tensor: self._values(tensor, 0, tensor.shape[0]))
            self._tensors = self._by_hugging_face_name()
        except BaseException:
            self._file.close()
            raise
        self._fingerprint: str | None = None

    def tokenizer_contents(self) -> dict[str, bytes]:
        """Name and content of each file that a Hugging Face directory of this model would have for its tokenizer.

        InputError for a file without a tokenizer, or with one that cannot be read exactly.
        """
        return tokenizer_contents(self.header, self.config.vocab_size)

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """The type that `read` returns: the stored one, float32 for quantised blocks."""
        return _STORED.get(self._tensors[name].type, "float32")

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor, reading and dequantising only them (whole heads where rows are moved)."""
        tensor = self._tensors[name]
        heads = interleaved_heads(name, self.config)
        if heads is None:
            return self._values(tensor, start, stop)
        size = tensor.shape[0] // heads
        first, last = start // size * size, -(-stop // size) * size
        return in_halves(self._values(tensor, first, last), size)[start - first : stop - first]

    def block_bits(self, name: str) -> int | None:
        """Bits of a tensor's elements; None for floats. InputError for blocks that an engine cannot hold exactly."""
        kind = self._tensors[name].type
        if kind in _STORED or len(self.shape(name)) != 2:
            return None
        if kind not in KEPT_BITS:
            raise InputError(
                f"--weights keep: {name} is {kind}, which an engine cannot hold exactly; expected "
                f"{', '.join(KEPT_BITS)} (blocks of 32 with one float16 scale) or floats",
                hint="--weights int8, or fp32",
            )
        return KEPT_BITS[kind]

    def has_offsets(self, name: str) -> bool:
        """True if the blocks of a matrix have offsets."""
        return self._tensors[name].type in WITH_OFFSETS

    @property
    def keeps_its_blocks(self) -> bool:
        """True if it has matrices in blocks, and an engine holds all of them as they are (`KEPT_BITS`)."""
        kinds = {one.type for one in self._tensors.values() if len(one.shape) == 2 and one.type not in _STORED}
        return bool(kinds) and kinds <= KEPT_BITS.keys()

    def read_blocks(self, name: str, start: int, stop: int) -> KeptBlocks:
        """Rows [start, stop) of a matrix whose type is in `KEPT_BITS`, as an engine stores them."""
        tensor = self._tensors[name]
        heads = interleaved_heads(name, self.config)
        size = 1 if heads is None else tensor.shape[0] // heads
        first, last = start // size * size, -(-stop // size) * size
        blocks = kept_blocks(self._raw(tensor, first, last), tensor.type, f"{self.path}: tensor {tensor.name!r}")

        def asked(part: NDArray[Any]) -> NDArray[Any]:
            return (part if heads is None else in_halves(part, size))[start - first : stop - first]

        offsets = None if blocks.offsets is None else asked(blocks.offsets)
        return KeptBlocks(asked(blocks.packed), asked(blocks.scales), offsets)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the configuration and the file, reading every byte once."""
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.config.identity}\0{self._file.digest()}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _by_hugging_face_name(self) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for tensor in self.header.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue
            name = hugging_face_name(tensor.name)
            if name is None:
                found = describe(tensor.name)
                raise InputError(f"{self.path}: tensor {found} has no place in {self.config.architecture}")
            tensors[name] = tensor
        return tensors

    def _values(self, tensor: GgufTensor, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor in the file's order."""
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise ValueError(f"{tensor.name}: rows {start}..{stop} of shape {list(tensor.shape)}")
        if len(tensor.shape) == 1:  # a vector of blocks has no rows that could be read one by one
            whole = self._file.read(tensor.offset, tensor.nbytes, f"tensor {tensor.name!r}")
            return _decoded(whole, tensor.type)[start:stop]
        return _decoded(self._raw(tensor, start, stop), tensor.type).reshape(stop - start, *tensor.shape[1:])

    def _raw(self, tensor: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows [start, stop) of a matrix: [rows, bytes]."""
        row = tensor.nbytes // tensor.shape[0]
        raw = self._file.read(tensor.offset + start * row, (stop - start) * row, f"tensor {tensor.name!r}")
        return raw.reshape(stop - start, row)


def _decoded(raw: NDArray[np.uint8], kind: str) -> NDArray[Any]:
    """The values of rows of bytes: floats as they are stored, blocks as float32."""
    if kind in _STORED:
        return raw.view(numpy_dtype(_STORED[kind]))
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(raw, GGMLQuantizationType[kind])
