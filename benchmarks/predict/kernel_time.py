"""The predicted time of one launch, from the cost of its blocks, how often they run, and the bytes that it moves.

waiting     clocks that the longest warp of a block of threads needs alone, for its own results
issue       clocks that all warps of the blocks on the busiest multiprocessor take of its issue slots, or of the unit
            that they take most of
execution   where all blocks are resident at once, they go through the code side by side: the slower of the two, added
            up piece by piece. Blocks that go in rounds are at different pieces: the slower of the two sums
memory      bytes over the bandwidth of a long copy, or over what one multiprocessor takes where that is less
covered     clocks of the longest warp, of its execution, that pass while the bytes of asynchronous copies arrive
launch      where every block is resident at once (it loads, then computes) execution + memory, and what is covered is
            counted once; else the slower
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.kernels.occupancy import resident_ctas
from benchmarks.predict import chain, hardware, sass
from benchmarks.predict.counts import Counts, RowSlots
from benchmarks.predict.executions import Executed
from benchmarks.predict.frequencies import Frequencies
from benchmarks.predict.hardware import Gpu
from benchmarks.predict.sass import SassKernel

EXCHANGES = ("SHFL", "VOTE", "MATCH", "REDUX", "LDSM")
"""Instructions that the emulation counts as exchanges. (The compiler adds VOTEU itself.)"""
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Compiled:
    """A kernel as the compiler made it."""

    name: str
    symbol: str
    section: str = field(repr=False)
    """Its machine code as nvdisasm prints it."""
    registers: int
    static_shared: int

    @cached_property
    def code(self) -> SassKernel:
        """Read when it is needed: a library has many kernels, and a case launches few."""
        return sass.parse(self.symbol, self.section)


@dataclass(frozen=True)
class Geometry:
    """The distribution of a launch over the multiprocessors."""

    ctas: int
    resident: int
    """Blocks that fit on one multiprocessor."""

    @property
    def busiest(self) -> int:
        """Blocks of the multiprocessor that has most."""
        return -(-self.ctas // hardware.MULTIPROCESSORS)

    @property
    def rounds(self) -> int:
        return -(-self.busiest // self.resident)


@dataclass(frozen=True)
class Work:
    """The work of one block of threads of a launch, on average."""

    instructions: float
    """Instructions of all its warps."""
    products: float
    """Instructions that are products on tensor cores (mma.sync)."""
    exchanges: float
    """Instructions that are shuffles, votes and loads of matrices."""
    barriers: float
    """__syncthreads of the block."""
    cluster_barriers: float
    covered: float
    """Clocks of the longest warp between the latency of copies and the wait for them."""
    pieces: tuple[tuple[float, float], ...]
    """For every block of the code: clocks of the longest warp alone, and of issue slots or units by all warps."""
    unmatched: tuple[str, ...]
    """Loops that were taken for one round, since their source was not found."""

    def clocks(self, lies: Geometry) -> float:
        """Return the clocks of the busiest multiprocessor."""
        if lies.rounds == 1:
            return sum(max(wait, lies.busiest * issue) for wait, issue in self.pieces)
        return max(lies.rounds * self.waiting, lies.busiest * self.issue)

    @property
    def waiting(self) -> float:
        """Clocks of the longest warp alone."""
        return sum(wait for wait, _ in self.pieces)

    @property
    def issue(self) -> float:
        """Clocks of issue slots or units that all warps of one block take."""
        return sum(issue for _, issue in self.pieces)


def work(compiled: Compiled, executed: Executed, places: RowSlots) -> Work:
    """Lays the counts of one launch on the kernel's code."""
    warps = -(-executed.threads // 32)
    all_warps = Frequencies(compiled.code, Counts(places, executed.pieces, warps, "warps"))
    longest = Frequencies(compiled.code, Counts(places, executed.pieces, 1.0, "longest"))
    costs = chain.costs(compiled.code, all_warps.runs, longest.runs)
    pieces = []
    covered = 0.0
    executed_by_name: defaultdict[str, float] = defaultdict(float)
    for block, cost, runs, longest_runs in zip(compiled.code.blocks, costs, all_warps.runs, longest.runs, strict=True):
        unit = max((turns / hardware.RATE[name] for name, turns in cost.units.items()), default=0.0)
        slots = cost.instructions / (hardware.PEAK_ISSUE * hardware.SUSTAINED_ISSUE)
        pieces.append((cost.clocks * longest_runs, max(slots, unit) * runs))
        covered += cost.covered * longest_runs
        for one in block.instructions:
            executed_by_name[one.name] += runs
    return Work(
        instructions=sum(executed_by_name.values()),
        products=executed_by_name["HMMA"],
        exchanges=sum(executed_by_name[name] for name in EXCHANGES),
        barriers=executed_by_name["BAR"] / warps,
        cluster_barriers=executed_by_name["UCGABAR_WAIT"] / warps,
        covered=covered,
        pieces=tuple(pieces),
        unmatched=tuple(all_warps.unmatched),
    )


def geometry(compiled: Compiled, ctas: int, threads: int, dynamic_shared: int) -> Geometry:
    """Return the geometry of a launch; at least one block is resident, for it was accepted."""
    fitting = resident_ctas(
        hardware.ARCHITECTURE,
        threads=threads,
        registers=compiled.registers,
        shared_bytes=compiled.static_shared + dynamic_shared,
    )
    return Geometry(ctas, max(1, fitting))


@dataclass(frozen=True)
class Time:
    """A predicted time and its parts, in microseconds, without the edge of the graph."""

    execution: float
    memory: float
    total: float
    bound_by: str


def time_on(gpu: Gpu, done: Work, lies: Geometry, moved: float) -> Time:
    """Return the time of a launch that moves that many bytes."""
    execution = MICROSECONDS * done.clocks(lies) / hardware.CLOCK
    busiest_bytes = moved / lies.ctas * lies.busiest
    memory = MICROSECONDS * max(moved / gpu.bandwidth, busiest_bytes / (hardware.MULTIPROCESSOR_BYTES * hardware.CLOCK))
    covered = MICROSECONDS * done.covered / hardware.CLOCK
    total = execution + max(memory - covered, 0.0) if lies.rounds == 1 else max(execution, memory)
    return Time(execution, memory, total, _bound(done, lies, execution, memory))


def _bound(done: Work, lies: Geometry, execution: float, memory: float) -> str:
    if memory > execution:
        return "memory"
    return "latency" if lies.rounds * done.waiting > lies.busiest * done.issue else "issue"
