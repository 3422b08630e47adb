"""A question to the driver that fails ends its call with an error; the next call asks again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvc_trt.kernels.c_library import ARCHITECTURES, EmulatedLaunch, KernelError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.switches import CARVEOUT, CLUSTER_STEP
from kvc_trt.models.presets import load_preset
from tests.plugins_cuda.test_launch_limits import Call, resolved

MODEL = load_preset("llama3.1-8b").config


@pytest.fixture
def hopper(emulation: KernelLibrary) -> Iterator[KernelLibrary]:
    emulation.set_device("sm_90a")
    yield emulation
    emulation.refuse_queries(0)
    emulation.set_device(ARCHITECTURES[0])


def step(library: KernelLibrary, rows: int, budget: int) -> list[EmulatedLaunch]:
    """Return the launches of a step of Llama-3.1-8B under RocketKV; no kernel runs."""
    return Call("kvc_hybrid_attention", MODEL, resolved("rocketkv", MODEL, 32768, budget), rows).launches(library)


def test_a_question_about_clusters_that_failed_is_asked_again(hopper: KernelLibrary) -> None:
    """A failure that counted as an answer would be "no clusters", and four launches a step for ever."""
    hopper.refuse_queries(1)
    with pytest.raises(KernelError, match="cluster_step: this query was to be refused"):
        step(hopper, 1, 896)  # of a size that no other test asks about
    assert [launch.cluster_blocks for launch in step(hopper, 1, 896)] == [8]
    with CLUSTER_STEP.off(hopper):
        hopper.refuse_queries(1)
        with pytest.raises(KernelError, match="score_and_select: this query was to be refused"):
            step(hopper, 1, 896)
        assert [launch.cluster_blocks for launch in step(hopper, 1, 896)] == [8, 1]


def test_a_request_for_shared_memory_that_failed_is_made_again(hopper: KernelLibrary) -> None:
    with CARVEOUT.off(hopper):
        step(hopper, 32, 512)
    hopper.refuse_queries(1)
    with pytest.raises(KernelError, match="this query was to be refused"):
        step(hopper, 32, 512)
    assert all(launch.prefers_shared_memory for launch in step(hopper, 32, 512))
