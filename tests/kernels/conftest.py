from __future__ import annotations

import pytest

from kvc_trt.kernels import loading
from kvc_trt.kernels.library import KernelLibrary
from tests.kernels.double import compile_double
from tests.plugins_cuda.conftest import emulation, library, one_thread

__all__ = ["double", "emulation", "library", "no_chosen_library", "one_thread"]


@pytest.fixture(autouse=True)
def no_chosen_library(request, monkeypatch):
    """Tests start without a library; those that take the built one have asked for it before."""
    if not {"library", "emulation"} & set(request.fixturenames):
        monkeypatch.delenv(loading.VARIABLE, raising=False)


@pytest.fixture(scope="session")
def double(tmp_path_factory) -> KernelLibrary:
    """A library that computes nothing and remembers what it was called with."""
    return KernelLibrary(compile_double(tmp_path_factory.mktemp("double")))
