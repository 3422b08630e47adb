"""The machine code of a kernel, as nvdisasm prints it: straight blocks, their successors, loops, and source lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Frame = tuple[str, int]
"""File name and line."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\w+|\.text\.\S+|\$\S+):")
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp."""

    address: int
    opcode: str
    """The name with its modifiers: `LDG.E.128`."""
    operands: str
    predicate: str = ""
    frames: tuple[Frame, ...] = ()
    """Its place in the source: its own line, then the lines of the calls that were inlined around it."""

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def waits_for_bytes(self) -> bool:
        """True if it asks whether a phase of an mbarrier is complete, and waits a while where it is not."""
        return self.name == "SYNCS" and "PHASECHK" in self.opcode


@dataclass
class SassBlock:
    """Instructions that run one after the other, from a label or a branch to the next."""

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)
    """Blocks that may follow, by number."""

    @property
    def is_slow_path(self) -> bool:
        """True if it calls the compiler's routine for a division or a root of unusual numbers."""
        return any(one.name == "CALL" and "$__internal" in one.operands for one in self.instructions)


@dataclass(frozen=True)
class SassLoop:
    """Blocks that are run again: the one at which a round begins, those that jump back to it, and all of them."""

    head: int
    latches: frozenset[int]
    blocks: frozenset[int]


@dataclass
class SassKernel:
    """One kernel for one architecture. Subroutines behind its end (the slow path of a division) are left out."""

    symbol: str
    blocks: list[SassBlock]
    loops: list[SassLoop] = field(default_factory=list)
    """The outermost first."""
    code_bytes: int = 0

    def loop_of(self, block: int) -> SassLoop | None:
        """Return the innermost loop that the block is in."""
        return min((one for one in self.loops if block in one.blocks), key=lambda one: len(one.blocks), default=None)

    def parent(self, loop: SassLoop) -> SassLoop | None:
        """Return the smallest loop around it."""
        around = (one for one in self.loops if loop.blocks < one.blocks)
        return min(around, key=lambda one: len(one.blocks), default=None)

    @cached_property
    def dominators(self) -> list[set[int]]:
        """For each block: the blocks that are on every way to it, itself included."""
        return _dominators(self.blocks)

    @cached_property
    def together(self) -> list[int]:
        """For each block: the first of those that run exactly as often, as each way through one is through both."""
        behind = _dominators(_reversed(self.blocks))
        found = list(range(len(self.blocks)))
        for number in sorted(reachable(self.blocks), key=lambda one: len(self.dominators[one])):
            loop = self.loop_of(number)
            for one in sorted(self.dominators[number], key=lambda one: len(self.dominators[one])):
                if number + 1 in behind[one + 1] and self.loop_of(one) == loop:
                    found[number] = one
                    break
        return found

    @cached_property
    def before(self) -> list[list[int]]:
        """For each block: its predecessors."""
        return _before(self.blocks)

    def always_in(self, loop: SassLoop) -> set[int]:
        """Return the blocks that every round runs: those that dominate all its jumps back."""
        return set.intersection(*(self.dominators[latch] for latch in loop.latches)) & loop.blocks

    def arms(self) -> Iterator[tuple[int, int, int]]:
        """Yield blocks that end in a branch, and the two blocks that it decides between and nothing else leads to."""
        for number in reachable(self.blocks):
            after = self.blocks[number].next
            if len(after) == 2 and all(self.before[one] == [number] for one in after):
                yield number, after[0], after[1]


def sections(text: str) -> dict[str, str]:
    """Return the part of each kernel, by symbol, of an output of `nvdisasm --print-line-info-inline`."""
    found = re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]
    return {part.split(",", 1)[0].strip().strip('"'): part for part in found}


def parse(symbol: str, section: str) -> SassKernel:
    """Return the kernel of one section."""
    return _kernel(symbol, section.splitlines())


