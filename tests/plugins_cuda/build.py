"""Kernel libraries for the tests: built by CMake once, however many test processes ask at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(target: str, *options: str, source: Path = ROOT, directory: Path | None = None) -> Path:
    """Build one CMake target of the repository into build/tests/<target>/ and return its library.

    `source` and `directory` replace the repository and that folder.
    """
    directory = directory or ROOT / "build" / "tests" / target
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["cmake", "-S", str(source), "-B", str(directory), *options])
        _run(["cmake", "--build", str(directory), "--target", target, "--parallel", "2"])
    return directory / f"lib{target}.so"


def made_once(name: str, make: Callable[[Path], None], *folders: Path) -> Path:
    """build/tests/<name>/, as `make` fills it: by the first process that asks, anew once one of `folders` changes."""
    directory = ROOT / "build" / "tests" / name
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made, wanted = directory / "made", digest.hexdigest()
        if not made.is_file() or made.read_text() != wanted:
            shutil.rmtree(directory / "files", ignore_errors=True)
            (directory / "files").mkdir()
            made.unlink(missing_ok=True)
            make(directory / "files")
            made.write_text(wanted)
    return directory / "files"


def broken_emulation(directory: Path, *edits: tuple[str, str, str]) -> Path:
    """The emulation of edited kernels. An edit: file of plugins_cuda, text that occurs there once, its replacement."""
    source = directory / "source"
    shutil.copytree(ROOT / "plugins_cuda", source / "plugins_cuda")
    shutil.copy(ROOT / "CMakeLists.txt", source)
    for name, right, wrong in edits:
        path = source / "plugins_cuda" / name
        text = path.read_text()
        assert text.count(right) == 1, f"{name} has changed: {right!r} occurs there {text.count(right)} times"
        path.write_text(text.replace(right, wrong))
    options = "-DKVC_CUDA=OFF", "-DKVC_CPU=OFF", "-DCMAKE_CXX_FLAGS=-D__forceinline__=inline"  # compiles faster
    return build("kvc_emulation", *options, source=source, directory=directory / "build")


def emulation() -> Path:
    """The kernels compiled for the host: in the folder of `make emulation` where there is one, brought up to date."""
    if (ROOT / "build" / "CMakeCache.txt").is_file():
        return build("kvc_emulation", directory=ROOT / "build")
    return build("kvc_emulation", "-DKVC_CUDA=OFF")


def cuda() -> Path:
    """The kernels compiled by nvcc."""
    return build("kvc_kernels", "-DKVC_CUDA=ON", "-DKVC_EMULATION=OFF")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-4000:]}")
