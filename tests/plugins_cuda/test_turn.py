"""The kernels of turns: appending a block, raising bounds, joining, overwriting state; each bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from kvc_trt.operators.turns.replace import REPLACE_BOUNDS, REPLACE_CACHE
from kvc_trt.reference import append_block as reference_append
from tests.plugins_cuda.cases import DTYPES, FP8, bounds_of
from tests.plugins_cuda.checks import assert_same_bits

LARGEST_FP8_CODE = 0x7B
HEAD_SIZES = (16, 24, 64, 96, 128, 256)
PAGES = (1, 2, 3, 5, 16, 33, 100)
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class BlockCase:
    """A cache whose rows store `stored` tokens and get `new` ones; slots past a row's end and padding hold NaN."""

    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    bounds: Tensor
    cache_lengths: Tensor
    lengths: Tensor
    page_size: int
    fp8_bounds: int = 0

    def of(self, operator: Operator) -> dict[str, Any]:
        """Copies of the operator's arguments."""
        names = [tensor.name for tensor in operator.inputs] + [one.name for one in operator.attributes]
        values = {name: getattr(self, name) for name in names}
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def block_case(
    stored: Sequence[int], new: Sequence[int], *, capacity: int | None = None, block: int | None = None,
    kv_heads: int = 2, size: int = 32, page: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0,
    fp8: bool = False,
) -> BlockCase:  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    batch, width = len(stored), max(*new, 1) if block is None else block
    slots = max(m + n for m, n in zip(stored, new, strict=True)) + 3 if capacity is None else capacity
    k_new, v_new = (torch.randn((batch, kv_heads, width, size), generator=make).to(dtype) for _ in range(2))
    k_cache, v_cache = (torch.randn((batch, kv_heads, slots, size), generator=make).to(dtype) for _ in range(2))
    for row, (m, n) in enumerate(zip(stored, new, strict=True)):
        k_new[row, :, max(n, 0) :], v_new[row, :, max(n, 0) :] = math.nan, math.nan
        k_cache[row, :, max(m, 0) :], v_cache[row, :, max(m, 0) :] = math.nan, math.nan
    numbers = [torch.tensor(rows, dtype=torch.int64) for rows in (stored, new)]
    bounds = bounds_of(k_cache, numbers[0].clamp(0, slots), page, fp8=fp8)
    return BlockCase(k_new, v_new, k_cache, v_cache, bounds, *numbers, page, int(fp8))


