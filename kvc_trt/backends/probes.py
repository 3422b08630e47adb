"""What this machine offers each backend: found versions, what is missing, and the command that installs it.

A probe imports what it reports on, because an installed package is not yet one that loads.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

INSTALL_VERIFY = "pip install 'kvc-trt[verify]'"
OLDEST_ONNXRUNTIME = (1, 23)
NOT_IN_THIS_VERSION = "this version of kvc-trt has no {} backend yet"


@dataclass(frozen=True)
class Probe:
    """One backend on this machine."""

    name: str
    purpose: str
    usable: bool
    versions: dict[str, str]
    missing: tuple[str, ...]
    install: str | None
    """Command that provides what is missing, where a command can."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "missing": list(self.missing)}


def probe_all() -> list[Probe]:
    """Probe every backend, in the order in which doctor shows them."""
    return [probe() for probe in PROBES.values()]


def probe_reference() -> Probe:
    """PyTorch's eager reference: the oracle of `verify`."""
    versions, missing = _import("torch")
    install = INSTALL_VERIFY if missing else None
    return Probe("reference", "the oracle that verify compares with", not missing, versions, missing, install)


def probe_onnxruntime() -> Probe:
    """ONNX Runtime on the CPU."""
    versions, missing = _import("onnxruntime")
    if not missing and _numbers(versions["onnxruntime"]) < OLDEST_ONNXRUNTIME:
        oldest = ".".join(map(str, OLDEST_ONNXRUNTIME))
        missing = (f"onnxruntime {oldest} or newer, found {versions['onnxruntime']}",)
    install = "pip install --upgrade onnxruntime" if missing else None
    return Probe("onnxruntime", "any CPU; the default", not missing, versions, missing, install)


def probe_tensorrt() -> Probe:
    """TensorRT: only what is installed is reported, the backend itself is not in this version."""
    return _absent("tensorrt", "NVIDIA GPU through TensorRT plugins", ("tensorrt",))


def probe_tensorrt_llm() -> Probe:
    """TensorRT-LLM: likewise."""
    return _absent("tensorrt-llm", "NVIDIA GPU through TensorRT-LLM", ("tensorrt_llm", "tensorrt"))


def probe_torch() -> Probe:
    """PyTorch with the CUDA kernels: it runs engines for `verify` wherever PyTorch does, but none are built for it."""
    purpose = "NVIDIA GPU through PyTorch and CUDA kernels; any CPU for verify"
    probe = _absent("torch", purpose, ("torch",), "this version of kvc-trt builds no engines for torch yet")
    if "torch" not in probe.versions:
        return probe
    found, problem = _kernels()
    versions = probe.versions if found is None else {**probe.versions, "kernels": found}
    return replace(probe, versions=versions, missing=(*probe.missing, *([problem] if problem else [])))


PROBES: dict[str, Callable[[], Probe]] = {
    "reference": probe_reference,
    "onnxruntime": probe_onnxruntime,
    "tensorrt": probe_tensorrt,
    "tensorrt-llm": probe_tensorrt_llm,
    "torch": probe_torch,
}


def _absent(name: str, purpose: str, packages: tuple[str, ...], lacking: str = NOT_IN_THIS_VERSION) -> Probe:
    versions = {package: found for package in packages if (found := _version(package)) is not None}
    missing = [lacking.format(name)]
    missing += [f"Python package {package}" for package in packages if package not in versions]
    gpu = _gpu()
    if gpu is None:
        missing.append("an NVIDIA GPU with its driver")
    else:
        versions["gpu"] = gpu
    return Probe(name, purpose, False, versions, tuple(missing), None)


def _kernels() -> tuple[str | None, str | None]:
    """The kernel library that would be called, and what keeps it from running on a GPU."""
    from kvc_trt.kernels.errors import KernelLibraryError
    from kvc_trt.kernels.loading import VARIABLE, library_path, load

    try:
        place = library_path()
        if place is None:
            return None, f"a CUDA kernel library ({VARIABLE} names none, and the package was built without one)"
        library = load(place[0])
    except KernelLibraryError as error:
        return None, f"a CUDA kernel library ({error})"
    found = f"{library.path} ({library.executor}, {place[1]})"
    return found, None if library.executor == "cuda" else f"a CUDA kernel library ({library.path} is an emulated one)"


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
