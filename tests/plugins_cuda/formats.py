"""Cases of `cases.py` over caches in a format: what the kernels are given, and what they must write and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.schema import CACHE_FORMAT, Operator
from kvc_trt.operators.schema import Tensor as Schema
from kvc_trt.reference import page_bounds
from tests.plugins_cuda.cases import StepCase
from tests.stored_tables import CACHES, parts_of, read_back

POISON = -7
"""Byte of free slots: a NaN scale, so that any read of them shows."""


def parts(keys: Tensor, values: Tensor, form: str, tensors: tuple[Schema, Schema] = CACHES) -> dict[str, Tensor]:
    """Return the parts of keys and values by the names of an operator's tensors, as the reference stores them."""
    made = parts_of(keys.float().numpy(), values.float().numpy(), form, tensors)
    return {name: torch.from_numpy(part) for name, part in made.items()}


def read(values: Tensor, form: str, kind: str) -> Tensor:
    """Return what a cache gives back of keys or values, float32."""
    vector = getattr(CACHE_FORMATS[form], kind)
    return torch.from_numpy(read_back(values.float().numpy(), vector))


def code_of(form: str) -> dict[str, int]:
    """Return the attribute that names a format."""
    return {CACHE_FORMAT.name: CACHE_FORMATS[form].code}


def bounds_of(keys: Tensor, lengths: Tensor, page: int, dtype: torch.dtype, *, fp8: bool | int) -> Tensor:
    """Return the bounds [B,G,2D,P] of keys as they are read back, float32, for a cache of `dtype`."""
    return reference_ops.channel_major(*page_bounds(keys, lengths, page, fp8=bool(fp8)), dtype, fp8=bool(fp8))


def appended(case: StepCase) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [B,G,C,D] after the append, 0 in free slots, and which slots are used [B,C]."""
    keys, values = case.k_cache.clone(), case.v_cache.clone()
    slots = keys.shape[2]
    for row, length in enumerate(case.cache_lengths.tolist()):
        if 0 <= length < slots:
            keys[row, :, length], values[row, :, length] = case.k_new[row], case.v_new[row]
    lengths = torch.where((case.cache_lengths < 0) | (case.cache_lengths >= slots), -1, case.cache_lengths)
    used = torch.arange(slots) <= lengths[:, None]
    mask = used[:, None, :, None]
    return torch.where(mask, keys, 0), torch.where(mask, values, 0), used


@dataclass(frozen=True)
class StoredStep:
    """A decode step over caches in a format."""

    case: StepCase
    form: str

    def state(self) -> dict[str, Tensor]:
        """Return the caches before the step, poisoned where no token is."""
        used = torch.arange(self.case.k_cache.shape[2]) < self.case.cache_lengths.clamp(min=0)[:, None]
        keys, values = (torch.where(used[:, None, :, None], t, 0) for t in (self.case.k_cache, self.case.v_cache))
        return {name: poisoned(part, used) for name, part in parts(keys, values, self.form).items()}

    def expected(self) -> dict[str, Tensor]:
        """Return the caches after the step."""
        keys, values, used = appended(self.case)
        return {name: poisoned(part, used) for name, part in parts(keys, values, self.form).items()}

    def read(self) -> tuple[Tensor, Tensor]:
        """Return what attention reads of the caches after the step."""
        keys, values, _ = appended(self.case)
        return read(keys, self.form, "keys"), read(values, self.form, "values")

    def run(self, library: KernelLibrary, operator: Operator = DENSE_ATTENTION, **more: Any) -> dict[str, Tensor]:
        """Run an operator; return its outputs and the state that it updated, on the CPU."""
        token = {name: getattr(self.case, name) for name in ("query", "k_new", "v_new", "cache_lengths")}
        numbers = {name: value for name, value in more.items() if not isinstance(value, Tensor)}
        given = {**token, **self.state(), **{name: t for name, t in more.items() if isinstance(t, Tensor)}}
        moved = {name: t.to(library.device_type, copy=True) for name, t in given.items()}
        made = library.compute(operator, {**moved, **numbers, **code_of(self.form)})
        return {name: t.cpu() for name, t in {**moved, **made}.items()}


def poisoned(part: Tensor, used: Tensor) -> Tensor:
    """Return a part [B,G,C,.] with every byte of the slots that are not in `used` [B,C] set to POISON."""
    bytes_ = part.view(torch.int8)
    return torch.where(used[:, None, :, None], bytes_, torch.tensor(POISON, dtype=torch.int8)).view(part.dtype)


def assert_equal_bytes(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal to the last bit, NaN included."""
    same = found.view(torch.int8) == expected.view(torch.int8)
    assert found.shape == expected.shape
    assert bool(same.all()), f"{name}: {int((~same).sum())} bytes differ, first at {(~same).nonzero()[0].tolist()}"