def compare(library: KernelLibrary, operator: Operator, case: BlockCase) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run the kernel and the reference; every state tensor and every new one has the same bits. Returns both."""
    assert operator.kernel is not None
    mine = case.of(operator)
    moved = {name: x.to(library.device_type) if isinstance(x, Tensor) else x for name, x in case.of(operator).items()}
    made = {name: value.cpu() for name, value in library.compute(operator, moved).items()}
    reference: Callable[..., Any] = getattr(reference_ops, operator.kernel.operation.removeprefix("kvc_"))
    expected = reference(**mine) or ()
    for (name, found), wanted in zip(made.items(), expected, strict=True):
        assert_same_bits(found, wanted, name)
    for tensor in operator.inputs:
        assert_same_bits(moved[tensor.name].cpu(), mine[tensor.name], tensor.name)
    return moved, made


BLOCKS = [pytest.param(one, False, id=one.name) for one in (APPEND_BLOCK, RAISE_BOUNDS, JOIN_BLOCK)]
of_a_block = pytest.mark.parametrize(
    ("operator", "fp8"), [*BLOCKS, pytest.param(RAISE_BOUNDS, True, id=f"{RAISE_BOUNDS.name}-fp8")]
)


@pytest.mark.pairwise
@of_a_block
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("stored", "new"),
    [
        ([0], [1]),  # the first token of all
        ([5, 0, 70], [1, 1, 1]),  # what a step appends
        ([5, 0, 70, 33], [9, 40, 3, 1]),  # ragged rows
        ([8, 7, 4], [4, 5, 8]),  # up to, over and from the edge of a page
        ([0, 3], [100, 0]),  # a row without tokens
        ([64], [129]),  # several thread blocks
    ],
)
def test_rows_of_a_turn_equal_the_reference(
    scheduled_library: KernelLibrary, operator: Operator, fp8: bool, dtype: torch.dtype, stored: list[int],
    new: list[int],
) -> None:  # fmt: skip
    compare(scheduled_library, operator, block_case(stored, new, dtype=dtype, fp8=fp8))


@of_a_block
@MANY
@given(data=st.data())
def test_random_shapes_equal_the_reference(
    library: KernelLibrary, operator: Operator, fp8: bool, data: st.DataObject
) -> None:
    """Ragged lengths, pages and blocks of any size, caches that the turn fills to the last slot."""
    rows = data.draw(st.integers(1, 3))
    stored = data.draw(st.lists(st.integers(0, 90), min_size=rows, max_size=rows))
    new = data.draw(st.lists(st.integers(0, 90), min_size=rows, max_size=rows))
    case = block_case(
        stored, new, capacity=max(1, *map(sum, zip(stored, new, strict=True))) + data.draw(st.integers(0, 2)),
        block=max(1, *new) + data.draw(st.integers(0, 3)), kv_heads=data.draw(st.integers(1, 3)),
        size=data.draw(st.sampled_from(HEAD_SIZES)), page=data.draw(st.sampled_from(PAGES)),
        dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 2**31)), fp8=fp8,
    )  # fmt: skip
    compare(library, operator, case)


@of_a_block
def test_numbers_out_of_range_touch_nothing_else(library: KernelLibrary, operator: Operator, fp8: bool) -> None:
    """A token without a slot is dropped; lengths are taken as the nearest ones that are possible."""
    sizes = {"capacity": 24, "block": 9, "page": 5, "fp8": fp8}
    compare(library, operator, block_case([20, 24, -3, 10**9], [9, 3, 4, 4], **sizes))
    compare(library, operator, block_case([3, 3], [-1, 10**9], **sizes))


@FP8
def test_appending_is_what_the_reference_appends(library: KernelLibrary, fp8: bool) -> None:
    """The normative reference takes one token after the other; keys, values and bounds of a block equal that."""
    case = block_case([0, 7, 30], [12, 1, 5], page=3, fp8=fp8)
    moved, _ = compare(library, APPEND_BLOCK, case)
    raised, _ = compare(library, RAISE_BOUNDS, case)
    keys, values = case.k_cache.clone(), case.v_cache.clone()
    low, high = reference_ops.page_major(case.bounds, -(-case.k_cache.shape[2] // case.page_size))
    block = case.k_new, case.v_new, case.lengths
    reference_append(keys, values, low, high, case.cache_lengths, *block, page_size=case.page_size, fp8=fp8)
    assert_same_bits(moved["k_cache"].cpu(), keys, "keys")
    assert_same_bits(moved["v_cache"].cpu(), values, "values")
    assert_same_bits(raised["bounds"].cpu(), reference_ops.channel_major(low, high, torch.float32, fp8=fp8), "bounds")
    whole = bounds_of(keys, case.cache_lengths + case.lengths, 3, fp8=fp8)
    assert_same_bits(raised["bounds"].cpu(), whole, "all bounds")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_key_makes_its_bounds_nan(library: KernelLibrary, dtype: torch.dtype) -> None:
    case = block_case([2], [6], dtype=dtype)
    case.k_new[0, 1, 3, 5] = math.nan
    moved, _ = compare(library, RAISE_BOUNDS, case)
    broken = moved["bounds"].cpu().isnan()
    assert broken.sum() == 2
    assert bool(broken[0, 1, [5, 32 + 5], 1].all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_key_has_the_widest_fp8_bounds(library: KernelLibrary, dtype: torch.dtype) -> None:
    case = block_case([2], [6], dtype=dtype, fp8=True)
    case.k_new[0, 1, 3, 5] = math.nan
    moved, _ = compare(library, RAISE_BOUNDS, case)
    widest = moved["bounds"].cpu() == LARGEST_FP8_CODE
    assert widest.sum() == 2
    assert bool(widest[0, 1, [5, 32 + 5], 1].all())


def test_joined_tables_end_with_zeros(library: KernelLibrary) -> None:
    """The cache may hold NaN there, and masked entries take part in products."""
    _, made = compare(library, JOIN_BLOCK, block_case([5, 9], [3, 1], capacity=12, block=4))
    assert made["joined_lengths"].tolist() == [8, 10]
    for row, end in enumerate((8, 10)):
        assert not made["k"][row, :, end:].any()
        assert not made["v"][row, :, end:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@MANY
@given(data=st.data())
def test_state_is_overwritten_byte_for_byte(library: KernelLibrary, dtype: torch.dtype, data: st.DataObject) -> None:
    """Equal to the last bit, and no byte beyond changes: NaN and the sign of zero are copied too."""
    batch, heads, slots = (data.draw(st.integers(1, most)) for most in (3, 3, 150))
    size, page = data.draw(st.sampled_from(HEAD_SIZES)), data.draw(st.sampled_from(PAGES))
    make = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    def counted() -> Tensor:
        return torch.randint(-1, 2**31 - 1, (batch, heads, slots), generator=make, dtype=torch.int32)

    table, pages = (batch, heads, slots, size), (batch, heads, 2 * size, -(-slots // page))
    caches, bounds = [drawn(*table) for _ in range(4)], [drawn(*pages) for _ in range(2)]
    codes = [torch.randint(-128, 128, pages, generator=make, dtype=torch.int8) for _ in range(2)]
    caches[2][0, 0, 0, :2] = torch.tensor([math.nan, -0.0])
    names = [tensor.name for tensor in REPLACE_CACHE.inputs]
    cache = dict(zip(names, (*caches[:2], counted(), *caches[2:], counted()), strict=True))
    for operator, given_ in (
        (REPLACE_CACHE, cache),
        (REPLACE_BOUNDS, dict(zip(("bounds", "bounds_kept"), bounds, strict=True))),
        (REPLACE_BOUNDS, dict(zip(("bounds", "bounds_kept"), codes, strict=True))),
    ):
        moved = {name: value.to(library.device_type) for name, value in given_.items()}
        fp8 = {"fp8_bounds": int(given_["bounds"] is codes[0])} if operator is REPLACE_BOUNDS else {}
        assert library.compute(operator, moved | fp8) == {}
        for output, kept in zip(operator.outputs, list(given_)[len(operator.outputs) :], strict=True):
            assert output.alias is not None
            assert_same_bits(moved[output.alias].cpu(), given_[kept], output.name)
