"""Switches of the environment: each turns one feature off, in the launches that can be seen, and changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvc_trt.kernels.c_library import ARCHITECTURES, EmulatedLaunch
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.switches import CARVEOUT, CLUSTER_STEP, CLUSTERS, EARLY_LAUNCH, RING, SWITCHES
from kvc_trt.models.presets import load_preset
from tests.plugins_cuda.test_launch_limits import Call, resolved

ROOT = Path(__file__).resolve().parents[2]
MODEL = load_preset("llama3.1-8b").config


@pytest.fixture
def hopper(emulation: KernelLibrary) -> Iterator[KernelLibrary]:
    emulation.set_device("sm_90a")
    yield emulation
    emulation.set_device(ARCHITECTURES[0])


def step(library: KernelLibrary, rows: int = 1, budget: int = 512) -> list[EmulatedLaunch]:
    """Return the launches of a step of Llama-3.1-8B under RocketKV; no kernel runs."""
    return Call("kvc_hybrid_attention", MODEL, resolved("rocketkv", MODEL, 32768, budget), rows).launches(library)


def test_without_early_launches_each_waits_for_the_one_before(hopper: KernelLibrary) -> None:
    with CLUSTER_STEP.off(hopper):
        with EARLY_LAUNCH.off(hopper):
            assert not any(launch.begins_early for launch in step(hopper))
        assert [launch.begins_early for launch in step(hopper)] == [0, 1]


def test_without_clusters_few_rows_take_the_launches_of_many(hopper: KernelLibrary) -> None:
    with CLUSTERS.off(hopper):
        assert [launch.cluster_blocks for launch in step(hopper)] == [1] * 4
    assert [launch.cluster_blocks for launch in step(hopper)] == [8]


def test_without_whole_steps_in_clusters_attention_is_a_launch_of_its_own(hopper: KernelLibrary) -> None:
    with CLUSTER_STEP.off(hopper):
        assert [launch.cluster_blocks for launch in step(hopper)] == [8, 1]
        assert [launch.cluster_blocks for launch in step(hopper, 8)] == [1] * 4
    assert [launch.cluster_blocks for launch in step(hopper, 8)] == [2]


def test_without_the_ring_attention_copies_one_tile_ahead(hopper: KernelLibrary) -> None:
    two = step(hopper)[-1].dynamic_shared_bytes
    with RING.off(hopper):
        assert step(hopper)[-1].dynamic_shared_bytes < two
    with CLUSTER_STEP.off(hopper):
        two = step(hopper)[-1].dynamic_shared_bytes
        with RING.off(hopper):
            assert step(hopper)[-1].dynamic_shared_bytes < two


def test_every_kernel_asks_for_shared_memory_unless_switched_off(hopper: KernelLibrary) -> None:
    with CARVEOUT.off(hopper):
        assert not any(launch.prefers_shared_memory for launch in step(hopper, 32))
    assert all(launch.prefers_shared_memory for launch in step(hopper, 32))


def test_clusters_that_would_wait_for_room_are_not_launched(hopper: KernelLibrary) -> None:
    """On a chip with a group of 14 multiprocessors, the last of 16 clusters would be a second round."""
    try:
        with CLUSTER_STEP.off(hopper):
            hopper.set_active_clusters(15)
            apart = step(hopper, 2, 640)
            assert [launch.cluster_blocks for launch in apart] == [1] * 4
            hopper.set_active_clusters(16)
            assert [launch.cluster_blocks for launch in step(hopper, 2, 768)] == [8, 1]
    finally:
        hopper.set_active_clusters(0)


def test_the_header_the_library_and_the_page_have_the_same_switches() -> None:
    read = {switch.variable for switch in SWITCHES if switch.of_library}
    for path in ("plugins_cuda/include/kvc/switches.h", "plugins_cuda/src/switches.cpp"):
        text = (ROOT / path).read_text()
        assert {switch.variable for switch in SWITCHES if switch.variable in text} == read, path
    page = (ROOT / "docs/gpu-day.md").read_text()
    for switch in SWITCHES:
        assert f"| `{switch.variable}` | {switch.feature} |" in page
