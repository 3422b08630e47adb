"""A step that clusters take, or whose pages they score and select, has the bits of one launch after another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvc_trt.kernels.c_library import ARCHITECTURES
from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.kernels.switches import CLUSTER_STEP
from tests.plugins_cuda.cases import FP8, StepCase, step_case
from tests.plugins_cuda.checks import check_hybrid
from tests.plugins_cuda.hybrid_steps import steps

DTYPES = (torch.float16, torch.bfloat16)
WHOLE = ["cluster_step"]
FUSED = ["score_and_select", "sparse_attention"]
APART = ["prepare_step", "page_scores", "select_tokens", "sparse_attention"]
BEFORE_CLUSTERS, WITH_CLUSTERS = ARCHITECTURES[0], ARCHITECTURES[1]
MANY_ROWS = 80
"""A batch that has, with two KV heads, more of them than any GPU has multiprocessors."""
LARGEST_HEAD, LARGEST_GROUP = 128, 8
"""Clusters take whole steps of heads of at most this size, in groups of at most so many."""


@pytest.fixture
def later(emulation: KernelLibrary) -> Iterator[KernelLibrary]:
    """The emulation of a GPU with clusters."""
    emulation.set_device(WITH_CLUSTERS)
    yield emulation
    emulation.set_device(BEFORE_CLUSTERS)


@pytest.fixture
def later_library(library: KernelLibrary) -> Iterator[KernelLibrary]:
    """The emulation of a later device, or a GPU."""
    if library.executor == "emulation":
        library.set_device(WITH_CLUSTERS)
    yield library
    if library.executor == "emulation":
        library.set_device(BEFORE_CLUSTERS)


def launches(library: KernelLibrary, case: StepCase) -> list[str]:
    """Names of a step's launches, at the case's sizes."""
    arguments = case.to("cpu").arguments()
    return [one.name.decode() for one in library.checked_launches_of(lambda: library.hybrid_attention(**arguments))]


def results(library: KernelLibrary, case: StepCase) -> dict[str, torch.Tensor]:
    """Return all results of a step, as bits."""
    moved = case.to(library.device_type)
    output, selected = library.hybrid_attention(**moved.arguments())
    assert selected is not None
    written = {"output": output, "k_cache": moved.k_cache, "v_cache": moved.v_cache, "bounds": moved.bounds}
    return {name: tensor.cpu().view(torch.uint8) for name, tensor in written.items()} | {"selected": selected.cpu()}


def check_same(library: KernelLibrary, case: StepCase) -> None:
    """Compare the ways of the emulation: a GPU with clusters takes one or two launches, one without them the others."""
    apart = apart_results(library, case)
    with CLUSTER_STEP.off(library):
        check_bits(library, case, FUSED, apart)
    check_bits(library, case, WHOLE if takes_whole_step(case) else FUSED, apart)


def takes_whole_step(case: StepCase) -> bool:
    """True if clusters take a whole step of a few rows of these sizes."""
    fits = case.query.shape[-1] <= LARGEST_HEAD and case.dense_until <= case.token_budget
    return fits and case.query.shape[1] <= LARGEST_GROUP * case.k_cache.shape[1]


def apart_results(library: KernelLibrary, case: StepCase) -> dict[str, torch.Tensor]:
    """Return the results of one launch after another; the emulated GPU is one with clusters after that."""
    library.set_device(BEFORE_CLUSTERS)
    assert not {FUSED[0], WHOLE[0]} & set(launches(library, case))
    found = results(library, case)
    library.set_device(WITH_CLUSTERS)
    return found


def check_bits(library: KernelLibrary, case: StepCase, names: list[str], expected: dict[str, torch.Tensor]) -> None:
    """Compare a step that makes the launches `names`."""
    assert launches(library, case) == names
    for name, found in results(library, case).items():
        assert torch.equal(found, expected[name]), f"{names[0]}: {name}"


def pages_case(pages: int, **changes: Any) -> StepCase:
    """One row with `pages` pages of one token each, and room for no more."""
    sizes = {"heads": 4, "kv_heads": 1, "size": 16, "capacity": pages, "page": 1, "top_r": 5, "token_budget": 0}
    sizes |= {"top_k": max(1, pages // 3), "dtype": torch.bfloat16}
    return step_case(lengths=(pages - 1,), **(sizes | changes))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_steps_select_the_same_in_clusters(
    later: KernelLibrary, dtype: torch.dtype, data: st.DataObject
) -> None:
    check_same(later, data.draw(steps(dtype)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("pages", [1, 2, 8, 9, 64, 65, 71, 72, 127, 128, 129, 520, 1023, 1064, 2049, 3232, 4095, 4096])
def test_page_counts_around_a_block_select_the_same_in_clusters(later: KernelLibrary, pages: int, ties: bool) -> None:
    check_same(later, pages_case(pages, ties=ties, seed=pages))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("pages", [1, 15, 16, 17, 127, 128, 129, 136, 143, 144, 145, 300, 1023, 2049, 4097, 8191, 8192])
def test_fp8_page_counts_around_a_block_select_the_same_in_clusters(
    later: KernelLibrary, pages: int, ties: bool
) -> None:
    check_same(later, pages_case(pages, ties=ties, seed=pages, fp8=True))


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 8, 9, 16])
@FP8
def test_every_group_size_selects_the_same_in_clusters(later: KernelLibrary, fp8: bool, heads: int) -> None:
    """The warps of a block divide the softmax otherwise than a block of its own does."""
    for pages in (30, 300, 1100):
        check_same(later, pages_case(pages, heads=heads, seed=heads, fp8=fp8))


@pytest.mark.parametrize("top_k", [1, 2, 3, 100, 599, 600])
@FP8
def test_a_query_of_zero_ties_every_page(later: KernelLibrary, fp8: bool, top_k: int) -> None:
    """The lowest slots are read: one block of the cluster serves ties until they are used up, then the next."""
    case = pages_case(600, top_k=top_k, page=2, capacity=1200, fp8=fp8)
    case.query.zero_()
    check_same(later, case)
    selected = results(later, case)["selected"][0, 0]
    assert selected[:top_k].tolist() == list(range(top_k))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_bounds_select_the_same_in_clusters(later: KernelLibrary, value: float) -> None:
    case = pages_case(300, top_r=16)
    case.bounds[..., 3, 77] = value
    check_same(later, case)


@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_a_batch_of_sparse_and_dense_rows_selects_the_same_in_clusters(
    later: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    lengths = (400, 399, 0, -1, 401, 8, 20, 200)
    sizes = {"heads": 8, "size": 40, "page": 3, "top_r": 19, "top_k": 20, "capacity": 401, "dtype": dtype, "fp8": fp8}
    check_same(later, step_case(lengths=lengths, token_budget=100, **sizes))
    check_same(later, step_case(lengths=lengths, token_budget=500, **sizes))


@pytest.mark.parametrize("page", [50, 301, 2**31 - 1])
@FP8
def test_large_pages_select_the_same_in_clusters(later: KernelLibrary, fp8: bool, page: int) -> None:
    sizes = {"capacity": 301, "page": min(page, 301), "top_k": 9, "token_budget": 5}
    case = step_case(lengths=(300, 40), dtype=torch.float16, fp8=fp8, **sizes)
    check_same(later, replace(case, page_size=page))


@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_selection_in_clusters_equals_the_reference(
    later_library: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    sizes = {"heads": 8, "size": 64, "top_r": 23, "dtype": dtype, "fp8": fp8}
    check_hybrid(later_library, step_case(lengths=(200, 64, 10, -1), seed=3, **sizes))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_schedules_agree_on_every_bit(later: KernelLibrary, fp8: bool, dtype: torch.dtype, whole: bool) -> None:
    sizes = {"heads": 8, "size": 64, "page": 2, "top_r": 23, "top_k": 50, "dtype": dtype, "fp8": fp8}
    case = step_case(lengths=(700, 640), ties=True, **sizes)
    found = []
    for schedule in SCHEDULES:
        later.set_schedule(schedule, seed=5)
        with nullcontext() if whole else CLUSTER_STEP.off(later):
            found.append(results(later, case))
    later.set_schedule(SCHEDULES[0])
    for name, tensor in found[0].items():
        assert all(torch.equal(tensor, other[name]) for other in found[1:]), name


@pytest.mark.pairwise
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_few_rows_have_the_bits_of_many(
    later_library: KernelLibrary, fp8: bool, dtype: torch.dtype, ties: bool
) -> None:
    """Runs on a GPU too: clusters take the steps of few rows, one launch after another those of many."""
    lengths = [500 - 5 * row for row in range(MANY_ROWS)]
    sizes = {"heads": 8, "kv_heads": 2, "size": 64, "page": 2, "top_r": 23, "top_k": 40, "capacity": 501}
    many = step_case(lengths=lengths, dtype=dtype, ties=ties, fp8=fp8, **sizes)
    if later_library.executor == "emulation":
        assert launches(later_library, many) == APART
    expected = results(later_library, many)
    for first in (0, 17, MANY_ROWS - 2):
        names = ("query", "k_new", "v_new", "k_cache", "v_cache", "bounds", "cache_lengths")
        rows = slice(first, first + 2)
        few = StepCase(**(many.arguments() | {name: getattr(many, name)[rows] for name in names}))
        for name, found in results(later_library, few).items():
            assert torch.equal(found, expected[name][rows]), name


# ---- Where a cluster is launched


def rows_case(batch: int, **changes: Any) -> StepCase:
    """Rows with Llama-3.1-8B's eight KV heads and small caches."""
    sizes = {"heads": 32, "kv_heads": 8, "size": 16, "capacity": 64, "top_r": 4, "dtype": torch.bfloat16}
    return step_case(lengths=[40] * batch, **(sizes | changes))


