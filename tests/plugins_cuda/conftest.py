"""The kernel library under test, on every executor that this machine has.

`library` is the emulation, and a GPU's library too where tests on one are asked for (`tests.gpu.asked_for`);
`scheduled_library` repeats a test under each schedule of the emulation. KVC_TRT_KERNELS replaces the library that would
be built (a sanitised one, or one for another GPU); `tests/gpu.py` says how the emulation stands in for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from kvc_trt.kernels.library import SCHEDULES, KernelLibrary
from kvc_trt.kernels.loading import VARIABLE
from tests.gpu import Gpu, asked_for
from tests.gpu import executor as gpu_executor
from tests.plugins_cuda import build

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
_loaded: dict[str, KernelLibrary] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, executors in (("library", ["emulation"]), ("scheduled_library", list(SCHEDULES))):
        if name in metafunc.fixturenames:
            on_a_gpu = [CUDA] if asked_for(metafunc.config) else []
            metafunc.parametrize(name, [*executors, *on_a_gpu], indirect=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    """One library per executor; the emulation in its forward schedule."""
    return _prepared(request.param, "forward")


@pytest.fixture
def scheduled_library(request: pytest.FixtureRequest) -> Iterator[KernelLibrary]:
    """The emulation in each of its schedules, and the GPU, which orders threads as it likes."""
    if request.param == "cuda":
        yield _prepared("cuda", "forward")
        return
    library = _prepared("emulation", request.param)
    yield library
    library.set_schedule("forward")


@pytest.fixture
def gpu() -> Gpu:
    """A GPU with its library, for tests marked `gpu` that need more than the library."""
    return Gpu(_prepared("cuda", "forward"))


@pytest.fixture
def emulation() -> KernelLibrary:
    """The emulated library alone, for tests of errors that only the emulation sees."""
    return _prepared("emulation", "forward")


@pytest.fixture
def no_chosen_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no library any more, once the test has the one that it asked for."""
    for name in ("library", "emulation", "gpu"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    monkeypatch.delenv(VARIABLE, raising=False)


def _prepared(executor: str, schedule: str) -> KernelLibrary:
    if executor == "cuda":
        executor = gpu_executor()
    if executor not in _loaded:
        _loaded[executor] = KernelLibrary(_path(executor))
    library = _loaded[executor]
    if executor == "emulation":
        library.set_schedule(schedule, seed=20260)
    return library


def _path(executor: str) -> Path:
    if executor == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU: the kernels were not run on a device")
    if named := os.environ.get(VARIABLE):
        found = KernelLibrary(named)
        if found.executor != executor:
            pytest.skip(f"{VARIABLE} names a library of executor {found.executor}")
        return found.path
    path = _built(executor)
    if isinstance(path, RuntimeError):
        pytest.fail(str(path), pytrace=False)
    return path


@cache
def _built(executor: str) -> Path | RuntimeError:
    """The library that CMake builds, or the reason of a failure: a failed build is not tried again for every test."""
    try:
        return build.cuda() if executor == "cuda" else build.emulation()
    except RuntimeError as error:
        return error
