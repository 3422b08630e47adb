"""Compare an engine's requirements with the machine: one table for doctor, build and load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvc_trt.backends.probes import nvidia_gpu
from kvc_trt.backends.tensorrt import machine as looking
from kvc_trt.backends.tensorrt.format import target_problem
from kvc_trt.backends.tensorrt.lowering.operators import FIRST_FOR_GRAPHS
from kvc_trt.backends.tensorrt.machine import GpuMachine
from kvc_trt.backends.tensorrt.module import INSTALL
from kvc_trt.backends.tensorrt.plugins import BUILD_HINT, VARIABLE, PluginLibrary
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.errors import describe as quoted
from kvc_trt.kernels.structs import ABI_VERSION
from kvc_trt.sizes import readable_size

OLDEST_CUDA = (12, 0)
OLDEST_CAPABILITY = (8, 0)
"""The oldest architecture for which the kernels are compiled."""


@dataclass(frozen=True)
class Missing:
    """One thing that is missing or does not fit the machine."""

    what: str
    expected: str
    found: str
    hint: str
    """The next command or another remedy."""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"

    def error(self) -> UnsupportedEnvironment:
        """Return it as an error: the request is valid, but this machine cannot carry it out."""
        return UnsupportedEnvironment(str(self), hint=self.hint)


@dataclass(frozen=True)
class Packages:
    """The TensorRT version that a backend needs, and the commands that install its Python packages."""

    oldest: tuple[int, int]
    install: str
    upgrade: str
    install_cuda: str


FOR_GRAPHS = Packages(FIRST_FOR_GRAPHS, INSTALL, f"{INSTALL} --upgrade", INSTALL)
"""The packages for TensorRT's parser, which reads our graphs."""


@dataclass(frozen=True)
class BuiltFor:
    """The target that an engine's manifest records."""

    architecture: str
    tensorrt: str
    library: str
    library_sha256: str
    library_abi: int
    portable: bool
    """True if it was built for every architecture from OLDEST_CAPABILITY on."""

    @classmethod
    def of(cls, target: Mapping[str, Any], where: str) -> BuiltFor:
        """Read a manifest's `target`; InputError if it is not that of a TensorRT engine."""
        if target_problem(target, "tensorrt", frozenset({"tensorrt"})) is not None:
            raise InputError(f"{where}: expected the target of a TensorRT engine, found {quoted(target)}")
        plugins = target["plugins"]
        return cls(
            target["architecture"],
            target["tensorrt"],
            plugins["file"],
            plugins["sha256"],
            plugins["abi"],
            target["compatibility"] == "hardware",
        )


def probe_machine(packages: Packages) -> tuple[dict[str, str], list[Missing]]:
    """Return the facts about this machine for doctor, and everything that is missing."""
    machine = looking.inspect_machine()
    versions = describe(machine)
    if "gpu" not in versions and (seen := nvidia_gpu()) is not None:
        versions["gpu"] = seen  # nvidia-smi reports it even without the packages
    return versions, missing_here(machine, packages)


def missing_here(machine: GpuMachine, packages: Packages = FOR_GRAPHS) -> list[Missing]:
    """Return everything that keeps this machine from building or running any engine, the first cause first."""
    return [*_software(machine, packages), *_gpu(machine), *_library(machine)]


def missing_for(target: BuiltFor, machine: GpuMachine, rebuild: str) -> list[Missing]:
    """Return everything that keeps this machine from running this engine; `rebuild` is the command that rebuilds it.

    Only the plugin library that the engine was built with is accepted; others are not judged.
    """
    missing = [*_software(machine, FOR_GRAPHS), *_gpu(machine)]
    if machine.tensorrt is not None and machine.tensorrt != target.tensorrt:
        missing.append(
            Missing(
                "the engine is of another TensorRT",
                f"TensorRT {target.tensorrt}",
                f"TensorRT {machine.tensorrt}",
                f"{rebuild}, or pip install tensorrt=={target.tensorrt}",
            )
        )
    if machine.gpu is not None and not target.portable and machine.gpu.architecture != target.architecture:
        found = f"{machine.gpu.architecture} ({machine.gpu.name})"
        missing.append(Missing("the engine is for another GPU architecture", target.architecture, found, rebuild))
    return [*missing, *_engine_library(target, machine, rebuild)]


def library_of(target: BuiltFor, machine: GpuMachine) -> PluginLibrary:
    """Return the library that the engine was built with, which `missing_for` accepts."""
    return next(library for library in machine.libraries if library.sha256 == target.library_sha256)


