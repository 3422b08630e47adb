"""Prompts whose tokens clusters select keep those that one block selects, and where clusters select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvc_trt.kernels.c_library import ARCHITECTURES
from kvc_trt.kernels.library import SCHEDULES, CompactResult, KernelLibrary
from kvc_trt.kernels.switches import CLUSTERS
from kvc_trt.models.presets import load_preset
from tests.plugins_cuda.cases import CompactCase, compact_case
from tests.plugins_cuda.redzones import compact_between_redzones
from tests.plugins_cuda.test_compact import assert_equal_results, check_exactly
from tests.plugins_cuda.test_launch_limits import Call, resolved

BEFORE_CLUSTERS, WITH_CLUSTERS = ARCHITECTURES[0], ARCHITECTURES[1]
MODEL = load_preset("llama3.1-8b").config
ONE_BLOCK, IN_CLUSTERS = "select_prompt", "select_prompt_in_cluster"


@pytest.fixture
def later(emulation: KernelLibrary) -> Iterator[KernelLibrary]:
    """The emulation of a GPU with clusters."""
    emulation.set_device(WITH_CLUSTERS)
    yield emulation
    emulation.set_device(BEFORE_CLUSTERS)


def prompt_case(**changes: Any) -> CompactCase:
    """Prompts of several blocks' tokens, whose votes cost little."""
    sizes = {"heads": 1, "kv_heads": 1, "size": 16, "window": 2, "page": 16, "budget": 600, "pool": 7}
    return compact_case(**(sizes | changes))


def compacted(library: KernelLibrary, case: CompactCase) -> CompactResult:
    """Return the results of one call, whose workspace holds no zeros before."""
    return CompactResult(**compact_between_redzones(library, case, with_bounds=True, in_place=False))


def check_selected(library: KernelLibrary, case: CompactCase, schedules: Sequence[str] = tuple(SCHEDULES)) -> None:
    """Compare the results of clusters with those of one block of the same library."""
    library.set_device(BEFORE_CLUSTERS)
    expected = compacted(library, case)
    library.set_device(WITH_CLUSTERS)
    launches = library.checked_launches_of(lambda: library.compact(**case.arguments()))
    assert IN_CLUSTERS in {launch.name.decode() for launch in launches}
    for schedule in schedules:
        library.set_schedule(schedule, seed=4)
        assert_equal_results(compacted(library, case), expected)
    library.set_schedule("forward")


def cases() -> list[CompactCase]:
    """Few keys more than the budget; votes that are all NaN; a budget of the window; rows of different lengths, some of
    which keep all; ties within blocks and between them.

    The cheapest come first: most mistakes are noticed before the others."""
    no_numbers = prompt_case(lengths=[4099], seed=6, budget=3000)
    no_numbers.k[0, 0, 100::700] = torch.nan
    return [
        prompt_case(lengths=[3000], length=4111, budget=2990, pool=1, seed=4),
        no_numbers,
        prompt_case(lengths=[4097, 1000], budget=2, capacity=2500, seed=3),
        prompt_case(lengths=[4400, 601, 600, 0, 2500], seed=1),
        prompt_case(lengths=[4103], kv_heads=2, heads=2, ties=True, seed=2),
    ]


@pytest.mark.parametrize("number", range(5))
def test_clusters_keep_what_one_block_keeps(later: KernelLibrary, number: int) -> None:
    check_selected(later, cases()[number])


def test_prompts_compacted_in_clusters_equal_the_reference(later: KernelLibrary) -> None:
    """Few distinct keys: the scores tie exactly, and the reference's choice is the only right one."""
    check_exactly(later, prompt_case(lengths=[4150, 4098], ties=True, budget=300, seed=5))


@pytest.mark.parametrize("length", [4097, 4098, 4099])
def test_rows_of_keys_are_whole_vectors(later: KernelLibrary, length: int) -> None:
    """Keys of prompts whose lengths no vector divides do not overlap."""
    check_selected(later, prompt_case(lengths=[length, length], kv_heads=2, heads=2, seed=length, window=1))


# ---- Where clusters select


def selection(library: KernelLibrary, context: int, batch: int = 1, operation: str = "kvc_compact") -> tuple[str, int]:
    """Return name and threads of the launch that selects, in a call of Llama-3.1-8B under RocketKV; no kernel runs."""
    parameters = resolved("rocketkv", MODEL, 16384, 512)
    call = Call(operation, MODEL, replace(parameters, max_input_len=context), batch)
    (found,) = (one for one in call.launches(library) if one.name.startswith(ONE_BLOCK.encode()))
    assert list(found.grid) == ([8, 8, batch] if found.cluster_blocks == 8 else [8, batch, 1])
    return found.name.decode(), found.block[0]


def test_prompts_are_selected_by_clusters(later: KernelLibrary) -> None:
    for context, threads in ((5, 256), (32768, 256), (32769, 256), (65536, 256), (65537, 512), (131072, 512)):
        for batch in (1, 8, 32):
            assert selection(later, context, batch) == (IN_CLUSTERS, threads)
    assert selection(later, 131073) == (ONE_BLOCK, 1024), "a thread has at most 32 keys"


def test_a_turn_is_selected_like_a_prompt(later: KernelLibrary) -> None:
    assert selection(later, 0, operation="kvc_compact_turn") == (IN_CLUSTERS, 256)


def test_devices_without_clusters_select_by_one_block(later: KernelLibrary) -> None:
    later.set_device(BEFORE_CLUSTERS)
    assert selection(later, 32768) == (ONE_BLOCK, 1024)


def test_a_switch_turns_clusters_off(later: KernelLibrary) -> None:
    with CLUSTERS.off(later):
        assert selection(later, 32768) == (ONE_BLOCK, 1024)
    assert selection(later, 32768) == (IN_CLUSTERS, 256)
