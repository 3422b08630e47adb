"""The cost of one run of each block: the clocks of a warp alone on its multiprocessor, and the units that it takes.

A warp issues in order. An instruction waits until the registers that it reads are there. Blocks pass on the registers
that are still pending, by the slower of the paths that lead to the next block. The second round of a loop counts: it
finds the registers as rounds usually leave them.

Asynchronous copies are waited for by groups (cp.async) or by their bytes (copies in bulk). What a warp does after the
latency of a copy has passed and before it waits for the copy, it does while bytes arrive: the time of their transfer
covers it, and `kernel_time` counts the two once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.predict import hardware
from benchmarks.predict.sass import Instruction, SassBlock, SassKernel, SassLoop

_REGISTER = re.compile(r"\b(U?[RP])(\d+)(\.64|\.128)?")
_WITHOUT_RESULT = frozenset(
    ("STG", "STS", "STL", "ST", "STSM", "RED", "BAR", "BRA", "EXIT", "MEMBAR", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR",
     "LDGSTS", "WARPSYNC", "NOP", "ERRBAR", "CCTL", "PREEXIT", "ACQBULK", "CALL", "RET", "YIELD", "UCGABAR_ARV",
     "UCGABAR_WAIT", "STAS", "UBLKCP")
)  # fmt: skip


@dataclass(frozen=True)
class BlockCost:
    """One run of a block by a warp."""

    clocks: float
    instructions: int
    units: Counter[str]
    """Turns that it takes of each unit of hardware.RATE."""
    covered: float = 0.0
    """Clocks that pass between the latency of copies and the wait for them."""


_SENT = "sent"
"""Stands in the table of registers for the bytes of STAS, on their way to another block."""
_MET = "met"
"""Stands there for the arrivals of other blocks at the cluster's barrier, at which this one has arrived."""


@dataclass
class _Copies:
    """The asynchronous copies of a warp, by the clocks at which their latency has passed."""

    open: float = 0.0
    """The latest that is in no group yet."""
    groups: list[float] = field(default_factory=list)
    """The latest of each group that was not waited for, oldest first."""
    in_bulk: float | None = None
    """The latest copy in bulk: parts of them are waited for until the block sends bytes to others."""
    covered_until: float = 0.0
    """The clock of the latest wait: time before it does not count as covered again."""

    def start(self, one: Instruction, done: float) -> None:
        """Note a copy, or the end of a group."""
        if one.name == "LDGSTS":
            self.open = max(self.open, done)
        elif one.name == "UBLKCP":
            self.in_bulk = max(self.in_bulk or 0.0, done)
        elif one.name == "STAS":
            self.in_bulk = None
        elif one.name == "LDGDEPBAR":
            self.groups.append(self.open)
            self.open = 0.0

    def end(self, one: Instruction) -> float | None:
        """Return when those are there that an instruction waits for; None if it waits for none."""
        if one.name == "DEPBAR":
            pending = _pending_groups(one)
            ended = self.groups[: len(self.groups) - pending]
            self.groups = self.groups[len(ended) :]
            return max(ended, default=None)
        return self.in_bulk if one.waits_for_bytes else None

    def cover(self, ready: float, clock: float) -> float:
        """Return the clocks from the end of the copies' latency to the wait for them that no other wait has counted."""
        clocks = max(0.0, clock - max(ready, self.covered_until))
        self.covered_until = max(self.covered_until, clock)
        return clocks

    def moved(self, clocks: float, since: _Copies) -> _Copies:
        """Return the copies later by so many clocks, except those that were under way `since` then."""
        old = len([one for one in self.groups if one in since.groups])
        return _Copies(
            self.open if self.open == since.open else self.open + clocks,
            self.groups[:old] + [one + clocks for one in self.groups[old:]],
            self.in_bulk if self.in_bulk is None or self.in_bulk == since.in_bulk else self.in_bulk + clocks,
            self.covered_until if self.covered_until == since.covered_until else self.covered_until + clocks,
        )

    def copy(self) -> _Copies:
        """Return the same copies for another way through the code."""
        return replace(self, groups=list(self.groups))