def _kernel(symbol: str, lines: Iterable[str]) -> SassKernel:
    blocks = [SassBlock("")]
    frames: list[Frame] = []
    fresh = True  # whether the next line comment begins a new place
    code_bytes, in_subroutine = 0, False
    for line in lines:
        if match := _LABEL.match(line):
            in_subroutine = in_subroutine or match.group(1).startswith("$")
            if not in_subroutine:
                blocks.append(SassBlock(match.group(1)))
        elif match := _LINE.search(line):
            if fresh:
                frames, fresh = [], False
            frames.append((match.group(1).rpartition("/")[2], int(match.group(2))))
        elif match := _INSTRUCTION.match(line):
            fresh = True
            address = int(match.group(1), 16)
            code_bytes = max(code_bytes, address + INSTRUCTION_BYTES)
            if in_subroutine:
                continue
            instruction = Instruction(address, match.group(3), match.group(4), match.group(2) or "", tuple(frames))
            blocks[-1].instructions.append(instruction)
            if _ends_block(instruction):
                blocks.append(SassBlock(""))
    kernel = SassKernel(symbol, _linked(blocks), code_bytes=code_bytes)
    kernel.loops = _loops(kernel.blocks)
    return kernel


def _ends_block(instruction: Instruction) -> bool:
    return instruction.name in ("BRA", "EXIT", "RET", "BSYNC", "BRX", "JMP")


def _linked(blocks: Sequence[SassBlock]) -> list[SassBlock]:
    """Return the blocks that have instructions, linked to their successors. Behind the end, the code loops for ever."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    full: list[SassBlock] = []
    for block in blocks:
        if block.label:
            waiting.append(block.label)
        if block.instructions:
            labels.update(dict.fromkeys(waiting, len(full)))
            waiting = []
            full.append(block)
    reconvergence: dict[str, str] = {}
    for number, block in enumerate(full):
        for instruction in block.instructions:
            if instruction.name == "BSSY" and (match := _TARGET.search(instruction.operands)):
                reconvergence[instruction.operands.split(",")[0].strip()] = match.group(1)
        last = block.instructions[-1]
        target = None
        if last.name == "BRA" and (match := _TARGET.search(last.operands)):
            target = labels.get(match.group(1))
        elif last.name == "BSYNC":
            target = labels.get(reconvergence.get(last.operands.strip(), ""))
        conditional = bool(last.predicate) or bool(re.search(r"\bU?P\d", last.operands))
        if last.opcode.startswith("BRA.DIV"):  # where a warp that has diverged does a shuffle lane by lane: never here
            target, conditional = None, True
        falls = not _ends_block(last) or conditional or (last.name, target) == ("BSYNC", None)
        block.next = [number + 1] if falls and number + 1 < len(full) else []
        if target is not None and target not in block.next and (target != number or conditional):
            block.next.append(target)
    return full


def reachable(blocks: Sequence[SassBlock]) -> set[int]:
    """Return the blocks that a warp can get to."""
    found, open_ends = set(), [0]
    while open_ends:
        number = open_ends.pop()
        if number not in found:
            found.add(number)
            open_ends += blocks[number].next
    return found


def _before(blocks: Sequence[SassBlock]) -> list[list[int]]:
    """Return the predecessors of each block."""
    found: list[list[int]] = [[] for _ in blocks]
    for number in reachable(blocks):
        for after in blocks[number].next:
            found[after].append(number)
    return found


def _reversed(blocks: Sequence[SassBlock]) -> list[SassBlock]:
    """Return the graph with every edge reversed, and a new block 0 that leads to the old ends."""
    reached = reachable(blocks)
    ends = [number + 1 for number in sorted(reached) if not blocks[number].next]
    before = _before(blocks)
    return [SassBlock("", next=ends), *(SassBlock("", next=[one + 1 for one in ones]) for ones in before)]


def _dominators(blocks: Sequence[SassBlock]) -> list[set[int]]:
    """Return, for each block, the blocks that are on every way to it, itself included."""
    before, reached = _before(blocks), reachable(blocks)
    found = [{0}] + [set(reached) for _ in blocks[1:]]
    changed = True
    while changed:
        changed = False
        for number in sorted(reached - {0}):
            new = set.intersection(*(found[one] for one in before[number])) | {number}
            if new != found[number]:
                found[number], changed = new, True
    return found


def _loops(blocks: Sequence[SassBlock]) -> list[SassLoop]:
    dominators, before = _dominators(blocks), _before(blocks)
    latches: dict[int, set[int]] = {}
    for number in reachable(blocks):
        for after in blocks[number].next:
            if after in dominators[number]:
                latches.setdefault(after, set()).add(number)
    loops = []
    for head, ends in latches.items():
        inside, open_ends = {head}, [end for end in ends if end != head]
        while open_ends:
            number = open_ends.pop()
            if number not in inside:
                inside.add(number)
                open_ends += before[number]
        loops.append(SassLoop(head, frozenset(ends), frozenset(inside)))
    return sorted(loops, key=lambda one: -len(one.blocks))
