"""The facts about this machine that matter for a TensorRT engine; `requirements` judges them.

Inspecting is harmless on any machine. In particular it makes no TensorRT object: a runtime made without a driver
reports no error and ends the process on first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvc_trt.backends.tensorrt.device import call
from kvc_trt.backends.tensorrt.plugins import PluginLibrary, find_libraries
from kvc_trt.errors import KvcError

Version = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """One GPU as CUDA describes it."""

    name: str
    capability: Version
    memory_bytes: int
    free_bytes: int

    @property
    def architecture(self) -> str:
        """The architecture in the notation of nvcc and the manifest, such as sm_90."""
        major, minor = self.capability
        return f"sm_{major}{minor}"


@dataclass(frozen=True)
class GpuMachine:
    """The facts about this machine; if one is None, its `..._problem` may say why."""

    tensorrt: str | None = None
    """The version that the loaded package reports, such as 11.4.0.106."""
    tensorrt_problem: str | None = None
    cuda_runtime: Version | None = None
    """The CUDA version of the runtime in cuda-bindings; None if the package is missing or does not load."""
    cuda_problem: str | None = None
    driver: Version | None = None
    """The newest CUDA version that the driver supports; None without a driver."""
    gpu: Gpu | None = None
    gpu_problem: str | None = None
    libraries: tuple[PluginLibrary, ...] = ()
    """The libraries with the plugins: the C++ library, and the kernel library that the Python plugins call."""
    library_problem: str | None = None


def inspect_machine(*, ask_libraries: bool = True) -> GpuMachine:
    """Inspect this machine. Imports tensorrt and cuda-bindings if installed; `ask_libraries`: see `find_libraries`."""
    facts: dict[str, Any] = {}
    tensorrt, facts["tensorrt_problem"] = _import("tensorrt", "tensorrt")
    if tensorrt is not None:
        facts["tensorrt"] = str(tensorrt.__version__)
    facts["driver"] = driver_version()
    runtime, facts["cuda_problem"] = _import("cuda.bindings.runtime", "cuda-bindings")
    if runtime is not None:
        with _problem_in(facts, "cuda_problem"):
            facts["cuda_runtime"] = cuda_version(runtime)
        if facts["driver"] is not None:
            with _problem_in(facts, "gpu_problem"):
                facts["gpu"] = current_gpu(runtime)
    try:
        facts["libraries"] = find_libraries(ask=ask_libraries)
    except KvcError as error:
        facts["library_problem"] = error.message
    return GpuMachine(**facts)


def current_gpu(runtime: Any) -> Gpu:
    """Return the current CUDA device of this thread. Creates its CUDA context, as any allocation would."""
    (device,) = call(runtime.cudaGetDevice, doing="asking for the device")
    (properties,) = call(runtime.cudaGetDeviceProperties, device, doing="asking for the device's properties")
    free, total = call(runtime.cudaMemGetInfo, doing="asking for the device's memory")
    name = properties.name.split(b"\0")[0].decode("utf-8", "replace")
    return Gpu(name, (int(properties.major), int(properties.minor)), int(total), int(free))


def cuda_version(runtime: Any) -> Version:
    """Return the version of the CUDA runtime inside cuda-bindings, without a driver."""
    (number,) = call(runtime.cudaRuntimeGetVersion, doing="asking for the CUDA version")
    return _split(number)


def driver_version() -> Version | None:
    """Return the CUDA version that the driver supports, without any package; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0 or not number.value:
        return None
    return _split(number.value)


def _split(number: int) -> Version:
    """Split CUDA's version number: 13050 is 13.5."""
    return int(number) // 1000, int(number) % 1000 // 10


@contextlib.contextmanager
def _problem_in(facts: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except KvcError as error:
        facts[name] = error.message


def _import(module: str, package: str) -> tuple[Any, str | None]:
    """Import a module; return (module, None), or (None, the reason why it failed)."""
    try:
        return importlib.import_module(module), None
    except Exception as error:  # a broken installation raises whatever its loader raises
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            return None, "not installed"
        return None, f"{found} is installed, but does not load: {' '.join(str(error).split())}"
