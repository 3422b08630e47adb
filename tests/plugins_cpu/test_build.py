"""What the compiled library exports, and what its instruction sets may share."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from tests.plugins_cuda import build
from tests.plugins_cuda.test_build_python import backend


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) of every symbol that a file defines."""
    command = ["nm", "--defined-only", *options, str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(line.split(maxsplit=2)[1], line.split(maxsplit=2)[2]) for line in lines if len(line.split()) >= 3]


def test_the_library_exports_its_entries_alone(library: Path) -> None:
    names = {name for _, name in symbols(library, "--dynamic")}
    assert "RegisterCustomOps" in names
    assert all(name == "RegisterCustomOps" or name.startswith("kvc_cpu_") for name in names)


def test_code_of_one_instruction_set_is_never_merged_with_that_of_another(library: Path) -> None:
    """A weak symbol would be: the linker keeps one copy, and a processor without AVX-512 would run that of AVX-512."""
    folder = library.parent if library.is_relative_to(build.ROOT) else build.ROOT / "build"
    objects = list(folder.glob("**/kvc_cpu_*.dir/**/*.o"))
    assert objects
    shared = [(path.name, name) for path in objects for kind, name in symbols(path, "-C") if kind in "WVu"]
    assert shared == []


def test_a_wheel_carries_the_library_where_that_is_asked_for(tmp_path: Path) -> None:
    name = backend(f"build_wheel({str(tmp_path)!r})", KVC_TRT_NATIVE="1")
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert [file for file in archive.namelist() if file.endswith(".so")] == ["kvc_trt/lib/libkvc_cpu.so"]
