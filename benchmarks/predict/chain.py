"""The cost of one run of each block: the clocks of a warp alone on its multiprocessor, and the units that it takes.

A warp issues in order. An instruction waits until the registers that it reads are there. Blocks pass on the registers
that are still pending, by the slower of the paths that lead to the next block. The second round of a loop counts: it
finds the registers as rounds usually leave them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.predict import hardware
from benchmarks.predict.sass import Instruction, SassBlock, SassKernel, SassLoop

_REGISTER = re.compile(r"\b(U?[RP])(\d+)(\.64|\.128)?")
_WITHOUT_RESULT = frozenset(
    ("STG", "STS", "STL", "ST", "STSM", "RED", "BAR", "BRA", "EXIT", "MEMBAR", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR",
     "LDGSTS", "WARPSYNC", "NOP", "ERRBAR", "CCTL", "PREEXIT", "ACQBULK", "CALL", "RET", "YIELD", "UCGABAR_ARV",
     "UCGABAR_WAIT", "STAS")
)  # fmt: skip
_WAITS_FOR_ALL = frozenset(("DEPBAR", "ACQBULK"))
_COPY = "copy"
"""Stands in the table of registers for the pending copies of LDGSTS."""


@dataclass(frozen=True)
class BlockCost:
    """One run of a block by a warp."""

    clocks: float
    instructions: int
    units: Counter[str]
    """Turns that it takes of each unit of hardware.RATE."""


@dataclass
class _Warp:
    """A warp on its way through the kernel."""

    clock: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)

    def run(self, block: SassBlock) -> float:
        """Clocks from the block's first instruction to its last."""
        begin = self.clock
        for one in block.instructions:
            written, read = registers(one)
            waits_for = [*read, *written, *([_COPY] if one.name in _WAITS_FOR_ALL else [])]
            self.clock = max(self.clock, *(self.ready.get(name, 0.0) for name in waits_for), 0.0)
            done = self.clock + latency(one)
            if one.name in ("BAR", "MEMBAR", "WARPSYNC", "BSYNC", "UCGABAR_WAIT"):
                self.clock = done
            self.ready.update(dict.fromkeys(written, done))
            if one.name == "LDGSTS":
                self.ready[_COPY] = max(self.ready.get(_COPY, 0.0), done)
            self.clock += _issue_clocks(one)
        return self.clock - begin


def costs(kernel: SassKernel, runs: Sequence[float]) -> list[BlockCost]:
    """Return the cost of every block of the kernel; those that never run, by `runs`, are passed over."""
    walk = _Walk(kernel, runs)
    walk.through(range(len(kernel.blocks)), None)
    return [BlockCost(walk.clocks[number], *_load(block)) for number, block in enumerate(kernel.blocks)]


class _Walk:
    """A warp's way through all blocks that run, in their order."""

    def __init__(self, kernel: SassKernel, runs: Sequence[float]) -> None:
        self.clocks = [0.0] * len(kernel.blocks)
        self._kernel = kernel
        self._runs = runs
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

    def _run(self, number: int) -> None:
        entry = self._slowest(number)
        before = _Warp() if entry is None else self._left[entry]
        warp = _Warp(before.clock, dict(before.ready))
        self.clocks[number] = warp.run(self._kernel.blocks[number])
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
    if instruction.name in ("LDG", "LDGSTS", "ATOMG", "ATOM"):
        wide = instruction.name == "LDGSTS" or "128" in instruction.opcode.split(".")
        return hardware.LOADED_LATENCY * (hardware.DEVICE_LATENCY if wide else hardware.L2_LATENCY)
    if instruction.opcode == "MEMBAR.ALL.CTA":
        return hardware.BLOCK_FENCE_LATENCY
    if instruction.waits_for_bytes:
        return hardware.BYTES_LATENCY
    return hardware.LATENCY.get(instruction.name, hardware.ARITHMETIC_LATENCY)


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
