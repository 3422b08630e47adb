"""Emulated libraries of kernels with one deliberate mistake each, to see whether the tests would notice it."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins_cuda"
_FLAGS = ("-std=c++20", "-fPIC", "-w", "-ffp-contract=off", "-DKVC_EMULATION")
_directory = tempfile.TemporaryDirectory(prefix="kvc-mutants-")


@dataclass(frozen=True)
class Mutation:
    """`file` of plugins_cuda with `right`, which occurs there once, replaced by `wrong`."""

    name: str
    file: str
    right: str
    wrong: str


def compile_mutant(mutation: Mutation, source: str, *flags: str) -> Path:
    """A library of the one operation in `source` ("src/compact.cu"), with the mistake; `flags` for it alone."""
    text = (PLUGINS / mutation.file).read_text()
    assert text.count(mutation.right) == 1, f"{mutation.file} has changed: {mutation.name} no longer applies"
    overlay = Path(tempfile.mkdtemp(prefix=f"{mutation.name}-", dir=_directory.name))
    changed = overlay / mutation.file
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(mutation.right, mutation.wrong))
    library = overlay / "libmutant.so"
    kernels = overlay / "kernels.o"
    _compile("-O0", "-c", *flags, f"-I{overlay}", "-x", "c++", source, "-o", kernels)
    _compile("-shared", kernels, *_unchanged(), "-o", library)
    return library


def check_noticed(mutation: Mutation, source: str, module: str) -> None:
    """Whether `python -m MODULE LIBRARY` fails with the mistake; the mutation "nothing" is none and must pass.

    In a process of its own: a mistake may write anywhere. The race detector watches, which needs no luck.
    """
    library = compile_mutant(mutation, source, "-fsanitize=thread")
    command = [sys.executable, "-m", module, str(library)]
    done = subprocess.run(command, cwd=PLUGINS.parent, capture_output=True, text=True, timeout=300, check=False)
    if mutation.name == "nothing":
        assert done.returncode == 0, done.stderr
    else:
        noticed = done.returncode < 0 or "AssertionError" in done.stderr or "KernelError" in done.stderr
        assert noticed, f"returned {done.returncode}: {done.stderr[-2000:]}"


@functools.cache
def _unchanged() -> tuple[Path, ...]:
    """Objects of the emulation and of the host sources, compiled once in a process."""
    objects = []
    for path in (*sorted(PLUGINS.glob("emulation/*.cpp")), *sorted(PLUGINS.glob("src/*.cpp"))):
        objects.append(Path(_directory.name) / f"{path.stem}.o")
        _compile("-O1", "-c", path, "-o", objects[-1])
    return tuple(objects)


def _compile(*arguments: str | Path) -> None:
    command = ["g++", *_FLAGS, *map(str, arguments), f"-I{PLUGINS}", f"-I{PLUGINS / 'include'}"]
    done = subprocess.run(
        command, cwd=PLUGINS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}"
