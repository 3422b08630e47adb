"""The library of native operators: KVC_TRT_CPU_KERNELS names it (a sanitised one), or CMake builds it once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.native import INSTRUCTIONS, NONE, VARIABLE
from tests.plugins_cuda import build


@pytest.fixture(scope="session")
def library() -> Path:
    """Path of the library under test."""
    named = os.environ.get(VARIABLE, NONE)
    if named != NONE:
        return Path(named)
    path = _built()
    if isinstance(path, RuntimeError):
        pytest.fail(str(path), pytrace=False)
    return path


@pytest.fixture(scope="session")
def bf16_library(library: Path) -> Path:
    """The library, on a processor that multiplies bfloat16."""
    if native.load(library).instructions != native.BF16:
        pytest.skip("this processor multiplies no bfloat16")
    return library


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, library: Path) -> Iterator[str]:
    """Each instruction set that the library has and this processor offers, in use during the test."""
    loaded = native.load(library)
    before = loaded.instructions
    try:
        loaded.use_instructions(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    loaded.use_instructions(before)


@cache
def _built() -> Path | RuntimeError:
    """What CMake makes, or why it does not: a build that fails is not tried again for every test."""
    try:
        if (build.ROOT / "build" / "CMakeCache.txt").is_file():
            return build.build("kvc_cpu", directory=build.ROOT / "build")
        return build.build("kvc_cpu", "-DKVC_CUDA=OFF", "-DKVC_EMULATION=OFF")
    except RuntimeError as error:
        return error
