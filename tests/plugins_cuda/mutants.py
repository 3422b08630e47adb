"""Emulated libraries of kernels with one deliberate mistake each, to see whether the tests would notice it."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvc_trt.kernels.c_library import KernelError
from kvc_trt.kernels.library import KernelLibrary

Check = Callable[[KernelLibrary], None]
"""A function of a module, which is found by its name in another process."""
SECONDS = 300
"""The most that a check may take."""
PLUGINS = Path(__file__).resolve().parents[2] / "plugins_cuda"
_FLAGS = ("-std=c++20", "-fPIC", "-w", "-ffp-contract=off", "-DKVC_EMULATION")
RARELY_INLINED = "-D__forceinline__=inline"
"""Halves the time to compile kernels. With it the race detector misses reads of a struct that is passed by value: it is
only for files of which every mutant is noticed all the same."""
# Forked from a process that has imported what checks need: importing torch takes longer than most checks.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["pytest", "hypothesis", "tests.plugins_cuda.checks", __name__])
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
    included = ("-include", _prefix(*flags))
    _compile("-O0", "-c", *flags, *included, f"-I{overlay}", "-x", "c++", source, "-o", kernels)
    _compile("-shared", kernels, *_unchanged(), "-o", library)
    return library


def check_noticed(mutation: Mutation, source: str, check: Check, *flags: str) -> None:
    """Whether `check` fails with the mistake; a mutation whose name begins with "control" is none and must pass.

    The race detector watches, which needs no luck.
    """
    found = noticed(compile_mutant(mutation, source, "-fsanitize=thread", *flags), check)
    print(found)
    assert bool(found) != mutation.name.startswith("control"), found


def noticed(library: Path, check: Check) -> str:
    """What `check` says against a library: "" if it passes, else what it raised, or the signal that ended it.

    In a process of its own, as a mistake may write anywhere.
    """
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_try_out, args=(library, check, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(SECONDS), f"the check was not over after {SECONDS} s"
        found: str = ours.recv()
        return found
    except EOFError:
        process.join()
        assert process.exitcode is not None
        assert process.exitcode < 0, f"the check broke off with {process.exitcode}"
        return f"signal {-process.exitcode}"
    finally:
        process.kill()
        process.join()


def _try_out(library: Path, check: Check, answer: Connection) -> None:
    """Send what `noticed` returns."""
    torch.set_num_threads(1)
    try:
        check(KernelLibrary(library))
    except (AssertionError, KernelError) as error:
        answer.send(f"{type(error).__name__}: {error}")
    else:
        answer.send("")


@functools.cache
def _prefix(*flags: str) -> Path:
    """A header that every kernel includes, compiled: the emulation, which no mutation changes."""
    header = Path(tempfile.mkdtemp(prefix="prefix-", dir=_directory.name)) / "prefix.h"
    header.write_text('#include "emulation/device.h"\n')
    _compile("-O0", *flags, "-x", "c++-header", header, "-o", f"{header}.gch")
    return header


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
