"""A GGUF file as a checkpoint: its configuration, its weights one tensor or range of rows at a time, its tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.models.family import family
from kvc_trt.models.family_weights import FamilyWeights, channel_order
from kvc_trt.models.gguf.architecture import model_config
from kvc_trt.models.gguf.files import GgufFiles
from kvc_trt.models.gguf.header import BLOCKS, GgufHeader, GgufTensor
from kvc_trt.models.gguf.kept_blocks import KEPT_BITS, WITH_OFFSETS, kept_blocks, nibbles_side_by_side
from kvc_trt.models.gguf.keys import LATER_TOKENS, GgufKeys
from kvc_trt.models.gguf.names import CONFIGURATION, SHARED_GATE, places
from kvc_trt.models.gguf.tokenizer import tokenizer_contents
from kvc_trt.models.quantisation import BLOCK, KeptBlocks
from kvc_trt.models.sources.fused_experts import widened
from kvc_trt.models.weights import EXPERT_MATRICES

_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that are read as they are; blocks are dequantised to float32."""
_CONVOLUTION, _DECAY = ".ssm_conv1d.weight", ".ssm_a"
"""Ends of names: a convolution without its axis of one channel, and -exp(A_log)."""
_MATRICES = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that an engine may hold in blocks."""


class GgufCheckpoint:
    """A `WeightSource` over a file, or the parts of one, by the names of `expected_tensors`.

    It has `.config` and the tokenizer's files. Headers are checked when opened. Values are not: NaN and infinite
    weights show when a build reads them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = GgufFiles(self.path)
        try:
            self.header = self._files.header
            self._tensors = _FileTensors(self._files)
            self.config = model_config(self.header, self._tensors.values)
            self._of_later_tokens = _layers_of_later_tokens(self.header, self.config.num_hidden_layers)
            self._places = places(self.config, self.header.tensors)
            self._check_used()
            interleaved = family(self.config.architecture).gguf
            assert interleaved is not None
            order = channel_order(self.config, interleaved=interleaved.interleaved)
            self._weights = FamilyWeights(self._tensors, self._places, order)
        except BaseException:
            self._files.close()
            raise
        self._fingerprint: str | None = None

    def tokenizer_contents(self) -> dict[str, bytes]:
        """Name and content of each file that a Hugging Face directory of this model would have for its tokenizer.

        InputError for a file without a tokenizer, or with one that cannot be read exactly.
        """
        return tokenizer_contents(self.header, family(self.config.architecture), self.config.vocab_size)

    def names(self) -> list[str]:
        """Every tensor of the decoder."""
        return [name for name in self._weights.names() if not name.startswith(self._of_later_tokens)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in], and those of experts are one under the other."""
        return self._weights.shape(name)

    def dtype(self, name: str) -> str:
        """The type that `read` returns: the stored one, float32 for quantised blocks."""
        return self._weights.dtype(name)

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self._weights.read(name)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of one tensor, reading and dequantising only them (whole heads where rows are moved)."""
        return self._weights.read_rows(name, start, stop)

    def block_bits(self, name: str) -> int | None:
        """Bits of a tensor's elements; None for floats. InputError for blocks that an engine cannot hold exactly."""
        kind = self._kind(name)
        if kind in _STORED or not name.endswith(_MATRICES):
            return None
        if (expected := self._not_kept(name)) is not None:
            raise InputError(
                f"--weights keep: {name} is {kind}, which an engine cannot hold exactly; expected {expected} or floats",
                hint="--weights int8, or fp32",
            )
        return KEPT_BITS[kind]

    def has_offsets(self, name: str) -> bool:
        """True if the blocks of a matrix have offsets."""
        return self._kind(name) in WITH_OFFSETS

    @property
    def keeps_its_blocks(self) -> bool:
        """True if it has matrices in blocks, and an engine holds all of them as they are (`KEPT_BITS`)."""
        blocks = [name for name in self.names() if name.endswith(_MATRICES) and self._kind(name) not in _STORED]
        return bool(blocks) and all(self._not_kept(name) is None for name in blocks)

    def read_blocks(self, name: str, start: int, stop: int) -> KeptBlocks:
        """Rows [start, stop) of a matrix whose type is in `KEPT_BITS`, as an engine stores them."""
        tensor = self.header.tensors[self._places[name].name]
        first, last, picks = self._weights.source_rows(name, start, stop)
        raw = self._tensors.raw(tensor, first, last)
        blocks = kept_blocks(raw, tensor.type, f"{self.path}: tensor {tensor.name!r}")
        columns = self._places[name].columns
        order = slice(None) if columns is None else columns[::BLOCK] // BLOCK
        rows = slice(None) if picks is None else picks
        return KeptBlocks(*(None if part is None else part[rows][:, order] for part in blocks))  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the configuration and the files, reading every byte once."""
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self.config.identity}\0{self._files.digest()}".encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _kind(self, name: str) -> str:
        return self.header.tensors[self._places[name].name].type

    def _not_kept(self, name: str) -> str | None:
        """Return the form expected in place of a matrix's blocks, if an engine cannot hold them; else None.

        The matrices of a layer's experts are one operator's, which has one number of bits and no offsets.
        """
        kind, layer = self._kind(name), name.partition(".mlp.experts.")[0]
        if kind not in KEPT_BITS:
            return f"{', '.join(KEPT_BITS)} (blocks of 32 with one float16 scale)"
        columns = self._places[name].columns
        if columns is not None and (len(columns) % BLOCK or (np.diff(columns.reshape(-1, BLOCK)) != 1).any()):
            return "value heads of a multiple of 32 channels"
        if layer == name:
            return None
        stored = self.header.tensors
        places = [self._places[f"{layer}.{matrix}"].name for matrix in EXPERT_MATRICES]
        kinds = {stored[place].type for place in places if place in stored}  # `check_weights` names missing ones
        if kind in WITH_OFFSETS or kinds != {kind}:
            return f"{', '.join(one for one in KEPT_BITS if one not in WITH_OFFSETS)}, one for all matrices of experts"
        return None

    def _check_used(self) -> None:
        """Raise InputError for a tensor that is part of none of the decoder's, nor of a layer for later tokens."""
        used = CONFIGURATION | {rows.name for rows in self._places.values()}
        for name in self.header.tensors:
            if name not in used and not name.startswith(self._of_later_tokens):
                raise InputError(f"{self.path}: tensor {describe(name)} has no place in {self.config.architecture}")


