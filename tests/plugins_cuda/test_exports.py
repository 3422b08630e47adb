"""What the libraries export: the functions that their headers declare, and nothing that a compiler put beside them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvc_trt.kernels.library import KernelLibrary

ROOT = Path(__file__).resolve().parents[2]
HEADERS = {
    "kernels": ("include/kvc/types.h", "include/kvc/compact.h", "include/kvc/attention.h"),
    "emulation": ("emulation/emulation.h",),
}


def exported(library: Path) -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine: it is part of binutils")
    done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def declared(*kinds: str) -> set[str]:
    files = (ROOT / "plugins_cuda" / file for kind in kinds for file in HEADERS[kind])
    return {name for file in files for name in re.findall(r"KVC_API [\w *]+?\b(kvc_\w+)\(", file.read_text())}


def test_the_headers_declare_what_python_calls() -> None:
    calls = {"kvc_compact", "kvc_hybrid_attention", "kvc_dense_attention"}
    names = {"kvc_abi_version", "kvc_executor", *calls, *(f"{call}_workspace" for call in calls)}
    assert names <= declared("kernels")


def test_the_emulation_exports_its_c_abi_alone(emulation: KernelLibrary) -> None:
    assert exported(emulation.path) == declared("kernels", "emulation")


@pytest.mark.parametrize("name", ["kvc_kernels", "kvc_plugins"])
def test_a_library_of_nvcc_exports_its_c_abi_alone(name: str) -> None:
    library = ROOT / "build" / f"lib{name}.so"
    if not library.is_file():
        pytest.skip(f"{library} was not built: `make plugins` does")
    plugin = {"getCreators", "setLoggerFinder", "kvc_plugin_last_error"} if name == "kvc_plugins" else set()
    assert exported(library) == declared("kernels") | plugin