@pytest.mark.parametrize(("architecture", "most"), [("sm_80", 0), ("sm_90a", 2), ("sm_100", 2)])
def test_clusters_serve_as_many_rows_as_have_multiprocessors(
    later: KernelLibrary, architecture: str, most: int
) -> None:
    later.set_device(architecture)
    for batch in (1, 2, 3, 8):
        with CLUSTER_STEP.off(later):
            assert launches(later, rows_case(batch)) == (FUSED if batch <= most else APART), batch


def test_clusters_serve_sizes_that_fit_a_block(later: KernelLibrary) -> None:
    with CLUSTER_STEP.off(later):
        assert launches(later, pages_case(4096)) == FUSED
        assert launches(later, pages_case(4097)) == APART, "a block would have more pages than a staged row"
        assert launches(later, pages_case(8192, fp8=True)) == FUSED
        assert launches(later, pages_case(8193, fp8=True)) == APART
    for fp8 in (False, True):
        assert launches(later, rows_case(1, dtype=torch.float32, fp8=fp8)) == APART
    wide = {"size": 256, "heads": 2}  # heads that no cluster takes a whole step of
    assert launches(later, pages_case(4096, top_r=160, **wide)) == FUSED
    assert launches(later, pages_case(4096, top_r=256, **wide)) == APART, "more than shared memory holds"
    assert launches(later, pages_case(1024, top_r=256, **wide)) == FUSED


def test_the_launch_is_one_of_clusters(later: KernelLibrary) -> None:
    arguments = rows_case(2).arguments()
    with CLUSTER_STEP.off(later):
        first, second = later.launches_of(lambda: later.hybrid_attention(**arguments))
    assert (first.name, first.cluster_blocks, list(first.grid)) == (b"score_and_select", 8, [8, 8, 2])
    assert (second.cluster_blocks, second.begins_early) == (1, 1)
