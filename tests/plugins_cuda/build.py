"""Kernel libraries for the tests: built by CMake once, however many test processes ask at the same time."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(target: str, *options: str) -> Path:
    """Build one CMake target of the repository into build/tests/<target>/ and return its library."""
    directory = ROOT / "build" / "tests" / target
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["cmake", "-S", str(ROOT), "-B", str(directory), *options])
        _run(["cmake", "--build", str(directory), "--target", target, "--parallel", "2"])
    return directory / f"lib{target}.so"


def emulation() -> Path:
    """The kernels compiled for the host."""
    return build("kvc_emulation", "-DKVC_CUDA=OFF")


def cuda() -> Path:
    """The kernels compiled by nvcc."""
    return build("kvc_kernels", "-DKVC_CUDA=ON", "-DKVC_EMULATION=OFF")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-4000:]}")
