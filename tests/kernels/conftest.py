from __future__ import annotations

import pytest

from kvc_trt.kernels.library import KernelLibrary
from tests.kernels.double import compile_double
from tests.plugins_cuda.conftest import (
    emulation,
    gpu,
    library,
    no_chosen_library,
    one_thread,
    pytest_generate_tests,
)

__all__ = ["double", "emulation", "gpu", "library", "no_chosen_library", "one_thread", "pytest_generate_tests"]


@pytest.fixture(autouse=True)
def _alone(no_chosen_library):
    """Tests start without a library."""


@pytest.fixture(scope="session")
def double(tmp_path_factory) -> KernelLibrary:
    """A library that computes nothing and records the arguments of its calls."""
    return KernelLibrary(compile_double(tmp_path_factory.mktemp("double")))