@dataclass
class _Warp:
    """A warp on its way through the kernel."""

    clock: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    copies: _Copies = field(default_factory=_Copies)

    def run(self, block: SassBlock) -> tuple[float, float]:
        """Clocks from the block's first instruction to its last, and those of them that transfers cover."""
        begin, covered = self.clock, 0.0
        for one in block.instructions:
            written, read = registers(one)
            self.clock = max(self.clock, *(self.ready.get(name, 0.0) for name in (*read, *written)), 0.0)
            there = self.copies.end(one)
            if there is not None:
                covered += self.copies.cover(there, self.clock)
                self.clock = max(self.clock, there)
            done = self.clock + latency(one)
            if one.waits_for_bytes:
                done = max(done, self.ready.pop(_SENT, 0.0))
            elif one.name == "UCGABAR_WAIT":
                done = max(done, self.ready.pop(_MET, 0.0))
            if one.name in ("BAR", "MEMBAR", "WARPSYNC", "BSYNC", "UCGABAR_WAIT"):
                self.clock = done
            self.ready.update(dict.fromkeys(written, done))
            if one.name == "STAS":
                self.ready[_SENT] = self.clock + hardware.BYTES_LATENCY
            elif one.name == "UCGABAR_ARV":
                self.ready[_MET] = self.clock + hardware.CLUSTER_LATENCY
            self.copies.start(one, done)
            self.clock += _issue_clocks(one)
        return self.clock - begin, covered

    def moved(self, clocks: float, since: _Warp) -> _Warp:
        """Return the warp later by so many clocks, and what has begun `since` then with it."""
        ready = {name: at if since.ready.get(name) == at else at + clocks for name, at in self.ready.items()}
        return _Warp(self.clock + clocks, ready, self.copies.moved(clocks, since.copies))


def costs(kernel: SassKernel, runs: Sequence[float], longest: Sequence[float]) -> list[BlockCost]:
    """Return the cost of every block of the kernel; those that never run, by `runs`, are passed over.

    The longest warp's runs say how much time a loop takes of what is under way beside it.
    """
    walk = _Walk(kernel, runs, longest)
    walk.through(range(len(kernel.blocks)), None)
    return [
        BlockCost(walk.clocks[number], *_load(block), walk.covered[number])
        for number, block in enumerate(kernel.blocks)
    ]


class _Walk:
    """A warp's way through all blocks that run, in their order."""

    def __init__(self, kernel: SassKernel, runs: Sequence[float], longest: Sequence[float]) -> None:
        self.clocks = [0.0] * len(kernel.blocks)
        self.covered = [0.0] * len(kernel.blocks)
        self._kernel = kernel
        self._runs = runs
        self._longest = longest
        self._left: dict[int, _Warp] = {}  # the warp at the end of each block

    def through(self, numbers: Iterable[int], around: SassLoop | None) -> None:
        """Runs the blocks of one round of a loop, or of the whole kernel; loops within it twice."""
        inner = [loop for loop in self._kernel.loops if self._kernel.parent(loop) == around]
        done: set[int] = set()
        for number in sorted(numbers):
            if number in done or not self._runs[number]:
                continue
            loop = next((one for one in inner if number in one.blocks), None)
            if loop is None:
                self._run(number)
            elif self._runs[loop.head]:
                self._twice(loop)
                if around is None:
                    self._take_all_rounds(loop)
            done |= loop.blocks if loop else {number}

    def _twice(self, loop: SassLoop) -> None:
        """Take the second round as the cost of a round. The extra time of the first one is waited for once, before the
        loop."""
        entry = self._slowest(loop.head)
        self.through(loop.blocks, loop)
        first = sum(self.clocks[number] for number in loop.blocks)
        self.through(loop.blocks, loop)
        if entry is not None:
            self.clocks[entry] += max(0.0, first - sum(self.clocks[number] for number in loop.blocks))

    def _take_all_rounds(self, loop: SassLoop) -> None:
        """Move the warp behind an outermost loop to where all its rounds end, not two."""
        entry = max((one for one in self._kernel.before[loop.head] if one in self._left and one not in loop.blocks),
                    key=lambda one: self._left[one].clock, default=None)  # fmt: skip
        since = _Warp() if entry is None else self._left[entry]
        entries = min(1.0, self._longest[loop.head]) or 1.0
        clocks = sum(self.clocks[number] * self._longest[number] for number in loop.blocks) / entries
        for number in loop.blocks & self._left.keys():
            warp = self._left[number]
            self._left[number] = warp.moved(since.clock + clocks - warp.clock, since)

    def _run(self, number: int) -> None:
        entry = self._slowest(number)
        before = _Warp() if entry is None else self._left[entry]
        warp = _Warp(before.clock, dict(before.ready), before.copies.copy())
        self.clocks[number], self.covered[number] = warp.run(self._kernel.blocks[number])
        self._left[number] = warp

    def _slowest(self, number: int) -> int | None:
        """Return the predecessor that the warp left last; None if it left none."""
        ways = [one for one in self._kernel.before[number] if one in self._left]
        return max(ways, key=lambda one: self._left[one].clock, default=None)


