"""Checkpoints whose matrices are stored in four bits: AutoGPTQ's, AutoAWQ's and compressed-tensors' layouts.

A weight is `(level - zero) * scale`. Its level has four bits, eight to an int32; the input channels of a group share
zero and scale. For a matrix [out,in], BASE in place of the name BASE.weight:

- gptq: levels BASE.qweight [in/8,out], the lowest bits first; zeros BASE.qzeros [groups,out/8], which version 1 of the
  format stores less 1; scales BASE.scales [groups,out].
- awq: the same names; qweight is [in,out/8], and its words and those of qzeros hold columns 0 2 4 6 1 3 5 7.
- compressed-tensors: BASE.weight_packed [out,in/8], the lowest bits first; zeros 8, or BASE.weight_zero_point
  [out/8,groups]; BASE.weight_scale [out,groups]; BASE.weight_shape repeats the shape.

Where channels were ordered by activation, BASE.g_idx or BASE.weight_g_idx [in] names the group of each channel.
Differences are exact in float32, and so are products with scales of 16 bits: the values read are exactly those stored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kvc_trt.errors import InputError, describe
from kvc_trt.models.quantisation import BLOCK, KeptBlocks
from kvc_trt.models.weights import FLOAT_DTYPES, WeightSource
from kvc_trt.validation import ForeignSchema, validated

IN_A_WORD = 8
SYMMETRIC = 8
"""The zero of a matrix that stores none, and that of an engine's blocks."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose level is in each four bits of a word, the lowest first."""
Method = Literal["awq", "compressed-tensors", "gptq"]


class _Method(ForeignSchema):
    quant_method: Literal["awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq"]
    config_groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    transform_config: Any = None
    """Rotations of activations, which a model computes between its matrices."""


class _Gptq(ForeignSchema):
    bits: Literal[4]
    group_size: int
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"


class _Awq(ForeignSchema):
    bits: Literal[4]
    group_size: int
    version: Literal["gemm", "GEMM"] = "gemm"


class _Packed(ForeignSchema):
    format: Literal["pack-quantized"] = "pack-quantized"


class _PackedGroup(ForeignSchema):
    type: Literal["int"]
    num_bits: Literal[4]
    strategy: Literal["group", "channel"]
    group_size: int = -1
    symmetric: bool = True
    actorder: bool | Literal["group", "dynamic", "weight", "static"] = False


@dataclass(frozen=True)
class Int4Layout:
    """How a checkpoint stores its matrices in four bits."""

    method: Method
    group_size: int
    """Input channels of a group; -1: all of a row."""
    zeros_less_one: bool = False
    by_activation: bool = False
    """True if the channels of a group may be anywhere."""
    zeros_stored: bool = True
    """True if every matrix must have its zeros; without them they are 8."""

    @property
    def fits_blocks(self) -> bool:
        """True if an engine's blocks of 32 neighbouring channels lie in one group each."""
        return not self.by_activation and (self.group_size == -1 or self.group_size % BLOCK == 0)

    def channels_of(self, columns: int) -> int:
        """Return the channels of a group in a matrix of `columns` input channels."""
        return columns if self.group_size == -1 else min(self.group_size, columns)


def int4_layout(given: object, source: str) -> Int4Layout | None:
    """Return the layout that config.json's `quantization_config` names; None for one of fp8. InputError for others."""
    found = validated(_Method, given, source)
    if found.transform_config:
        raise InputError(
            f"{source}: transform_config is {describe(found.transform_config)}, expected none: what it does to "
            "activations is not computed"
        )
    if found.quant_method == "gptq":
        gptq = validated(_Gptq, given, source)
        return _checked(Int4Layout("gptq", gptq.group_size, gptq.checkpoint_format == "gptq", gptq.desc_act), source)
    if found.quant_method == "awq":
        return _checked(Int4Layout("awq", validated(_Awq, given, source).group_size), source)
    groups = [(name, group.get("weights")) for name, group in found.config_groups.items()]
    if found.quant_method != "compressed-tensors" or not any(_is_int(weights) for _, weights in groups):
        return None
    validated(_Packed, given, source)
    if len(groups) != 1:
        raise InputError(
            f"{source}: config_groups are {', '.join(found.config_groups)}, expected one for matrices in int4"
        )
    where = f"{source}.config_groups.{groups[0][0]}.weights"
    packed = validated(_PackedGroup, groups[0][1], where)
    size = -1 if packed.strategy == "channel" else packed.group_size
    anywhere = packed.actorder in (True, "group", "dynamic")  # two names of one order
    layout = Int4Layout("compressed-tensors", size, by_activation=anywhere, zeros_stored=not packed.symmetric)
    return _checked(layout, where)


