"""Emulated libraries of kernels with deliberate mistakes, which the tests must notice."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvc_trt.kernels.library import KernelLibrary
from tests.plugins_cuda.build import ROOT, host_objects, kernel_objects
from tests.plugins_cuda.guards import VARIABLE, Mistake, guarded, with_mistake

Check = Callable[[KernelLibrary], None]
"""A function of a module, which is found by its name in another process."""
SECONDS = 300
"""The most that a check may take."""
PLUGINS = ROOT / "plugins_cuda"
CALLED = ("src/attention_in_format.cu", "src/cluster_step.cu")
"""Sources that others call: they are linked as they are where no mutation is for them."""
_FLAGS = ("-std=c++20", "-fPIC", "-w", "-ffp-contract=off", "-fno-gnu-unique", "-DKVC_EMULATION")
"""Without unique symbols, two libraries in one process share no static variable of a template."""
RARELY_INLINED = "-D__forceinline__=inline"
"""Halves the time to compile kernels. With it the race detector misses reads of a struct that is passed by value, so it
serves only for files whose every mutant is noticed all the same."""
# Forked from a process that has imported what checks need: that takes longer than most checks.
_PROCESSES = multiprocessing.get_context("forkserver")
_OF_CHECKS = sorted(path.stem for path in Path(__file__).parent.glob("test_*mutations.py"))
_PROCESSES.set_forkserver_preload([__name__, *(f"tests.plugins_cuda.{name}" for name in _OF_CHECKS)])
_directory = tempfile.TemporaryDirectory(prefix="kvc-mutants-")


@dataclass(frozen=True)
class Mutation:
    """`file` of plugins_cuda with `right`, which occurs there once, replaced by `wrong`."""

    name: str
    file: str
    right: str
    wrong: str
    alone: bool = False
    """Compiled by itself, as no guard can make it: it changes a constant expression, say, or moves a declaration."""


class Mutants:
    """The mutations of one operation's source ("src/compact.cu"), and of `others` that it calls; `flags` are for the
    kernels alone.

    The race detector watches them, which needs no luck.
    """

    def __init__(self, source: str, mutations: Sequence[Mutation], *flags: str, others: Sequence[str] = ()) -> None:
        self._sources = (source, *others)
        self._numbers = {mutation: number for number, mutation in enumerate(mutations, start=1)}
        self._flags = ("-fsanitize=thread", *flags)

    def check_noticed(self, mutation: Mutation, check: Check) -> None:
        """Assert that `check` fails with the mistake; a mutation named "control..." is no mistake and must pass."""
        if mutation.alone:
            found = noticed(compile_mutant(mutation, *self._sources, flags=self._flags), check)
        else:
            found = noticed(self._together, check, self._numbers[mutation])
        print(found)
        assert bool(found) != mutation.name.startswith("control"), found

    @functools.cached_property
    def _together(self) -> Path:
        """A library of all mutations except those compiled alone: each has a number, and 0 selects none of them."""
        of_files: dict[str, list[Mistake]] = {}
        for mutation, number in self._numbers.items():
            if not mutation.alone:
                of_files.setdefault(mutation.file, []).append(Mistake(number, mutation.right, mutation.wrong))
        texts = {file: guarded((PLUGINS / file).read_text(), mistakes) for file, mistakes in of_files.items()}
        return _compile_changed(texts, self._sources, self._flags)


def compile_mutant(mutation: Mutation, *sources: str, flags: Sequence[str] = ()) -> Path:
    """Return a library of the operation in `sources` with one mistake; `flags` are for the kernels alone."""
    text = (PLUGINS / mutation.file).read_text()
    return _compile_changed({mutation.file: with_mistake(text, mutation.right, mutation.wrong)}, sources, flags)


def noticed(library: Path, check: Check, number: int = 0) -> str:
    """The complaint of `check` about the mutation of that number: "" if it passes, else the error that it raised, or
    the signal that ended it.

    The check runs in a process of its own, as a mistake may write anywhere.
    """
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_try_out, args=(library, number, check, theirs))
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


def _try_out(library: Path, number: int, check: Check, answer: Connection) -> None:
    """Send the result of `noticed`."""
    torch.set_num_threads(1)
    ctypes.c_int.in_dll(ctypes.CDLL(str(library)), VARIABLE).value = number
    try:
        check(KernelLibrary(library))
    except Exception as error:  # the control passes, so it is the mistake's: it may have written over a tensor's sizes
        answer.send(f"{type(error).__name__}: {error}")
    else:
        answer.send("")


def _compile_changed(texts: Mapping[str, str], sources: Sequence[str], flags: Sequence[str]) -> Path:
    """Return a library of some sources in which files of plugins_cuda have other texts."""
    overlay = Path(tempfile.mkdtemp(dir=_directory.name))
    for file, text in texts.items():
        changed = overlay / file
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(text)
    library, included = overlay / "libmutant.so", ("-include", _prefix(*flags))
    kernels = [overlay / f"{number}.o" for number in range(len(sources))]
    for source, to in zip(sources, kernels, strict=True):
        _compile("-O0", "-c", *flags, *included, f"-I{overlay}", "-x", "c++", source, "-o", to)
    called = [part for one in CALLED if one not in sources for part in kernel_objects(Path(one).name)]
    _compile("-shared", *kernels, *called, *_unchanged(), "-o", library)
    return library


@functools.cache
def _prefix(*flags: str) -> Path:
    """Return a header that every kernel includes, compiled: the emulation, which no mutation changes.

    To kernels the number of the mutation is a constant: the compiler reports no read of it to the race detector.
    """
    header = Path(tempfile.mkdtemp(prefix="prefix-", dir=_directory.name)) / "prefix.h"
    header.write_text(f'#include "emulation/device.h"\nextern "C" const int {VARIABLE};\n')
    _compile("-O0", *flags, "-x", "c++-header", header, "-o", f"{header}.gch")
    return header


@functools.cache
def _unchanged() -> tuple[Path, ...]:
    """Objects of the emulation and of the host sources, and the number of the mutation."""
    number = Path(_directory.name) / "number.o"
    number.with_suffix(".cpp").write_text(f'extern "C" {{ int {VARIABLE} = 0; }}\n')
    _compile("-c", number.with_suffix(".cpp"), "-o", number)
    return (number, *host_objects())


def _compile(*arguments: str | Path) -> None:
    command = ["g++", *_FLAGS, *map(str, arguments), f"-I{PLUGINS}", f"-I{PLUGINS / 'include'}"]
    done = subprocess.run(
        command, cwd=PLUGINS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}"
