"""Every kernel at least once, on inputs small enough for compute-sanitizer: the tests that gpu_day.sh gives to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from kvc_trt.kernels.c_library import ARCHITECTURES
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.switches import CLUSTER_STEP, CLUSTERS, Switch
from tests.plugins_cuda import cases, checks
from tests.plugins_cuda.test_rotated_attention import check as check_rotated
from tests.plugins_cuda.test_rotated_attention import unrotated


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("switch", [None, CLUSTERS], ids=lambda switch: switch and switch.name)
@cases.FP8
def test_compaction_equals_the_reference(
    with_clusters: KernelLibrary, fp8: bool, switch: Switch | None, dtype: torch.dtype
) -> None:
    """Statistics, merge, votes, pooling, selection by clusters and by one block, gathering: one row is scored, one fits
    its budget."""
    sizes = {"size": 64, "budget": 32, "dtype": dtype, "fp8": fp8}
    with switch.off(with_clusters) if switch else nullcontext():
        checks.check_compact(with_clusters, cases.compact_case(lengths=[150, 20], seed=1, **sizes))


def test_compaction_in_place_equals_compaction_apart(library: KernelLibrary) -> None:
    case = cases.compact_case(lengths=[90, 40], budget=24, capacity=90)
    expected, moved = checks.run_compact(library, case), case.to(library.device_type)
    out = expected._replace(k_cache=moved.k, v_cache=moved.v)
    out = type(out)(*(tensor.to(library.device_type) for tensor in out))
    result = library.compact(**moved.arguments(), out=out)
    for name, found, wanted in zip(result._fields, result, expected, strict=True):
        checks.assert_same_bits(found.cpu(), wanted, name)


@pytest.fixture
def with_clusters(library: KernelLibrary) -> Iterator[KernelLibrary]:
    """A GPU, or the emulation of one, whose blocks may be in clusters."""
    if library.executor == "emulation":
        library.set_device(ARCHITECTURES[1])
    yield library
    if library.executor == "emulation":
        library.set_device(ARCHITECTURES[0])


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32])
@cases.FP8
def test_a_step_in_clusters_equals_the_reference(
    with_clusters: KernelLibrary, fp8: bool, heads: int, dtype: torch.dtype
) -> None:
    """Few rows in 16 bit: clusters take whole steps, or score and select. Rows are sparse, dense and inactive."""
    case = cases.step_case(lengths=[200, 10, -1], heads=heads, size=64, dtype=dtype, seed=2, fp8=fp8)
    checks.check_hybrid(with_clusters, case)
    with CLUSTER_STEP.off(with_clusters):
        checks.check_hybrid(with_clusters, case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32])
@cases.FP8
def test_a_step_of_many_rows_equals_the_reference(
    with_clusters: KernelLibrary, fp8: bool, heads: int, dtype: torch.dtype
) -> None:
    """One launch after another, as of more rows than clusters take."""
    lengths = [10, -1, *range(60, 60 + 5 * 8, 5)]
    case = cases.step_case(lengths=lengths, heads=heads, size=64, dtype=dtype, seed=2, fp8=fp8)
    with CLUSTERS.off(with_clusters):
        checks.check_hybrid(with_clusters, case)


@pytest.mark.parametrize("switch", [None, CLUSTER_STEP, CLUSTERS], ids=lambda switch: switch and switch.name)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_step_that_rotates_equals_rotation_before_it(
    with_clusters: KernelLibrary, dtype: torch.dtype, switch: Switch | None
) -> None:
    """Selecting and dense, in clusters and apart."""
    with switch.off(with_clusters) if switch else nullcontext():
        check_rotated(with_clusters, unrotated(cases.step_case(lengths=[60, 61], size=24, dtype=dtype)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_dense_step_equals_the_reference(library: KernelLibrary, dtype: torch.dtype) -> None:
    """Append and attention, over one split and over several."""
    checks.check_dense(library, cases.step_case(lengths=[700, 3], heads=8, size=64, dtype=dtype, seed=3))