def _is_int(weights: object) -> bool:
    return isinstance(weights, dict) and weights.get("type") == "int"


def _checked(layout: Int4Layout, source: str) -> Int4Layout:
    if layout.group_size != -1 and layout.group_size < 1:
        raise InputError(f"{source}: group_size is {layout.group_size}, expected channels, or -1 for those of a row")
    return layout


class _Rows(NamedTuple):
    """Rows of a matrix as they are stored."""

    levels: NDArray[np.uint8]
    """[n,in]"""
    zeros: NDArray[np.int16]
    """[n,groups]"""
    scales: NDArray[np.float32]
    """[n,groups]"""


class Int4Source:
    """A checkpoint with matrices in four bits as a `WeightSource` of floats, and the blocks that an engine keeps."""

    def __init__(self, stored: WeightSource, layout: Int4Layout, expected: Collection[str]) -> None:
        """`expected` are the model's tensors under the checkpoint's names.

        Raises InputError for a matrix whose tensors do not fit together.
        """
        self._stored, self._layout = stored, layout
        names, packed = stored.names(), self._names("levels", "")
        self._bases = {
            name[: -len(packed)] + ".weight": name[: -len(packed)] for name in names if name.endswith(packed)
        }
        self._known = frozenset(names)
        if not self._bases:
            raise InputError(
                f"weights: no tensor *{packed}, expected matrices in four bits as {layout.method} has them"
            )
        self._shapes = {name: self._shape_of(base) for name, base in self._bases.items()}
        self._groups = {name: self._group_index(name) for name in self._bases}
        parts = {self._names(part, base) for base in self._bases.values() for part in _PARTS[layout.method]}
        biases = {f"{base}.bias" for base in self._bases.values()} - set(expected)
        zero = {name for name in biases & self._known if not stored.read(name).any()}
        self._with_offsets: dict[str, bool] = {}
        self._latest: tuple[str, NDArray[Any]] | None = None
        self._listed = [*self._bases, *(name for name in names if name not in parts | zero)]

    def names(self) -> list[str]:
        """Every tensor of the model; a bias of zeros that the model does not have is left out."""
        return list(self._listed)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; matrices are [out, in]."""
        return self._shapes[name] if name in self._bases else self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Type that `read` returns: float32 for a matrix in four bits."""
        return "float32" if name in self._bases else self._stored.dtype(name)

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a tensor."""
        if name not in self._bases:
            return self._stored.read_rows(name, start, stop)
        rows, groups = self._rows(name, start, stop), self._groups[name]
        values: NDArray[np.float32] = rows.levels.astype(np.float32)
        values -= rows.zeros[:, groups]
        values *= rows.scales[:, groups]
        return values

    def block_bits(self, name: str) -> int | None:
        """Bits of the blocks of a matrix; None for floats. InputError for a matrix that blocks do not hold exactly."""
        if name not in self._bases:
            return None
        columns, groups = self.shape(name)[1], self._groups[name]
        per_block = groups.reshape(-1, BLOCK) if columns % BLOCK == 0 else None
        if per_block is None or (per_block != per_block[:, :1]).any():
            raise InputError(
                f"--weights keep: {self._bases[name]} has groups that are not whole blocks of {BLOCK} neighbouring "
                "channels, which an engine cannot hold exactly",
                hint="--weights fp32",
            )
        return 4

    def has_offsets(self, name: str) -> bool:
        """True if a matrix has another zero than that of an engine's blocks."""
        if name not in self._with_offsets:
            zeros = self._zeros(self._bases[name], 0, self.shape(name)[0], self._group_count(name))
            self._with_offsets[name] = bool((zeros != SYMMETRIC).any())
        return self._with_offsets[name]

    def read_blocks(self, name: str, start: int, stop: int) -> KeptBlocks:
        """Rows [start, stop) of a matrix as an engine stores them; InputError for scales that float16 does not hold."""
        rows, groups = self._rows(name, start, stop), self._groups[name][::BLOCK]
        with np.errstate(over="ignore"):
            scales = rows.scales.astype(np.float16)
        if not np.array_equal(scales.astype(np.float32), rows.scales):
            raise InputError(
                f"--weights keep: {self._names('scales', self._bases[name])} has scales that float16 does not hold",
                hint="--weights fp32",
            )
        pairs = rows.levels.reshape(stop - start, -1, BLOCK)
        packed: NDArray[np.uint8] = pairs[..., 0::2] | (pairs[..., 1::2] << np.uint8(4))
        offsets: NDArray[np.float32] = (SYMMETRIC - rows.zeros) * rows.scales
        return KeptBlocks(packed, scales[:, groups], offsets[:, groups] if self.has_offsets(name) else None)

    def fingerprint(self) -> str:
        """The fingerprint of the checkpoint."""
        return self._stored.fingerprint()

    def _names(self, part: str, base: str) -> str:
        return f"{base}.{_PARTS[self._layout.method][part]}"

    def _group_count(self, name: str) -> int:
        shape = self._stored.shape(self._names("scales", self._bases[name]))
        return shape[1] if self._layout.method == "compressed-tensors" else shape[0]

    def _shape_of(self, base: str) -> tuple[int, int]:
        """Return the shape of a matrix; InputError unless its tensors have the shapes and types that follow from it."""
        method, packed = self._layout.method, self._stored.shape(self._names("levels", base))
        if f"{base}.weight" in self._known:
            raise InputError(f"weights: {base}.weight and {self._names('levels', base)} are one matrix, expected one")
        if len(packed) != 2:
            raise InputError(f"weights: {self._names('levels', base)} has shape {list(packed)}, expected two axes")
        if method == "gptq":
            shape = packed[1], packed[0] * IN_A_WORD
        elif method == "awq":
            shape = packed[1] * IN_A_WORD, packed[0]
        else:
            shape = packed[0], packed[1] * IN_A_WORD
        rows, columns = shape
        if 0 in shape or rows % IN_A_WORD:
            raise InputError(f"weights: {base} is a matrix {list(shape)}, expected a multiple of {IN_A_WORD} rows")
        groups = -(-columns // self._layout.channels_of(columns))
        by_row = method == "compressed-tensors"
        self._check(base, "levels", packed, ("int32",))
        self._check(base, "scales", (rows, groups) if by_row else (groups, rows), FLOAT_DTYPES)
        if self._layout.zeros_stored or self._names("zeros", base) in self._known:
            words = rows // IN_A_WORD
            self._check(base, "zeros", (words, groups) if by_row else (groups, words), ("int32",))
        if method != "awq" and self._names("groups", base) in self._known:
            self._check(base, "groups", (columns,), ("int32", "int64"))
        if by_row and self._names("shape", base) in self._known:
            self._check(base, "shape", (2,), ("int32", "int64"))
            if (repeated := self._stored.read(self._names("shape", base)).tolist()) != list(shape):
                raise InputError(f"weights: {self._names('shape', base)} is {repeated}, expected {list(shape)}")
        return shape

    def _check(self, base: str, part: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
        name = self._names(part, base)
        if name not in self._known:
            raise InputError(f"weights: there is no {name}, which {self._layout.method} stores beside the levels")
        if tuple(self._stored.shape(name)) != shape:
            raise InputError(f"weights: {name} has shape {list(self._stored.shape(name))}, expected {list(shape)}")
        if self._stored.dtype(name) not in types:
            raise InputError(f"weights: {name} is {self._stored.dtype(name)}, expected {' or '.join(types)}")

    def _group_index(self, name: str) -> NDArray[np.int64]:
        """Return the group of each channel, INT64 [in]."""
        columns, count = self.shape(name)[1], self._group_count(name)
        stored = f"{self._bases[name]}.{_PARTS[self._layout.method].get('groups')}"
        if stored not in self._known:
            if self._layout.by_activation:
                raise InputError(f"weights: there is no {stored}, and config.json orders channels by activation")
            return np.arange(columns) // self._layout.channels_of(columns)
        index = self._stored.read(stored).astype(np.int64)
        if (outside := index[(index < 0) | (index >= count)]).size:
            raise InputError(f"weights: {stored} has group {int(outside[0])}, expected 0..{count - 1}")
        return index

    def _rows(self, name: str, start: int, stop: int) -> _Rows:
        base = self._bases[name]
        packed = self._names("levels", base)
        if self._layout.method == "gptq":
            levels = _levels(self._words(packed)[:, start:stop], 0).T
        elif self._layout.method == "awq":
            levels = _columns(self._words(packed), start, stop, AWQ_COLUMNS).T
        else:
            levels = _levels(self._stored.read_rows(packed, start, stop), 1)
        scales = self._stored.read(self._names("scales", base)).astype(np.float32)
        scales = scales[start:stop] if self._layout.method == "compressed-tensors" else scales[:, start:stop].T
        if not np.isfinite(scales).all():
            raise InputError(f"{name}: contains NaN or infinite weights")
        return _Rows(levels, self._zeros(base, start, stop, scales.shape[1]), scales)

    def _words(self, packed: str) -> NDArray[Any]:
        """Return the words of a matrix whose rows lie across all of them; those of the latest one are kept."""
        if self._latest is None or self._latest[0] != packed:
            self._latest = packed, self._stored.read(packed)
        return self._latest[1]

    def _zeros(self, base: str, start: int, stop: int, groups: int) -> NDArray[np.int16]:
        """Return the zeros of rows [start, stop), INT16 [n,groups]."""
        name, method = self._names("zeros", base), self._layout.method
        if method == "compressed-tensors":
            if name not in self._known:
                return np.full((stop - start, groups), SYMMETRIC, np.int16)
            return _levels(self._stored.read(name), 0)[start:stop].astype(np.int16)
        order = AWQ_COLUMNS if method == "awq" else tuple(range(IN_A_WORD))
        zeros: NDArray[np.int16] = _columns(self._stored.read(name), start, stop, order).T.astype(np.int16)
        if self._layout.zeros_less_one:
            if (zeros == 15).any():
                raise InputError(f"{name}: has the stored zero 15, which some readers take for 16 and others for 0")
            zeros += np.int16(1)
        return zeros


_PARTS = {
    "gptq": {"levels": "qweight", "zeros": "qzeros", "scales": "scales", "groups": "g_idx"},
    "awq": {"levels": "qweight", "zeros": "qzeros", "scales": "scales"},
    "compressed-tensors": {
        "levels": "weight_packed", "zeros": "weight_zero_point", "scales": "weight_scale", "groups": "weight_g_idx",
        "shape": "weight_shape",
    },
}  # fmt: skip
"""The last part of each tensor's name."""


def unpacked(stored: WeightSource, quantisation: object, source: str, expected: Collection[str]) -> WeightSource:
    """Return the source itself, or an `Int4Source` over it if `quantization_config` says that it has such matrices."""
    layout = None if quantisation is None else int4_layout(quantisation, source)
    if layout is not None:
        return Int4Source(stored, layout, expected)
    for name in stored.names():
        if name.endswith((".qweight", ".weight_packed")):
            raise InputError(f"weights: {describe(name)} is packed, and {source} names no layout of four bits")
    return stored


def _levels(words: NDArray[Any], axis: int) -> NDArray[np.uint8]:
    """Take eight levels out of each word, one behind the other along `axis`."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    parts = [(bits >> np.uint32(4 * place)).astype(np.uint8) & np.uint8(15) for place in range(IN_A_WORD)]
    stacked = np.stack(parts, axis=axis + 1)
    shape = list(bits.shape)
    shape[axis] *= IN_A_WORD
    return stacked.reshape(shape)


def _columns(words: NDArray[Any], start: int, stop: int, order: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return columns [start, stop) of words [n,columns/8], whose levels are those of the columns in `order`."""
    first, last = start // IN_A_WORD, -(-stop // IN_A_WORD)
    levels = _levels(words[:, first:last], 1).reshape(len(words), -1, IN_A_WORD)
    in_order = levels[..., np.argsort(order)].reshape(len(words), -1)
    return in_order[:, start - first * IN_A_WORD : stop - first * IN_A_WORD]
