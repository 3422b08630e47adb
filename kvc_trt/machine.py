"""The machine of a measurement: processor, memory, versions. A figure without this record says little."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from kvc_trt.version import __version__

_LIBRARIES = ("numpy", "onnx", "onnxruntime", "torch", "transformers")
_VECTOR_EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def machine_record() -> dict[str, Any]:
    """Device name, cores, memory in bytes, operating system, library versions and the time (UTC).

    Names no host, user or path, so the record can be published as it is.
    """
    import psutil

    return {
        "device": _processor_name(),
        "architecture": platform.machine(),
        "vector_extensions": _vector_extensions(),
        "logical_cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "operating_system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": library_versions(),
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def place(machine: Mapping[str, Any]) -> str:
    """Name the GPU or processor of a profile from its machine's record, and say if a processor stood in for a GPU."""
    if "gpu" in machine:
        return f"{machine['gpu']}, host {machine['device']}"
    text = f"{machine['device']}, {machine['threads']} of {machine['usable_cores']} cores"
    return f"{text}; {machine['stands_in']}, not a GPU" if "stands_in" in machine else text


def library_versions() -> dict[str, str]:
    """Versions of kvc-trt and of the libraries that bear on a result; those not installed are left out."""
    found = {"kvc_trt": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def usable_cores() -> int:
    """Cores this process may run on (container and affinity limits respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_field(field: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return None


def _processor_name() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _vector_extensions() -> list[str]:
    flags = set((_cpu_field("flags") or _cpu_field("Features") or "").split())
    return [name for name in _VECTOR_EXTENSIONS if name in flags]


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
