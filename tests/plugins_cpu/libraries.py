"""The library of native operators: KVC_TRT_CPU_KERNELS names it (a sanitised one), or CMake builds it once.

KVC_TRT_CPU_TESTS names the one instruction set that all tests of native operators use. Without it they use the
processor's best, those of one operator every other too, and those of whole engines the lowest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.native import INSTRUCTIONS, NONE, VARIABLE
from tests.plugins_cuda import build

BEST = "best"
LOWEST = ("avx2", "portable")
ANY_INSTRUCTIONS = st.sampled_from(INSTRUCTIONS)
"""Arguments of `use_at_most`."""


@pytest.fixture(scope="session")
def library() -> Path:
    """Path of the library under test."""
    named = os.environ.get(VARIABLE, NONE)
    path = built() if named == NONE else Path(named)
    if isinstance(path, RuntimeError):
        pytest.fail(str(path), pytrace=False)
    use(path, offered(path)[0])
    return path


@pytest.fixture(scope="session")
def bf16_library(library: Path) -> Path:
    """The library, on a processor that multiplies bfloat16."""
    if native.load(library).instructions != native.BF16:
        pytest.skip("this processor multiplies no bfloat16")
    return library


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, library: Path) -> str:
    """Each instruction set that the tests may use, in use during the test; BEST for the best of them."""
    name = offered(library)[0] if request.param == BEST else request.param
    if name not in offered(library):
        pytest.skip(f"this processor has no {name}, or another is asked for")
    use(library, name)
    return name


@cache
def offered(library: Path) -> tuple[str, ...]:
    """Return the instruction sets that the tests may use, best first: the one asked for, or all that there are here."""
    asked = os.environ.get("KVC_TRT_CPU_TESTS")
    if asked is not None:
        return (asked,)
    found = []
    for name in INSTRUCTIONS:
        with suppress(ValueError):
            use(library, name)
            found.append(name)
    use(library, found[0])
    return tuple(found)


def best_and_lowest(library: Path) -> list[str]:
    """Return the instruction sets that whole engines are tested with."""
    best, *others = offered(library)
    return [best, *(name for name in others if name in LOWEST)]


def use(library: Path, name: str) -> None:
    """Use an instruction set until the test ends; ValueError if it cannot be had here."""
    native.load(library).use_instructions(name)


def use_at_most(library: Path, name: str) -> None:
    """Use an instruction set, or the best below it that the tests may use."""
    below = INSTRUCTIONS[INSTRUCTIONS.index(name) :]
    use(library, next((one for one in offered(library) if one in below), offered(library)[-1]))


@pytest.fixture(autouse=True)
def _best_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "library" in request.fixturenames:
        library = request.getfixturevalue("library")
        use(library, offered(library)[0])


@cache
def built() -> Path | RuntimeError:
    """The library that CMake builds, or the reason of a failure: a failed build is not tried again for every test."""
    try:
        if (build.ROOT / "build" / "CMakeCache.txt").is_file():
            return build.build("kvc_cpu", directory=build.ROOT / "build")
        return build.build("kvc_cpu", "-DKVC_CUDA=OFF", "-DKVC_EMULATION=OFF")
    except RuntimeError as error:
        return error
