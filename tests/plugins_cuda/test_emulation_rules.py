"""Rules of the kernel sources that make the emulation an honest twin: one wrapper header, little PTX, no shortcuts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins_cuda.toys import PLUGINS

DEVICE_ONLY = {"kernels/platform.cuh", "kernels/device.cuh", "kernels/ptx.cuh"}


def _sources() -> dict[str, str]:
    found = {}
    for path in sorted(PLUGINS.rglob("*.cu*")):
        name = path.relative_to(PLUGINS).as_posix()
        if path.suffix in {".cu", ".cuh"} and not name.startswith("emulation/"):
            found[name] = path.read_text()
    assert {"kernels/platform.cuh", "kernels/sparse_attention.cuh", "src/compact.cu"} <= found.keys()
    return found


SOURCES = _sources()
# What only one of the two compilers knows, or what would make results depend on the device or the order of threads.
FORBIDDEN = {
    "compiler macros": r"KVC_EMULATION|__CUDACC__|__CUDA_ARCH__|__NVCC__|__GNUC__",
    "headers of one compiler": r"#include\s*[<\"](cuda|cub|thrust|cooperative_groups|emulation)",
    "PTX": r"\basm\b",
    "launches": r"<<<|>>>\s*\(",
    "unchecked shared memory": r"__shared__",
    "approximate math": r"__expf|__logf|__fdividef|__powf|__sinf|__cosf|\bex2\b|use_fast_math",
    "libraries": r"\bcub::|\bthrust::|cooperative_groups|wgmma|tcgen05",
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_kernels_are_the_same_for_both_compilers(rule):
    for name, text in SOURCES.items():
        if name not in DEVICE_ONLY:
            assert not re.search(FORBIDDEN[rule], text), f"{name}: {rule}"


def test_only_platform_cuh_asks_for_the_compiler():
    for name in DEVICE_ONLY - {"kernels/platform.cuh"}:
        assert not re.search(FORBIDDEN["compiler macros"], SOURCES[name])
    assert len(re.findall("KVC_EMULATION", SOURCES["kernels/platform.cuh"])) == 2, "the comment and the one #ifdef"


def test_ptx_is_mma_ldmatrix_and_cp_async_only():
    strings = re.findall(r'asm[^;]*?\(\s*"([a-z0-9_.]+)', SOURCES["kernels/ptx.cuh"])
    assert len(strings) == len(re.findall(r"\basm\b", SOURCES["kernels/ptx.cuh"])) > 0
    assert {re.match(r"(mma\.sync|ldmatrix|cp\.async)\.", f"{text}.")[1] for text in strings} == {
        "mma.sync",
        "ldmatrix",
        "cp.async",
    }


def test_device_and_emulation_offer_the_same_functions():
    """Every function that the device side defines in kvc::platform has a host twin."""
    host = "".join(path.read_text() for path in sorted((PLUGINS / "emulation").glob("*.h")))
    device = SOURCES["kernels/device.cuh"] + SOURCES["kernels/ptx.cuh"]
    own = {"shared_address", "check"}  # of the device side alone
    names = set(re.findall(r"__device__ __forceinline__ [^(\n]*?\b(\w+)\(", device)) - own
    assert {"widen", "narrow", "mma_m16n8k16", "ldmatrix", "copy_async_16", "dynamic_shared_bytes"} <= names
    for name in names:
        assert re.search(rf"\b{name}\b", host), name


def test_no_denormal_is_flushed():
    """Denormal scores order pages: no build file may ask for -ftz or fast math."""
    files = [*Path(PLUGINS).rglob("CMakeLists.txt"), *Path(PLUGINS).rglob("*.cmake"), PLUGINS.parent / "CMakeLists.txt"]
    for path in files:
        assert not re.search(r"ftz=true|-ftz(?!=false)|fast[-_]math", path.read_text()), path
