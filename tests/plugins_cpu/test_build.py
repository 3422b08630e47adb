"""The exports of the compiled library, and the code that its instruction sets may share."""

from __future__ import annotations

import platform
import subprocess
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.plugins_cuda import build
from tests.plugins_cuda.test_build_python import backend

KERNELS = build.ROOT / "plugins_cpu" / "kernels"
PREPROCESSOR = f"""#!/bin/sh
case "$*" in *" -c {build.ROOT}/"*) ;; *) exec c++ "$@" ;; esac
c++ "$@" -E || exit
while [ "$1" != -o ]; do shift; done
exec c++ -x c++ -c /dev/null -o "$2"
"""
"""A compiler that makes empty objects of this project's sources, and refuses those whose headers are not there."""


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) of every symbol that a file defines."""
    command = ["nm", "--defined-only", *options, str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(line.split(maxsplit=2)[1], line.split(maxsplit=2)[2]) for line in lines if len(line.split()) >= 3]


def test_the_library_exports_its_entries_alone(library: Path) -> None:
    names = {name for _, name in symbols(library, "--dynamic")}
    assert "RegisterCustomOps" in names
    assert all(name == "RegisterCustomOps" or name.startswith("kvc_cpu_") for name in names)


@pytest.mark.slow
def test_code_of_one_instruction_set_is_never_merged_with_that_of_another(library: Path) -> None:
    """A weak symbol would be: the linker keeps one copy, and a processor without AVX-512 would run that of AVX-512."""
    folder = library.parent if library.is_relative_to(build.ROOT) else build.ROOT / "build"
    objects = list(folder.glob("**/kvc_cpu_*.dir/**/*.o"))
    assert objects
    shared = [(path.name, name) for path in objects for kind, name in symbols(path, "-C") if kind in "WVu"]
    assert shared == []


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(path.name for path in KERNELS.glob("*.cpp") if path.name != "choice.cpp"))
def test_code_is_never_merged_even_without_inlining(source: str, tmp_path: Path) -> None:
    made = tmp_path / "made.o"
    options = ["-std=c++20", "-O0", "-fno-inline", "-DKVC_TARGET=portable", f"-I{KERNELS.parent}"]
    subprocess.run(["c++", *options, "-c", str(KERNELS / source), "-o", str(made)], check=True)
    assert [name for kind, name in symbols(made, "-C") if kind in "WVu"] == []


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 machine code")
@pytest.mark.parametrize(
    ("source", "function", "least"),
    [("attend", "score<", 2), ("attend", "weigh<", 1), ("quantised", "multiply_panel<", 1)],
)
def test_the_compiler_drops_no_prefetch(library: Path, source: str, function: str, least: int) -> None:
    """It takes a function that only prefetches for one without effect. Scores prefetch keys and values."""
    folder = library.parent if library.is_relative_to(build.ROOT) else build.ROOT / "build"
    objects = list(folder.glob(f"**/kvc_cpu_*.dir/**/{source}.cpp.o"))
    assert objects
    for path in objects:
        command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        kept: Counter[str] = Counter()  # by the arguments of the template, of which a part may not be inlined
        for name, _, instructions in (text.partition(":\n") for text in code.split("\n\n")):
            if f"::{function}" in name and ".cold" not in name:
                kept[name.rpartition(f"::{function}")[2].partition(">")[0]] += instructions.count("prefetch")
        assert kept, path
        assert min(kept.values()) >= least, (path, kept)


@pytest.mark.slow
def test_a_wheel_carries_the_library(tmp_path: Path) -> None:
    """Its sources are found and read, not compiled: nothing here runs the library, and all tests that do compile it."""
    compiler = tmp_path / "c++"
    compiler.write_text(PREPROCESSOR)
    compiler.chmod(0o700)
    name = backend(f"build_wheel({str(tmp_path)!r})", CXX=str(compiler))
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert [file for file in archive.namelist() if file.endswith(".so")] == ["kvc_trt/lib/libkvc_cpu.so"]
