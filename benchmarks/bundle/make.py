"""Write the bundle of a GPU's day: one folder that runs where there is python3 with torch and numpy, and no internet.

    python -m benchmarks.bundle.make --library build/libkvc_kernels.so build/gpu-bundle    # what `make gpu-bundle` does

The folder holds the files of this tree that the day needs, the commit, the compiled kernels, an engine for each kind of
weights (a build needs onnx, which runs nowhere else in a day), and the wheels of packages that the machine may lack.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.bundle import wheels
from benchmarks.torch import engine as torch_engine

PATHS = (
    "kvc_trt", "benchmarks/*.py", "benchmarks/bundle", "benchmarks/gpu", "benchmarks/gpu_day.sh", "benchmarks/kernels",
    "benchmarks/torch", "build_configs", "tests/*.py", "tests/backends", "tests/kernels", "tests/plugins_cuda",
    "plugins_cuda", "CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "docs/gpu-day.md",
)  # fmt: skip
"""The bundle's part of the tree's tracked files; a test runs all parts with nothing else."""
LEFT_OUT = ("kvc_trt/models/checkpoints/retrieval-text",)
PYTHONS = ("3.11", "3.12", "3.13")
"""The tested version of hypothesis has no wheel for 3.10."""
LARGEST = 60_000_000
"""Bytes of the whole folder."""
START = """#!/bin/sh
exec sh "$(dirname "$0")/benchmarks/gpu_day.sh" "$@"
"""


def tracked(root: Path) -> list[Path]:
    """Return the files of the tree that go into the bundle, relative to its root."""
    left_out = [f":!{path}" for path in LEFT_OUT]
    specs = [f":(glob){path}" if "*" in path else path for path in PATHS]
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *specs, *left_out]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name]


def write(target: Path, library: Path, pythons: Sequence[str]) -> None:
    """Write the bundle, replacing one that is there. Raises RuntimeError where something cannot be had."""
    if target.exists() and not (target / machine.COMMIT.name).is_file():
        raise RuntimeError(f"{target} exists and is no bundle; it is not replaced")
    shutil.rmtree(target, ignore_errors=True)
    for path in tracked(machine.ROOT):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(machine.ROOT / path, target / path)
    (target / machine.COMMIT.name).write_text(f"{machine.commit()}\n", encoding="ascii")
    (target / "gpu_day.sh").write_text(START, encoding="ascii")
    (target / "build").mkdir()
    shutil.copy(library, target / "build" / "libkvc_kernels.so")
    options = torch_engine.parse([])
    for kind in options.weights:
        torch_engine.build(target / "engines" / kind, kind, options)
    wheels.download(pythons, target / "wheels")


def size(target: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--library", type=Path, required=True, help="the kernels, as nvcc compiled them")
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS), help="of the machine with the GPU")
    options = parser.parse_args(arguments)
    try:
        write(options.target, options.library, options.pythons)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    found = size(options.target)
    print(f"{options.target}: {found / 1e6:.1f} MB; there: sh gpu_day.sh")
    if found > LARGEST:
        print(f"error: expected at most {LARGEST / 1e6:.0f} MB; --pythons of fewer versions", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
