"""The parts of stored vectors as tensors, made and read by the reference: the contents of a cache in a format.

Parts are tensors [...,.]: codes INT8 (two to a byte where they have 4 bits), scales FLOAT16 or the bytes of exponents
INT8, and minima FLOAT16 where the format has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvc_trt.models.cache_formats import FP8, CacheFormat, VectorFormat
from kvc_trt.operators.schema import Tensor as Schema
from kvc_trt.operators.schema import part_names, vector_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.reference.stored import Stored, store

CACHES = K_CACHE, V_CACHE


def parts_of(vectors: Tensor, form: VectorFormat | None) -> tuple[Tensor, ...]:
    """Return the parts of `vectors` [...,D] of any floating-point type; themselves if they have no format."""
    if form is None:
        return (vectors,)
    made = store(vectors, format=form.name)
    codes = made.codes.view(torch.uint8)
    if form.code_bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    scales = made.scales.view(torch.int8) if form.scale_bytes == 1 else made.scales
    numbers = (scales,) if made.minima is None else (scales, made.minima)
    return codes.view(torch.int8), *numbers


def read_parts(parts: Sequence[Tensor], form: VectorFormat | None) -> Tensor:
    """Return the vectors [...,D] of their parts: float32, or in their own type if they have no format."""
    if form is None:
        return parts[0]
    codes, scales = parts[0].contiguous().view(torch.uint8), parts[1]
    if form.code_bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    if form == FP8:
        codes, scales = codes.view(torch.float8_e4m3fn), scales.contiguous().view(torch.uint8)
    elif not form.grouped:
        codes = codes.view(torch.int8)
    return Stored(codes, scales, parts[2] if form.grouped else None).values()


@dataclass(frozen=True)
class StoredTables:
    """Keys and values of the same tokens, [...,.], in a format."""

    form: CacheFormat
    keys: tuple[Tensor, ...]
    """The parts of the keys."""
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, form: CacheFormat) -> StoredTables:
        """Store exact keys and values [...,D]."""
        return cls(form, parts_of(keys, form.keys), parts_of(values, form.values))

    @classmethod
    def named(
        cls, given: Mapping[str, Tensor], form: CacheFormat, tensors: tuple[Schema, Schema] = CACHES, suffix: str = ""
    ) -> StoredTables:
        """Return the parts that stand in `given` by the names of an operator's `tensors`, which end in `suffix`."""
        keys, values = names_of(form, tensors)
        return cls(form, tuple(given[name + suffix] for name in keys), tuple(given[name + suffix] for name in values))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The parts of the keys, then those of the values."""
        return self.keys + self.values

    def map(self, change: Callable[[Tensor], Tensor]) -> StoredTables:
        """Apply `change` to every part and return the result: a choice or a move of tokens, never of channels."""
        return replace(self, keys=tuple(map(change, self.keys)), values=tuple(map(change, self.values)))

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [...,D] as they are read: float32, or in their own type if they have no format."""
        return read_parts(self.keys, self.form.keys), read_parts(self.values, self.form.values)


def names_of(form: CacheFormat, tensors: tuple[Schema, Schema] = CACHES) -> tuple[list[str], list[str]]:
    """Return the names of the parts of an operator's keys, and of its values."""
    keys, values = (part_names(tensor, vector_of(tensor, form)) for tensor in tensors)
    return keys, values
