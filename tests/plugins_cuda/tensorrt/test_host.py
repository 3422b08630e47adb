"""The C++ plugins without a GPU: host_*.cpp call every method as TensorRT does, under ASan and UBSan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.plugins_cuda.tensorrt import toolchain

SOURCES = sorted(toolchain.HERE.glob("host_*.cpp"))
NAMES = [
    line.split("(")[1].split(")")[0]
    for path in SOURCES
    for line in path.read_text().splitlines()
    if line.startswith("TEST(")
]
NEEDS_CUDA = "without_a_driver_a_step_fails_with_the_reason"
SKIPPED = 77


@pytest.fixture
def sanitized(request) -> tuple[Path, Path]:
    """(host_test, plugins over the emulation), both with sanitizers."""
    toolchain.header_folders()
    kernels = request.getfixturevalue("emulation").path
    plugins = toolchain.compile_plugins("libkvc_plugins.so", kernels, *toolchain.SANITIZERS)
    return _host_test(*toolchain.SANITIZERS), plugins


def _host_test(*flags: str) -> Path:
    return toolchain.compile_cpp("host_test", *flags, *SOURCES, "-ldl", "-pthread")


def _run(program: Path, library: Path, name: str) -> None:
    done = subprocess.run(
        [program, library, name], env=toolchain.environment(), capture_output=True, text=True, check=False
    )
    if done.returncode == SKIPPED:
        pytest.skip("needs the kernels of nvcc, and no driver")
    assert done.returncode == 0, f"{name} exited with {done.returncode}:\n{done.stderr[-4000:]}"


def test_the_host_tests_are_found():
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", [name for name in NAMES if name != NEEDS_CUDA])
def test_each_host_test_passes_under_sanitizers(sanitized, name):
    _run(*sanitized, name)


@pytest.mark.parametrize("name", NAMES)
def test_each_host_test_passes_with_the_cuda_plugins(cuda_plugins, name):
    _run(_host_test(), cuda_plugins, name)


@pytest.mark.parametrize("fixture", ["plugins", "cuda_plugins"])
def test_the_library_exports_tensorrts_entry_points_and_needs_no_symbol_of_it(request, fixture):
    """Python's wheels open their libraries locally: an undefined symbol of TensorRT's would end the process."""
    library = request.getfixturevalue(fixture)
    needed, exported = (
        subprocess.run(["nm", "-D", option, library], capture_output=True, text=True, check=True).stdout
        for option in ("--undefined-only", "--defined-only")
    )
    assert "_Unwind_Resume" in needed
    assert not [line for line in needed.splitlines() if "nvinfer" in line or "PluginRegistry" in line]
    names = {line.split()[-1] for line in exported.splitlines()}
    assert {"getCreators", "setLoggerFinder", "kvc_plugin_last_error"} <= names
    assert all(name in ("getCreators", "setLoggerFinder") or name.startswith("kvc_") for name in names)
