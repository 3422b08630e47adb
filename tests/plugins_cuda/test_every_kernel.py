"""Every kernel at least once, on inputs small enough for compute-sanitizer: what benchmarks/gpu_day.sh gives to it."""

from __future__ import annotations

import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda import cases, checks


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_compaction(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Statistics, merge, votes, pooling, selection, gathering: one row is scored, one fits its budget."""
    checks.check_compact(library, cases.compact_case(lengths=[150, 20], size=64, budget=32, dtype=dtype, seed=1))


def test_compaction_in_place(library: KernelLibrary) -> None:
    case = cases.compact_case(lengths=[90, 40], budget=24, capacity=90)
    expected, moved = checks.run_compact(library, case), case.to(library.device_type)
    out = expected._replace(k_cache=moved.k, v_cache=moved.v)
    out = type(out)(*(tensor.to(library.device_type) for tensor in out))
    result = library.compact(**moved.arguments(), out=out)
    for name, found, wanted in zip(result._fields, result, expected, strict=True):
        checks.assert_same_bits(found.cpu(), wanted, name)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32])
def test_step(library: KernelLibrary, heads: int, dtype: torch.dtype) -> None:
    """Page scores, selection, attention: a sparse row, a dense one, an inactive one."""
    checks.check_hybrid(library, cases.step_case(lengths=[200, 10, -1], heads=heads, size=64, dtype=dtype, seed=2))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dense_step(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Append and attention, over one split and over several."""
    checks.check_dense(library, cases.step_case(lengths=[700, 3], heads=8, size=64, dtype=dtype, seed=3))