def _load(block: SassBlock) -> tuple[int, Counter[str]]:
    units: Counter[str] = Counter()
    for one in block.instructions:
        if unit := hardware.UNIT.get(one.name):
            units[unit] += _turns(one)
    return len(block.instructions), units


def _turns(instruction: Instruction) -> int:
    """Return the turns of a unit: one that moves 4 bytes per lane and turn takes several for more."""
    if hardware.UNIT[instruction.name] != "memory" or instruction.name == "SHFL":
        return 1
    modifiers = instruction.opcode.split(".")
    return 4 if {"128", "4"} & set(modifiers) else 2 if {"64", "2"} & set(modifiers) else 1


def latency(instruction: Instruction) -> float:
    """Clocks from issue to the first use of the result.

    Loads of 16 bytes bring keys, values and bounds from memory. Narrower ones bring lengths, lists, queries and scores,
    which the launch before has just written: from L2.
    """
    if instruction.name in ("LDG", "LDGSTS", "UBLKCP", "ATOMG", "ATOM"):
        wide = instruction.name in ("LDGSTS", "UBLKCP") or "128" in instruction.opcode.split(".")
        return hardware.LOADED_LATENCY * (hardware.DEVICE_LATENCY if wide else hardware.L2_LATENCY)
    if instruction.opcode == "MEMBAR.ALL.CTA":
        return hardware.BLOCK_FENCE_LATENCY
    if instruction.waits_for_bytes:
        return hardware.LATENCY["LDS"]
    return hardware.LATENCY.get(instruction.name, hardware.ARITHMETIC_LATENCY)


def _pending_groups(instruction: Instruction) -> int:
    """Return how many groups of copies may be under way behind a `DEPBAR.LE SB0, 0x1`."""
    return int(instruction.operands.split(",")[1], 16)


def _issue_clocks(instruction: Instruction) -> float:
    """Clocks until the same warp may issue again: units of 16 lanes take two for a warp, a tensor core its own time."""
    unit = hardware.UNIT.get(instruction.name)
    if unit == "tensor":
        return hardware.PEAK_ISSUE / hardware.RATE["tensor"]
    return 1.0 if unit is None else 2.0


def registers(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Names of the registers and predicates that an instruction writes and reads."""
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    results = 0
    if instruction.name not in _WITHOUT_RESULT and operands[0]:
        also_second = len(operands) > 1 and (instruction.name == "SHFL" or _is_predicate(operands[1]))
        results = 2 if also_second else 1
    written = [name for operand in operands[:results] for name in _names(operand, _width(instruction))]
    read = _names(instruction.predicate, 1)
    for number, operand in enumerate(operands[results:]):
        read += _names(operand, _read_width(instruction, number))
    return written, read


def _is_predicate(operand: str) -> bool:
    return bool(re.fullmatch(r"U?P(T|\d+)", operand))


def _width(instruction: Instruction) -> int:
    """Registers of a result."""
    modifiers = set(instruction.opcode.split("."))
    if instruction.name == "HMMA" or "128" in modifiers:
        return 4
    return 2 if modifiers & {"64", "WIDE"} else 1


def _read_width(instruction: Instruction, number: int) -> int:
    """Registers of the source operand of that number."""
    if instruction.name == "HMMA":
        return (4, 2, 4)[min(number, 2)]
    modifiers = set(instruction.opcode.split("."))
    if instruction.name in ("STG", "STS", "ST", "STAS") and number == 1:
        return 4 if "128" in modifiers else 2 if "64" in modifiers else 1
    return 2 if "WIDE" in modifiers and number == 2 else 1


def _names(operand: str, width: int) -> list[str]:
    """Return the registers of an operand; an address in brackets has the width that it says itself."""
    found = []
    for kind, number, suffix in _REGISTER.findall(operand):
        wide = {".64": 2, ".128": 4}.get(suffix, width if "[" not in operand and kind.endswith("R") else 1)
        found += [f"{kind}{int(number) + i}" for i in range(wide)]
    return found
