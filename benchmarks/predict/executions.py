"""Counts of how often a call's warps run each piece of a kernel's source, from the emulation at the call's own sizes.

The library kvc_emulation_executions reports pieces by address; addr2line says which lines they are, through everything
that was inlined. Rows and KV heads are alike, so few of them are run where the launches of few are those of many.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from benchmarks.kernels import calls as kernel_calls
from benchmarks.kernels.cases import Case
from benchmarks.kernels.cubin import short_name, tool
from benchmarks.predict.sass import Frame
from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.kernels.structs import EmulatedExecutions

LIBRARY = "libkvc_emulation_executions.so"
_FUNCTION = re.compile(r"^([0-9a-f]+) <.*>:$")
_ADDRESS = re.compile(r"^\s+([0-9a-f]+):\t")
_PLACE = re.compile(r"^(.*?)([^/]+):(\d+)")


@dataclass(frozen=True)
class Piece:
    """A straight piece of a kernel's source and how often it was run."""

    frames: tuple[Frame, ...]
    """Its first line, then the lines of the calls around it."""
    warps: float
    """Runs by all warps of a block, on average over the blocks."""
    longest: float
    """Runs by the warp of a block, or of its cluster, that ran it most, on average over the blocks."""
    lanes: float = 0.0
    """Runs by all lanes of a block, on average over the blocks."""


@dataclass(frozen=True)
class Executed:
    """One launch as the emulation ran it."""

    kernel: str
    instantiation: str
    """The name with its template arguments: `page_scores<bf16, 4>`."""
    ctas: int
    threads: int
    dynamic_shared: int
    products: int
    """mma.sync of all warps; counted apart from the pieces, to judge the predictions made from them."""
    exchanges: int
    """Shuffles and votes of all warps."""
    barriers: int
    """Barriers of all blocks."""
    cluster_barriers: int
    """Barriers of clusters, each counted once for each block."""
    pieces: tuple[Piece, ...] = field(repr=False)


def executed(build: Path, operation: str, case: Case, architecture: str) -> list[Executed]:
    """Return the launches of one call on the case's sizes and that GPU, with their runs averaged over blocks."""
    library = KernelLibrary(build / LIBRARY)
    library.set_device(architecture)
    torch.manual_seed(0)
    (call,) = kernel_calls.KERNELS[operation](library, case, 1)
    executions, launches = library.executions_of(call)
    by_kernel: dict[str, dict[int, EmulatedExecutions]] = {}
    for record in executions:
        by_kernel.setdefault(record.kernel.decode(), {})[record.address] = record
    pieces_of = {name: _with_idle_pieces(library.path, own) for name, own in by_kernel.items()}
    places = symbolised(library.path, sorted({address for own in pieces_of.values() for address in own}))
    found = []
    for launch in launches:
        name = launch.name.decode()
        ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
        own = pieces_of[name]
        pieces = [Piece(places[address].frames, *(count / ctas for count in counts)) for address, counts in own.items()]
        instantiations = Counter(kind for one in own if (kind := instantiation(name, places[one].function)))
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        found.append(
            Executed(
                name, instantiations.most_common(1)[0][0], ctas, threads, launch.dynamic_shared_bytes,
                launch.products, launch.exchanges, launch.barriers, launch.cluster_barriers, tuple(pieces),
            )
        )  # fmt: skip
    return found


def _with_idle_pieces(library: Path, ran: Mapping[int, EmulatedExecutions]) -> dict[int, tuple[int, int, int]]:
    """Return counts by address: pieces that ran, and with 0 the pieces of the same functions that did not."""
    function_of = _pieces(library)
    functions = {function_of[address] for address in ran}
    found = {address: (0, 0, 0) for address, function in function_of.items() if function in functions}
    return found | {address: (record.warps, record.longest, record.lanes) for address, record in ran.items()}


@cache
def _pieces(library: Path) -> dict[int, int]:
    """Return every piece of the library's code by its address, with the address of the function that it is in."""
    command = [tool("objdump"), "-d", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, function, reported = {}, 0, False
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            function = int(match.group(1), 16)
        elif match := _ADDRESS.match(line):
            if reported:
                found[int(match.group(1), 16)] = function
            reported = "call" in line and "<__sanitizer_cov_trace_pc>" in line
    return found


def instantiation(kernel: str, function: str) -> str | None:
    """Return the kernel with its template arguments, as a demangled function names it: itself, or its caller."""
    match = re.search(rf"\b{kernel}\b", function)
    if match is None:
        return None
    depth = 0
    for end in range(match.end(), len(function)):
        depth += {"<": 1, ">": -1}.get(function[end], 0)
        if depth <= 0:
            return short_name(function[match.start() : end + 1 if function[end] == ">" else end])
    return short_name(function[match.start() :])


@dataclass(frozen=True)
class Place:
    """The place of an address in the source."""

    frames: tuple[Frame, ...]
    function: str
    """The function that all of it is inlined into."""


def symbolised(library: Path, addresses: list[int]) -> dict[int, Place]:
    """Return the place of the code before each address."""
    given = "\n".join(f"{address - 1:#x}" for address in addresses)
    command = [tool("addr2line"), "-e", str(library), "-i", "-a", "-f", "-C"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    found: dict[int, Place] = {}
    lines = done.stdout.splitlines()
    starts = [number for number, line in enumerate(lines) if re.fullmatch(r"0x[0-9a-f]+", line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        functions, places = lines[start + 1 : end : 2], lines[start + 2 : end : 2]
        matches = [match for place in places if (match := _PLACE.match(place))]
        frames = tuple((match.group(2), int(match.group(3))) for match in matches)
        found[int(lines[start], 16) + 1] = Place(frames, functions[-1])
    return found
