"""The launches of a call begin early where a GPU can do that, all but the first."""

from __future__ import annotations

import pytest

from kvc_trt.kernels.c_library import ARCHITECTURES
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.models.presets import load_preset
from tests.plugins_cuda.test_launch_limits import OF_POLICY, Call, resolved


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", OF_POLICY)
def test_all_but_the_first_launch_of_a_call_begin_early(
    emulation: KernelLibrary, policy: str, architecture: str
) -> None:
    """The first launch follows the caller's work, about which nothing is known."""
    model = load_preset("llama3.1-8b").config
    parameters = resolved(policy, model, 32768, 512)
    emulation.set_device(architecture)
    try:
        for operation in OF_POLICY[policy]:
            launches = Call(operation, model, parameters, 1).launches(emulation)
            further = [architecture != "sm_80"] * (len(launches) - 1)
            assert [launch.begins_early for launch in launches] == [False, *further], operation
    finally:
        emulation.set_device(ARCHITECTURES[0])
