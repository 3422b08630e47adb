"""Rules of the kernel sources that keep the emulation honest: one wrapper header, little PTX, no shortcuts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins_cuda.toys import PLUGINS

DEVICE_ONLY = {"kernels/platform.cuh", "kernels/device.cuh", "kernels/ptx.cuh"}


def _sources() -> dict[str, str]:
    found = {}
    for folder in ("kernels", "src"):
        for path in sorted((PLUGINS / folder).iterdir()):
            found[path.relative_to(PLUGINS).as_posix()] = path.read_text()
    assert {"kernels/platform.cuh", "kernels/sparse_attention.cuh", "src/compact.cu"} <= found.keys()
    return found


SOURCES = _sources()
# Names that only one compiler knows, or that make results depend on the device or the order of threads.
FORBIDDEN = {
    "compiler macros": ("KVC_EMULATION", "__CUDACC__", "__CUDA_ARCH__", "__NVCC__", "__GNUC__"),
    "headers of one compiler": tuple(
        f"#include {bracket}{name}"
        for bracket in '<"'
        for name in ("cuda", "cub", "thrust", "cooperative_groups", "emulation")
    ),
    "PTX": ("asm(", "asm volatile"),
    "launches": ("<<<",),
    "unchecked shared memory": ("__shared__",),
    "approximate math": ("__expf", "__logf", "__fdividef", "__powf", "__sinf", "__cosf", "use_fast_math"),
    "loads that may pass the wait for the launch before": ("__ldg", "ld.global.nc"),
    "libraries": ("cub::", "thrust::", "cooperative_groups", "wgmma", "tcgen05"),
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_kernels_are_the_same_for_both_compilers(rule: str) -> None:
    for name, text in SOURCES.items():
        if name not in DEVICE_ONLY and name != "src/library.cpp":
            assert not [word for word in FORBIDDEN[rule] if word in text], name


def test_only_platform_cuh_asks_for_the_compiler() -> None:
    for name in DEVICE_ONLY - {"kernels/platform.cuh"}:
        found = [word for word in FORBIDDEN["compiler macros"] if word in SOURCES[name]]
        expected = ["__CUDA_ARCH__"] if name == "kernels/ptx.cuh" else []
        assert found == expected, "griddepcontrol and clusters are not on sm_80"
    assert SOURCES["kernels/platform.cuh"].count("KVC_EMULATION") == 2, "the comment and the one #ifdef"


def test_ptx_is_limited_to_the_instructions_that_need_it() -> None:
    """`__byte_perm` takes no selector that repeats a sign. `.reg` and `mov.b32` name the halves that a cvt takes;
    `.reg` also the answer to a wait."""
    _, *statements = SOURCES["kernels/ptx.cuh"].split("asm")
    assert statements
    for statement in statements:
        instructions = [part.strip(" {}") for part in statement.split('"')[1].split(";")]
        allowed = ("mma.sync.", "ldmatrix.sync.", "cp.async.", "griddepcontrol.", "barrier.cluster.", "mapa.", "prmt.")
        converting = (".reg .b16 ", "mov.b32 ", "cvt.rn.f16x2.e4m3x2 ")
        sending = ("st.async.", "mbarrier.", "fence.mbarrier_init.", ".reg .pred ", "again: mbarrier.try_wait.")
        for instruction in filter(None, instructions):
            assert instruction.startswith(allowed + converting + sending), instruction


def test_kernels_know_nothing_of_their_launchers() -> None:
    """src/ decides a kernel's launch; in kernels/, only the platform headers know a stream."""
    for name, text in SOURCES.items():
        if name.startswith("kernels/"):
            assert '#include "src/' not in text, name
            assert "cudaStream_t" not in text or name in DEVICE_ONLY, name


def test_kernels_are_launched_in_one_place() -> None:
    """A kernel's allowance of shared memory is requested in that one place."""
    callers = [
        name for name, text in SOURCES.items() if "platform::launch_kernel(" in text or "cudaLaunchKernel" in text
    ]
    assert callers == ["kernels/device.cuh", "src/launch_kernel.h"]


def test_every_kernel_waits_for_the_launch_before_it() -> None:
    """The emulation reports accesses before the wait, and every path that ends without one.

    Kernels of one function, which differ in its template's arguments, wait there.
    """
    for name, text in SOURCES.items():
        if name.startswith("kernels/") and "__global__" in text:
            shared = re.findall(r"__global__[^{]*\{\n    (\w+)(?:<.*>)?\(params.*\);\n\}", text)
            kernels = text.count("__global__") - len(shared) + len(set(shared))
            assert text.count("    start_next_launch();\n    wait_for_previous_launch();\n") == kernels, name


def test_no_denormal_is_flushed() -> None:
    """Denormal scores order pages: no build file may ask for -ftz or fast math."""
    files = [*Path(PLUGINS).rglob("CMakeLists.txt"), *Path(PLUGINS).rglob("*.cmake"), PLUGINS.parent / "CMakeLists.txt"]
    for path in files:
        text = path.read_text().replace("-ftz=false", "")
        assert not [flag for flag in ("-ftz", "ftz=true", "fast-math", "fast_math") if flag in text], path
