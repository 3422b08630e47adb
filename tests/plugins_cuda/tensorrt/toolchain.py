"""The plugins and the programs that test them, compiled by g++ against TensorRT's headers where a machine has them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "plugins_cuda" / "tensorrt"
HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def header_folders() -> list[Path]:
    """Folders of NvInferRuntime.h and cuda_runtime_api.h; the test is skipped where one is missing."""
    root = os.environ.get("TENSORRT_ROOT")
    if not root:
        pytest.skip("TENSORRT_ROOT is not set: no TensorRT headers, so the plugins were not compiled")
    if not (Path(root) / "include" / "NvInferRuntime.h").is_file():
        pytest.skip(f"TENSORRT_ROOT={root} has no include/NvInferRuntime.h")
    for folder in _cuda_folders():
        if (folder / "cuda_runtime_api.h").is_file():
            return [Path(root) / "include", folder]
    pytest.skip("no cuda_runtime_api.h in CUDA_HOME, in this Python or in /usr/local/cuda: pip install '.[cuda-build]'")


def _cuda_folders() -> list[Path]:
    folders = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"),) if home]
    try:
        wheel = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        wheel = None
    if wheel is not None:
        folders += [Path(place) / "include" for place in wheel.submodule_search_locations or ()]
    return [*folders, Path("/usr/local/cuda/include")]


def compile_cpp(name: str, *arguments: str | Path) -> Path:
    """build/tests/tensorrt/.../NAME by g++ with the headers, a warning being an error.

    Compiled once for all test processes and files, and again when the command or a file that it may read has changed.
    """
    system = [flag for folder in header_folders() for flag in ("-isystem", str(folder))]
    include = [f"-I{folder}" for folder in (SOURCES.parent, SOURCES.parent / "include", HERE)]
    command = ["g++", *FLAGS, *system, *include, *map(str, arguments)]
    directory = ROOT / "build" / "tests" / "tensorrt" / _digest(command, arguments)
    directory.mkdir(parents=True, exist_ok=True)
    output, fresh = directory / name, directory / f"{name}.fresh"
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr[-8000:]}"
            fresh.rename(output)
    return output


def _digest(command: Sequence[str], arguments: Sequence[str | Path]) -> str:
    """Digest of the command, of the files that it names, and of every header of this project."""
    headers = (*(SOURCES.parent / "include").rglob("*.h"), *SOURCES.glob("*.h"), *HERE.glob("*.h"))
    named = [Path(argument) for argument in arguments if Path(argument).is_file()]
    digest = hashlib.sha256("\0".join(command).encode())
    for path in (*sorted(headers), *named, SOURCES / "exports.map"):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_plugins(name: str, kernels: Path, *flags: str) -> Path:
    """Return the plugins over a kernel library that is already there; nothing of TensorRT's may be left undefined."""
    sources = sorted(SOURCES.rglob("*.cpp"))
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    links = (kernels, f"-Wl,-rpath,{kernels.parent}", "-Wl,--no-undefined", exports)
    return compile_cpp(name, "-shared", *flags, *sources, *links)


def environment() -> dict[str, str]:
    """The environment of a program with sanitizers of its own: without the libraries preloaded for this process."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
