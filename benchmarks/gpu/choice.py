"""The GPU of a sweep by its command line, and the library of kernels that belongs to it.

`--emulated` puts the emulated kernels on a CPU in the place of the GPU, so that a sweep can be tried where there is
none. Nothing is measured then, and the result says so.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import torch

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.emulated import EmulatedGpu
from kvc_trt.errors import KvcError
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.loading import VARIABLE, current_library

CANNOT = 3
FILES = {"cuda": "libkvc_kernels.so", "emulation": "libkvc_emulation.so"}
"""Executor -> the file that `make` writes into build/."""


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the switch that `chosen` reads."""
    parser.add_argument("--emulated", action="store_true",
                        help=f"no GPU: the emulated kernels of {VARIABLE}, on a CPU; nothing is measured")  # fmt: skip


def chosen(options: argparse.Namespace) -> Gpu:
    """Return the GPU, or with `--emulated` its stand-in; a SystemExit that names the missing part where there is
    none."""
    if options.emulated:
        return EmulatedGpu(_library("emulation", "a library of emulated kernels", "make emulation"))
    if not torch.cuda.is_available():
        _cannot("no GPU: the kernels were not run and nothing was timed")
    return Gpu(_library("cuda", "a library for GPUs", "make plugins"))


def _library(executor: str, wanted: str, make: str) -> KernelLibrary:
    try:
        library = current_library()
    except KvcError as error:
        _cannot(str(error))
    if library is None or library.executor != executor:
        found = "no kernel library" if library is None else f"{library.path}, of executor {library.executor}"
        _cannot(f"expected {wanted}, found {found}; `{make}`, then {VARIABLE}=$PWD/build/{FILES[executor]}")
    return library


def _cannot(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(CANNOT)
