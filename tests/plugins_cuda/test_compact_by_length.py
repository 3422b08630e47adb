"""kvc_compact and kvc_compact_turn whose rows have budgets and pool kernels of their own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvc_trt.kernels import reference_ops
from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.operators.compaction.compact import COMPACT
from tests.plugins_cuda.cases import DTYPES
from tests.plugins_cuda.checks import assert_same_bits, truncates
from tests.rows_by_length import CAPACITY, KERNELS, PAGE_SIZE, PROMPT_BUDGET, Rows, check, drawn_rows, mixed_rows

NUMBERS = {
    "prompt_budget": PROMPT_BUDGET, "capacity": CAPACITY, "pool_kernel": KERNELS[1], "page_size": PAGE_SIZE,
    "fp8_bounds": 0,
}  # fmt: skip


def arguments(rows: Rows, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    tensors = {name: torch.from_numpy(array).to(device) for name, array in rows.inputs.items()}
    wide = {name: value.to(dtype) for name, value in tensors.items() if value.is_floating_point()}
    return {**tensors, **wide, **NUMBERS}


def run(library: KernelLibrary, rows: Rows, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = library.compute(rows.operator, arguments(rows, dtype, library.device_type))
    return {name: value.cpu() for name, value in made.items()}


def rounded_to(rows: Rows, dtype: torch.dtype) -> Rows:
    """Return the rows as a cache of this type holds them."""
    held = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16}.get(dtype, np.float32)
    return Rows({
        name: array.astype(held).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in rows.inputs.items()
    })  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_turn", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_of_different_lengths_equal_the_reference(
    scheduled_library: KernelLibrary, dtype: torch.dtype, of_turn: bool, rounded: bool, kv_heads: int
) -> None:
    rows = rounded_to(mixed_rows(of_turn=of_turn, rounded=rounded, kv_heads=kv_heads), dtype)
    found = run(scheduled_library, rows, dtype)
    wide = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
    same_type = truncates(scheduled_library, dtype)
    check(rows, {name: value.numpy() for name, value in wide.items()}, bounds=dtype == torch.float32, loose=same_type)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_rows())
def test_random_rows_equal_the_reference(library: KernelLibrary, rows: Rows) -> None:
    check(rows, {name: value.numpy() for name, value in run(library, rows).items()})


def test_a_number_out_of_range_is_the_nearest_that_is_allowed(library: KernelLibrary) -> None:
    wild = mixed_rows(lengths=(90, 70, 80), budgets=(-3, 10**12, 20), kernels=(-7, 999, 6), rounded=True)
    near = mixed_rows(lengths=(90, 70, 80), budgets=(8, PROMPT_BUDGET, 20), kernels=(1, 31, 5), rounded=True)
    expected = reference_ops.compute("compact", arguments(near))
    for given_ in (wild, near):
        for name, value in run(library, given_).items():
            assert_same_bits(value, getattr(expected, name), name)
    assert torch.equal(reference_ops.compute("compact", arguments(wild)).indices, expected.indices)


def test_equal_rows_give_the_bits_of_a_call_without_numbers_by_row(library: KernelLibrary) -> None:
    rows = mixed_rows(budgets=(PROMPT_BUDGET,) * 5, kernels=(KERNELS[1],) * 5)
    alike = {name: array for name, array in rows.inputs.items() if name not in ("prompt_budgets", "pool_kernels")}
    plain = run(library, Rows(alike))
    for name, value in run(library, rows).items():
        assert_same_bits(value, plain[name], name)


def test_a_row_without_its_numbers_is_refused(library: KernelLibrary) -> None:
    from kvc_trt.kernels.structs import struct_of

    seen = []
    launch = library._launch
    try:
        library._launch = lambda operation, params, *_: seen.append(params)  # type: ignore[method-assign]
        kept_alive = arguments(mixed_rows(), device=library.device_type)
        library.compute(COMPACT, kept_alive)
    finally:
        library._launch = launch  # type: ignore[method-assign]
    (params,) = seen
    assert isinstance(params, struct_of(COMPACT))
    params.pool_kernels = None
    with pytest.raises(KernelError, match="pool_kernels is null; expected an address"):
        library.call("kvc_compact", params, None, 0)
