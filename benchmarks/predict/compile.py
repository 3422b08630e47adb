"""Compiles the kernels of a case for one architecture, with line numbers, and reads the machine code."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from benchmarks.kernels.cubin import demangled, tool
from benchmarks.predict import sass
from benchmarks.predict.hardware import ARCHITECTURE
from benchmarks.predict.kernel_time import Compiled

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("hybrid_attention.cu", "dense_attention.cu", "attention_in_format.cu", "cluster_step.cu", "compact.cu")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:\d+ SHARED:(\d+)")
_SYSTEM_SHARED = 1024
"""Bytes that the linker counts into SHARED for the system."""


def kernels(build: Path) -> dict[str, Compiled]:
    """Return every instantiation by its name (`page_scores<bf16, 4>`), compiled into BUILD/predict."""
    folder = build / "predict"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for source in SOURCES:
        cubin = _compiled(ROOT / "plugins_cuda" / "src" / source, folder)
        usage = {symbol: numbers for symbol, *numbers in _USAGE.findall(_run("cuobjdump", "-res-usage", str(cubin)))}
        sections = sass.sections(_run("nvdisasm", "--print-line-info-inline", str(cubin)))
        names = demangled(list(sections))
        for symbol, section in sections.items():
            registers, shared = map(int, usage[symbol])
            static_shared = max(0, shared - _SYSTEM_SHARED)
            found[names[symbol]] = Compiled(names[symbol], symbol, section, registers, static_shared)
    return found


def compiler_version() -> str:
    """nvcc's: 13.0.88."""
    found = re.search(r"V([0-9.]+)", _run("nvcc", "--version"))
    return found.group(1) if found else "unknown"


def _compiled(source: Path, folder: Path) -> Path:
    cubin = folder / f"{source.stem}.cubin"
    plugins = ROOT / "plugins_cuda"
    options = ["-O3", "-DNDEBUG", "-std=c++20", "-lineinfo", f"-arch={ARCHITECTURE}", "-cubin"]
    _run("nvcc", *options, "-I", str(plugins / "include"), "-I", str(plugins), str(source), "-o", str(cubin))
    return cubin


def _run(name: str, *arguments: str) -> str:
    program = tool(name)
    path = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")])
    command = [program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}).stdout
