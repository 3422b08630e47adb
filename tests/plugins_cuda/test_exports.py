"""The libraries export their functions, and nothing that a compiler added."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS

ROOT = Path(__file__).resolve().parents[2]
CONTROL = {
    f"kvc_emulation_{name}"
    for name in (
        "set_schedule",
        "set_device",
        "set_checks_only",
        "set_active_clusters",
        "refuse_queries",
        "launches",
        "clear_launches",
        "executions",
    )
}
OPERATIONS = {one.kernel.operation for one in LIBRARY_OPERATORS if one.kernel is not None}
ABI = {
    "kvc_abi_version",
    "kvc_executor",
    "kvc_prefetch",
    "kvc_read_switches",
    *OPERATIONS,
    *(f"{one}_workspace" for one in OPERATIONS),
}
"""Three functions of the library, a hint, and two of every operation."""


def exported(library: Path) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine: it is part of binutils")
    done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def test_the_emulation_exports_its_c_abi_alone(emulation: KernelLibrary) -> None:
    assert exported(emulation.path) == ABI | CONTROL


@pytest.mark.parametrize("name", ["kvc_kernels", "kvc_plugins"])
def test_a_library_of_nvcc_exports_its_c_abi_alone(name: str) -> None:
    library = ROOT / "build" / f"lib{name}.so"
    if not library.is_file():
        pytest.skip(f"{library} was not built: `make plugins` does")
    plugin = {"getCreators", "setLoggerFinder", "kvc_plugin_last_error"} if name == "kvc_plugins" else set()
    assert exported(library) == ABI | plugin
