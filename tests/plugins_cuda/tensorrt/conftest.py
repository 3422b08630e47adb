"""The plugin library under test: the C++ plugins over the emulated kernels, so that they run where no GPU is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.tensorrt import toolchain


@pytest.fixture
def plugins(request: pytest.FixtureRequest) -> Path:
    """A plugin library whose kernels are the emulation's."""
    toolchain.header_folders()
    emulation: KernelLibrary = request.getfixturevalue("emulation")
    return toolchain.compile_plugins("libkvc_plugins.so", emulation.path)


@pytest.fixture
def cuda_plugins() -> Path:
    """The library that TensorRT loads in production, as `make plugins` built it; KVC_TRT_PLUGINS names another one."""
    path = Path(os.environ.get("KVC_TRT_PLUGINS", toolchain.ROOT / "build" / "libkvc_plugins.so"))
    if not path.is_file():
        pytest.skip(f"{path} was not built: `make plugins` with TENSORRT_ROOT set does")
    return path