def describe(machine: GpuMachine) -> dict[str, str]:
    """Return the facts about the machine for doctor."""
    found: dict[str, str] = {}
    if machine.tensorrt is not None:
        found["tensorrt"] = machine.tensorrt
    if machine.cuda_runtime is not None:
        found["cuda"] = _dotted(machine.cuda_runtime)
    if machine.driver is not None:
        found["driver"] = f"for CUDA {_dotted(machine.driver)}"
    if machine.gpu is not None:
        found["gpu"] = f"{machine.gpu.name} ({machine.gpu.architecture}, {readable_size(machine.gpu.memory_bytes)})"
    for library in machine.libraries:
        abi = "" if library.abi is None else f"{library.executor}, ABI {library.abi}, "
        found[library.kind] = f"{library.path} ({abi}SHA-256 {library.sha256[:16]})"
    return found


def refuse(missing: Sequence[Missing]) -> None:
    """Raise the first missing thing as an error."""
    for one in missing:
        raise one.error()


def _software(machine: GpuMachine, packages: Packages) -> Iterator[Missing]:
    oldest = f"{_dotted(packages.oldest)} or newer"
    if machine.tensorrt is None:
        yield Missing("TensorRT", oldest, machine.tensorrt_problem or "not installed", packages.install)
    elif _numbers(machine.tensorrt)[:2] < packages.oldest:
        yield Missing("TensorRT", oldest, machine.tensorrt, packages.upgrade)
    if machine.cuda_runtime is None:
        found = machine.cuda_problem or "not installed"
        yield Missing("cuda-bindings", "an installed package", found, packages.install_cuda)
    needed = machine.cuda_runtime or OLDEST_CUDA
    if machine.driver is None:
        yield Missing("NVIDIA driver", f"one for CUDA {needed[0]}", "none", "install NVIDIA's driver; then nvidia-smi")
    elif machine.driver[0] < needed[0]:
        # Within a major version an older driver supports a newer runtime.
        way_out = f"update NVIDIA's driver, or install the packages for CUDA {machine.driver[0]}"
        yield Missing("NVIDIA driver", f"one for CUDA {needed[0]}", f"one for CUDA {_dotted(machine.driver)}", way_out)


def _gpu(machine: GpuMachine) -> Iterator[Missing]:
    if machine.driver is None or machine.cuda_runtime is None:
        return  # already reported, and the version is unknown
    oldest = f"sm_{OLDEST_CAPABILITY[0]}{OLDEST_CAPABILITY[1]}"
    if machine.gpu is None:
        yield Missing("NVIDIA GPU", f"{oldest} or newer", machine.gpu_problem or "none", "nvidia-smi")
    elif machine.gpu.capability < OLDEST_CAPABILITY:
        found = f"{machine.gpu.architecture} ({machine.gpu.name})"
        yield Missing("NVIDIA GPU", f"{oldest} or newer", found, "--backend onnxruntime runs on any CPU")


def _library(machine: GpuMachine) -> Iterator[Missing]:
    what, wanted = "plugin library", f"one for CUDA with ABI {ABI_VERSION}"
    if any(library.executor == "cuda" and library.abi == ABI_VERSION for library in machine.libraries):
        return
    if machine.library_problem is not None:
        yield Missing(what, wanted, machine.library_problem, BUILD_HINT)
        return
    found = "; ".join(f"{lib.path} ({lib.executor}, ABI {lib.abi})" for lib in machine.libraries)
    yield Missing(what, wanted, found or "none", BUILD_HINT)


def _engine_library(target: BuiltFor, machine: GpuMachine, rebuild: str) -> Iterator[Missing]:
    if target.library_abi != ABI_VERSION:
        found = f"ABI {target.library_abi}"
        yield Missing("the engine's plugins are of another version", f"ABI {ABI_VERSION}", found, rebuild)
        return
    if any(library.sha256 == target.library_sha256 for library in machine.libraries):
        return
    wanted = f"{target.library} with SHA-256 {target.library_sha256}"
    way_out = f"{VARIABLE}=/path/to/{target.library}, or {rebuild}"
    alike = [library for library in machine.libraries if library.path.name == target.library] or machine.libraries
    if not alike:
        yield Missing("the engine's plugin library", wanted, machine.library_problem or "none", way_out)
        return
    found = f"{alike[0].path} with SHA-256 {alike[0].sha256}: another build or version, or changed since"
    yield Missing("the engine's plugin library", wanted, found, way_out)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
