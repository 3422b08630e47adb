"""Kernel libraries for the tests: built by CMake once, however many test processes ask at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins_cuda"


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


def broken_emulation(directory: Path, sources: Sequence[str], *edits: tuple[str, str, str]) -> Path:
    """The emulation with edited kernels. An edit: file of plugins_cuda, text that occurs there once, its replacement.

    Only `sources` (names in plugins_cuda/src) are compiled anew, without optimisation; the rest is linked as it is.
    """
    for name, right, wrong in edits:
        text = (PLUGINS / name).read_text()
        assert text.count(right) == 1, f"{name} has changed: {right!r} occurs there {text.count(right)} times"
        path = directory / "edited" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(right, wrong))
    included = [f"-I{folder}" for folder in (directory / "edited", PLUGINS, PLUGINS / "include")]
    options = ["-std=c++20", "-fPIC", "-w", "-O0", "-ffp-contract=off", "-DKVC_EMULATION"]
    for name in sources:
        command = ["c++", *options, *included, "-x", "c++", "-c", str(PLUGINS / "src" / name)]
        _run([*command, "-o", str(directory / f"{name}.o")])
    kernels = [path for path in _objects("kvc_emulation_objects") if path.name.removesuffix(".o") not in sources]
    unchanged = [*kernels, *host_objects()]
    objects = map(str, [*unchanged, *(directory / f"{name}.o" for name in sources)])
    library = directory / "libkvc_emulation.so"
    exported = f"-Wl,--no-undefined,--version-script={PLUGINS / 'exports.map'}"
    _run(["c++", "-shared", exported, *objects, "-o", str(library)])
    return library


def host_objects() -> list[Path]:
    """Everything of the emulation that is compiled but the kernels."""
    return _objects("kvc_emulation")


def kernel_objects(source: str) -> list[Path]:
    """Return the kernels of one source."""
    return [path for path in _objects("kvc_emulation_objects") if path.name == f"{source}.o"]


def _objects(target: str) -> list[Path]:
    return sorted(emulation().parent.glob(f"plugins_cuda/emulation/CMakeFiles/{target}.dir/**/*.o"))


def emulation() -> Path:
    """The kernels compiled for the host: in the folder of `make emulation` where there is one, brought up to date."""
    if (ROOT / "build" / "CMakeCache.txt").is_file():
        return build("kvc_emulation", directory=ROOT / "build")
    return build("kvc_emulation", "-DKVC_CUDA=OFF")


def cuda() -> Path:
    """Return the kernels compiled by nvcc."""
    return build("kvc_kernels", "-DKVC_CUDA=ON", "-DKVC_EMULATION=OFF")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-4000:]}")
