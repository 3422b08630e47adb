"""What this machine offers each backend: found versions, what is missing, and the command that installs it.

A probe imports what it reports on, because an installed package is not yet one that loads.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvc_trt.backends.tensorrt.requirements import Lack, Packages

INSTALL_VERIFY = "pip install 'kvc-trt[verify]'"
OLDEST_ONNXRUNTIME = (1, 23)


@dataclass(frozen=True)
class Probe:
    """One backend on this machine."""

    name: str
    purpose: str
    usable: bool
    versions: dict[str, str]
    missing: tuple[str, ...]
    install: tuple[str, ...]
    """Commands that provide what is missing, where commands can."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "missing": list(self.missing), "install": list(self.install)}


def probe_all() -> list[Probe]:
    """Probe every backend, in the order in which doctor shows them."""
    return [probe() for probe in PROBES.values()]


def probe_reference() -> Probe:
    """PyTorch's eager reference: the oracle of `verify`."""
    versions, missing = _import("torch")
    install = (INSTALL_VERIFY,) if missing else ()
    return Probe("reference", "the oracle that verify compares with", not missing, versions, missing, install)


def probe_onnxruntime() -> Probe:
    """ONNX Runtime on the CPU."""
    versions, missing = _import("onnxruntime")
    if not missing and _numbers(versions["onnxruntime"]) < OLDEST_ONNXRUNTIME:
        oldest = ".".join(map(str, OLDEST_ONNXRUNTIME))
        missing = (f"onnxruntime {oldest} or newer, found {versions['onnxruntime']}",)
    install = ("pip install --upgrade onnxruntime",) if missing else ()
    return Probe("onnxruntime", "any CPU; the default", not missing, versions, missing, install)


def probe_tensorrt() -> Probe:
    """TensorRT with our plugins: packages, driver, GPU and plugin library, as a build or a run would check them."""
    from kvc_trt.backends.tensorrt.requirements import FOR_GRAPHS

    versions, lacks = _tensorrt(FOR_GRAPHS)
    return Probe(
        "tensorrt",
        "NVIDIA GPU through TensorRT and our plugins",
        not lacks,
        versions,
        tuple(map(str, lacks)),
        tuple(dict.fromkeys(lack.hint for lack in lacks)),
    )


def probe_tensorrt_llm() -> Probe:
    """TensorRT-LLM's builder, which needs all that TensorRT needs besides, but an older TensorRT: it reads no graph."""
    from kvc_trt.backends.tensorrt_llm.loading import PACKAGES, probe

    facts, (versions, lacks) = probe(), _tensorrt(PACKAGES)
    missing = (*facts.missing, *map(str, lacks))
    hints = (*([facts.hint] if facts.hint else []), *(lack.hint for lack in lacks))
    return Probe(
        "tensorrt-llm",
        "NVIDIA GPU through TensorRT-LLM 1.2 and older",
        not missing,
        {**versions, **facts.versions},
        missing,
        tuple(dict.fromkeys(hints)),
    )


def _tensorrt(packages: Packages) -> tuple[dict[str, str], list[Lack]]:
    from kvc_trt.backends.tensorrt.machine import look
    from kvc_trt.backends.tensorrt.requirements import describe, machine_lacks

    machine = look()
    versions = describe(machine)
    if "gpu" not in versions and (seen := _gpu()) is not None:
        versions["gpu"] = seen  # the driver's own tool sees it before the packages are there
    return versions, machine_lacks(machine, packages)


def probe_torch() -> Probe:
    """PyTorch around the CUDA kernels; on a CPU their reference stands in, slowly, and the probe says so."""
    purpose = "NVIDIA GPU through PyTorch and CUDA kernels; any CPU, slowly"
    versions, missing = _import("torch")
    if missing:
        return Probe("torch", purpose, False, versions, missing, (INSTALL_VERIFY,))
    found, problem = _kernels()
    if found is not None:
        versions["kernels"] = found
    gpu = _gpu()
    if gpu is not None:
        versions["gpu"] = gpu
    if gpu is None or problem is not None:
        versions["runs on"] = f"the CPU, slowly: no {problem or 'NVIDIA GPU with its driver'}"
    return Probe("torch", purpose, True, versions, (), ())


PROBES: dict[str, Callable[[], Probe]] = {
    "reference": probe_reference,
    "onnxruntime": probe_onnxruntime,
    "tensorrt": probe_tensorrt,
    "tensorrt-llm": probe_tensorrt_llm,
    "torch": probe_torch,
}


def _kernels() -> tuple[str | None, str | None]:
    """The kernel library that would be called, and what keeps it from running on a GPU."""
    from kvc_trt.kernels.c_library import KernelLibraryError
    from kvc_trt.kernels.loading import VARIABLE, library_path, load

    try:
        place = library_path()
        if place is None:
            return None, f"CUDA kernel library ({VARIABLE} names none, and the package was built without one)"
        library = load(place[0])
    except KernelLibraryError as error:
        return None, f"CUDA kernel library ({error})"
    found = f"{library.path} ({library.executor}, {place[1]})"
    return found, None if library.executor == "cuda" else f"CUDA kernel library ({library.path} is an emulated one)"


def _import(package: str) -> tuple[dict[str, str], tuple[str, ...]]:
    try:
        module = importlib.import_module(package)
    except Exception as error:  # a broken installation raises whatever its loader raises
        reason = "not installed" if _version(package) is None else f"installed, but does not load: {error}"
        return {}, (f"Python package {package} ({' '.join(reason.split())})",)
    return {package: str(module.__version__)}, ()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _gpu() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().splitlines()[0] if answer.strip() else None
