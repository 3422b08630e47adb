"""The plugin library under test: the C++ plugins over the emulated kernels, so that they run where no GPU is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.tensorrt import toolchain


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compiled(name, make) -> the file that make(path) wrote, once per session."""
    known: dict[str, Path] = {}
    directory = tmp_path_factory.mktemp("plugins")

    def find(name: str, make: Callable[[Path], Path]) -> Path:
        if name not in known:
            known[name] = make(directory / name)
        return known[name]

    return find


@pytest.fixture
def plugins(compiled: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    """A plugin library whose kernels are the emulation's."""
    toolchain.header_folders()
    emulation: KernelLibrary = request.getfixturevalue("emulation")
    return compiled("libkvc_plugins.so", lambda path: toolchain.compile_plugins(path, emulation.path))


@pytest.fixture
def cuda_plugins() -> Path:
    """The library that TensorRT loads in production, as `make plugins` built it; KVC_TRT_PLUGINS names another one."""
    path = Path(os.environ.get("KVC_TRT_PLUGINS", toolchain.ROOT / "build" / "libkvc_plugins.so"))
    if not path.is_file():
        pytest.skip(f"{path} was not built: `make plugins` with TENSORRT_ROOT set does")
    return path