def _layers_of_later_tokens(header: GgufHeader, first: int) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors of layers that predict later tokens; they are not read."""
    count = GgufKeys(header, str(header.scalar("general.architecture")))[LATER_TOKENS]
    return tuple(f"blk.{layer}." for layer in range(first, first + (count if isinstance(count, int) else 0)))


class _FileTensors:
    """A `WeightSource` over a file's tensors, under its own names and in its own order; experts' rows are stacked."""

    def __init__(self, files: GgufFiles) -> None:
        self._files, self._source, self._tensors = files, files.header.source, files.header.tensors

    def names(self) -> list[str]:
        return [name for name in self._tensors if name not in CONFIGURATION]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name].shape
        if len(shape) == 1:
            return (1, *shape) if name.endswith(SHARED_GATE) else shape
        if name.endswith(_CONVOLUTION):
            return (shape[0], 1, *shape[1:])
        if name.endswith((".bias", ".attn_q_norm.weight", ".attn_k_norm.weight")):
            return (int(np.prod(shape, dtype=np.int64)),)
        *outer, columns = shape
        return int(np.prod(outer, dtype=np.int64)), columns

    def dtype(self, name: str) -> str:
        return "float32" if name.endswith(_DECAY) else _STORED.get(self._tensors[name].type, "float32")

    def read(self, name: str) -> NDArray[Any]:
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        tensor, shape = self._tensors[name], self.shape(name)
        if not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"{name}: rows {start}..{stop} of shape {list(shape)}")
        if len(shape) == 1:  # a vector of blocks has no rows that could be read one by one
            values = self.values(tensor)[start:stop]
            return self._logarithms(values, name) if name.endswith(_DECAY) else values
        return self._decoded(self.raw(tensor, start, stop), tensor).reshape(stop - start, *shape[1:])

    def fingerprint(self) -> str:
        return self._files.digest()

    def _logarithms(self, decays: NDArray[Any], name: str) -> NDArray[np.float32]:
        """A_log of each head whose -exp(A_log) is stored."""
        if not (decays < 0).all():
            raise InputError(f"{self._source}: tensor {name!r}: expected numbers below 0")
        return np.log(-decays.astype(np.float64)).astype(np.float32)

    def values(self, tensor: GgufTensor) -> NDArray[Any]:
        """All values of a vector."""
        return self._decoded(self._files.read(tensor, 0, tensor.nbytes), tensor)

    def raw(self, tensor: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) of a matrix as bytes."""
        row = tensor.nbytes // self.shape(tensor.name)[0]
        return self._files.read(tensor, start * row, (stop - start) * row).reshape(stop - start, row)

    def _decoded(self, raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[Any]:
        """The values of rows of bytes: floats as they are stored, blocks as float32."""
        if tensor.type in _STORED:
            return raw.view(numpy_dtype(_STORED[tensor.type]))
        if tensor.type == "MXFP4":
            elements, size = BLOCKS["MXFP4"]
            count = raw.shape[-1] // size
            blocks = raw.reshape(-1, count, size)
            numbers, scales = nibbles_side_by_side(blocks[..., 1:]), blocks[..., 0]
            wide = widened(numbers, scales, f"{self._source}: tensor {tensor.name!r}")
            return wide.reshape(*raw.shape[:-1], count * elements)
        from gguf import GGMLQuantizationType, dequantize

        return dequantize(raw, GGMLQuantizationType[tensor.type])
