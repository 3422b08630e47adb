"""Bounds in fp8 as the kernels write them, against `kvc_trt.operators.fp8_bounds`, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.structs import struct_of
from kvc_trt.operators.compaction.compact import COMPACT_TURN
from kvc_trt.operators.fp8_bounds import EMPTY, codes_of, values_of
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.turns.append_block import RAISE_BOUNDS
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS
from tests.plugins_cuda.cases import DTYPES, compact_case, step_case
from tests.plugins_cuda.checks import run_compact
from tests.plugins_cuda.hybrid_steps import run

SIZE, TOKENS = 256, 128
SMALLEST = 2.0**-16


def numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit type; for float32 those of fp8, their neighbours, numbers between them, and any bits."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes = np.arange(128, dtype=np.int8)
    positive = values_of(codes[codes < 0x7C])
    middle = (positive[1:] + positive[:-1]) / 2
    exact = np.concatenate([positive, middle, [1e-45, 1e-30, 65504, 65536, 3e38]]).astype(np.float32)
    near = [np.nextafter(exact, np.float32(side)) for side in (-math.inf, math.inf)]
    random = np.random.default_rng(4).integers(0, 2**32, 2**18, dtype=np.uint32)
    small = random & 0x81FFFFFF | 0x36000000  # where fp8 has its numbers
    values = np.concatenate([exact, *near, random.view(np.float32), small.view(np.float32)])
    return torch.from_numpy(np.concatenate([values, -values]))


def blocks(dtype: torch.dtype) -> Iterator[Tensor]:
    """Return all the keys as [1,1,TOKENS,SIZE], repeated where the last block is not full."""
    values, block = numbers(dtype), SIZE * TOKENS
    padded = torch.cat([values, values[: -len(values) % block]])
    return (part.reshape(1, 1, TOKENS, SIZE) for part in padded.split(block))


def raised(library: KernelLibrary, keys: Tensor) -> Tensor:
    """Bounds [2D,P] of empty pages of one token each, after these keys."""
    bounds = torch.full((1, 1, 2 * SIZE, TOKENS), int(EMPTY), dtype=torch.int8)
    given = {
        "k_new": keys, "bounds": bounds, "cache_lengths": torch.zeros(1, dtype=torch.int64),
        "lengths": torch.tensor([TOKENS]),
    }  # fmt: skip
    moved = {name: tensor.to(library.device_type) for name, tensor in given.items()}
    library.compute(RAISE_BOUNDS, moved | {"page_size": 1, "fp8_bounds": 1})
    return moved["bounds"][0, 0].cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_bounds_round_every_number_up(library: KernelLibrary, dtype: torch.dtype) -> None:
    for keys in blocks(dtype):
        wide = keys[0, 0].float().numpy().T
        expected = np.concatenate([codes_of(wide), codes_of(-wide)])
        np.testing.assert_array_equal(raised(library, keys).numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_bounds_are_never_below_the_keys(library: KernelLibrary, dtype: torch.dtype) -> None:
    """A bound is at most the next number of fp8, and never an infinity, NaN or -0."""
    for keys in blocks(dtype):
        codes = raised(library, keys).numpy()
        assert not np.isin(codes, codes_like(0x7C, 0x7D, 0x7E, 0x7F, 0x80, 0xFC, 0xFD, 0xFE, 0xFF)).any()
        upper, wide = values_of(codes[:SIZE]), keys[0, 0].float().numpy().T
        inside = np.abs(wide) <= 57344
        assert (upper[inside] >= wide[inside]).all()
        assert (upper[inside] - wide[inside] <= np.maximum(np.abs(wide[inside]) / 4, SMALLEST)).all()


def codes_like(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint8).view(np.int8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compaction_steps_and_turns_round_bounds_alike(library: KernelLibrary, dtype: torch.dtype) -> None:
    """A compaction, a step and a turn give a page of the same keys the same bounds."""
    case = compact_case(lengths=[60], budget=60, capacity=64, size=64, page=1, dtype=dtype, fp8=True)
    case.k[0, 0, :7, 0] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-6, -1e-6]).to(dtype)
    compacted = run_compact(library, case).bounds[0, :, :, :60]
    empty = step_case(lengths=[0], heads=2, size=64, capacity=64, page=1, dtype=dtype, fp8=True)
    by_steps = empty
    for token in range(60):
        entry = {name: source[:, :, token].contiguous() for name, source in (("k_new", case.k), ("v_new", case.v))}
        by_steps, _, _ = run(library, replace(by_steps, cache_lengths=torch.tensor([token]), **entry))
    assert torch.equal(by_steps.bounds[0, :, :, :60], compacted)
    wide = case.k[0].float().numpy().swapaxes(1, 2)
    expected = np.concatenate([codes_of(wide), codes_of(-wide)], axis=1)
    np.testing.assert_array_equal(compacted.numpy(), expected)


# ---- Refusals


@pytest.mark.parametrize("operator", [COMPACT_TURN, RAISE_BOUNDS, REPLACE_BOUNDS], ids=lambda one: one.name)
@pytest.mark.parametrize("value", [-1, 2])
def test_an_unknown_type_of_bounds_is_refused(library: KernelLibrary, operator: Operator, value: int) -> None:
    """test_bad_numbers.py tries the other operations."""
    assert operator.kernel is not None
    sizes = {
        "batch": 1, "heads": 1, "kv_heads": 1, "head_size": 16, "channels": 32, "window": 1, "pool_kernel": 1,
        "page_size": 4, "prompt_length": 8, "prompt_budget": 4, "capacity": 8, "block": 1, "pages": 16,
    }  # fmt: skip
    struct = struct_of(operator)
    names = {name for name, _ in struct._fields_}
    params = struct(**{name: number for name, number in sizes.items() if name in names})
    library.workspace_bytes(operator.kernel.operation, params)
    params.fp8_bounds = value
    with pytest.raises(KernelError, match=rf"fp8_bounds is {value}; expected 0\.\.1"):
        library.workspace_bytes(operator.kernel.operation, params)


@pytest.mark.parametrize("fp8", [0, 1])
def test_bounds_of_the_other_type_are_refused(library: KernelLibrary, fp8: int) -> None:
    case = replace(step_case(lengths=[20], fp8=not fp8), fp8_bounds=fp8)
    with pytest.raises(ValueError, match=r"bounds .* is torch\.(int8|float32); expected torch\.(float32|int8)"):
        library.hybrid_attention(**case.to(library.device_type).arguments())
