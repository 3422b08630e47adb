"""How often each block of a kernel's machine code runs: the emulation's counts of source lines, laid on the SASS.

A loop of the SASS is the loop of the source that its jump back belongs to, by line and by the calls around it. It has
as many rounds as the emulation counted, divided by how many the compiler put into one. Code outside a loop, or in
a branch, runs as often as its lines did beside the lines around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from benchmarks.predict.executions import Piece
from benchmarks.predict.sass import Frame, Instruction, SassKernel, SassLoop, reachable
from benchmarks.predict.source_loops import SourceLoop, loops_of

CERTAIN = frozenset(("SHFL", "HMMA", "BAR", "VOTE", "MATCH", "ATOMS", "LDGSTS"))
"""Operations of which one in the source is one in the SASS."""
ACCESSES = frozenset(("LDG", "STG", "LDS", "STS"))
FEWEST_TOGETHER = 3
"""Rounds that the compiler takes together unasked are four, as a rule."""
Frames = tuple[Frame, ...]
Occurrence = tuple[SourceLoop, Frames]
"""A loop of the source at one place: the loop, and the lines of the calls that were inlined around it."""


class Places:
    """The loops around a place of the source, through the calls that were inlined."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.name: path for path in folder.glob("*.cuh")}
        self._around: dict[Frames, tuple[Occurrence, ...]] = {}

    def knows(self, frames: Frames) -> bool:
        """Whether the innermost line is a kernel's."""
        return bool(frames) and frames[0][0] in self._files

    def around(self, frames: Frames) -> tuple[Occurrence, ...]:
        """The outermost loop first."""
        if frames not in self._around:
            self._around[frames] = self._find_around(frames)
        return self._around[frames]

    def _find_around(self, frames: Frames) -> tuple[Occurrence, ...]:
        found: list[Occurrence] = []
        for depth in range(len(frames) - 1, -1, -1):
            name, line = frames[depth]
            if name in self._files:
                loops = (loop for loop in loops_of(self._files[name]) if loop.encloses(line))
                found += [(loop, frames[depth + 1 :]) for loop in loops]
        return tuple(found)

    def tested_at(self, frames: Frames) -> Occurrence | None:
        """The innermost loop of whose test the place is a part."""
        for depth, (name, line) in enumerate(frames):
            if name in self._files:
                loops = [loop for loop in loops_of(self._files[name]) if loop.in_test(line)]
                if loops:
                    return loops[-1], frames[depth + 1 :]
        return None


@dataclass
class Counts:
    """The pieces of one launch, asked by place. `of` is Piece.warps or Piece.longest.

    Pieces of the emulation's own headers count only where there are no others: the calls around them are not always
    said in full.
    """

    places: Places
    pieces: Sequence[Piece]
    whole: float
    """Warps of a block; 1 where one warp counts."""
    of: str
    _loops: dict[tuple[Occurrence, str], float] = field(default_factory=dict)

    @cached_property
    def _own(self) -> list[Piece]:
        return [piece for piece in self.pieces if self.places.knows(piece.frames)]

    @cached_property
    def _in_context(self) -> dict[tuple[str, Frames], list[tuple[int, float]]]:
        found: dict[tuple[str, Frames], list[tuple[int, float]]] = {}
        for piece in self._own:
            for depth, (name, line) in enumerate(piece.frames):
                place = (name, piece.frames[depth + 1 :])
                found.setdefault(place, []).append((line, getattr(piece, self.of)))
        return found

    @cached_property
    def _bodies(self) -> dict[SourceLoop, list[tuple[Frames, bool, Piece]]]:
        """Of each loop: the pieces directly in it, with the calls around, and whether a piece is of its test."""
        found: dict[SourceLoop, list[tuple[Frames, bool, Piece]]] = {}
        for piece in self.pieces:
            around = self.places.around(piece.frames)
            if around:
                loop, calls = around[-1]
                line = piece.frames[len(piece.frames) - len(calls) - 1][1]
                in_test = loop.in_test(line) and not loop.in_test(loop.body)
                found.setdefault(loop, []).append((calls, in_test, piece))
        return found

    def at(self, frames: Frames) -> float | None:
        """How often this place is run: the count of the nearest piece before it, in the same function and call."""
        for depth in range(len(frames)):
            for end in range(len(frames), depth, -1):  # of a function that the host does not inline, no calls are known
                count = self._nearest(frames[depth:end])
                if count is not None:
                    return count
        return None

    def _nearest(self, frames: Frames) -> float | None:
        (name, line), calls = frames[0], frames[1:]
        around = self.places.around(frames)
        before = [
            (at, count)
            for at, count in self._in_context.get((name, calls), [])
            if at <= line and self.places.around(((name, at), *calls)) == around
        ]
        nearest = max((at for at, _ in before), default=0)
        return max((count for at, count in before if at == nearest), default=None)

    def rounds(self, occurrence: Occurrence) -> float:
        """How often the body of a loop is run."""
        return self._rounds(occurrence, self.of)

    def longest(self, occurrence: Occurrence) -> float:
        """The same by the warp that runs it most."""
        return self._rounds(occurrence, "longest")

    def entered(self, occurrence: Occurrence, around: Occurrence | None) -> float:
        """How often a loop is entered for each round of the one around it, or for each run of the kernel; at most 1.

        A warp that enters it is taken to have as many rounds of it as the warp with most.
        """
        whole = self.rounds(around) if around else self.whole
        longest = self._rounds(around, "longest") if around else 1.0
        trips = max(1.0, self._rounds(occurrence, "longest") / longest) if longest else 1.0
        return min(1.0, self.rounds(occurrence) / trips / whole) if whole else 0.0

    def _rounds(self, occurrence: Occurrence, of: str) -> float:
        if (occurrence, of) not in self._loops:
            loop, calls = occurrence
            here = self._bodies.get(loop, [])
            same = [one for one in here if one[0] == calls[: len(one[0])]] or here
            body = [piece for _, in_test, piece in same if not in_test] or [piece for _, _, piece in same]
            own = [getattr(piece, of) for piece in body if self.places.knows(piece.frames)]
            others = [getattr(piece, of) for piece in body if not self.places.knows(piece.frames)]
            direct = _agreed(own) or (median(others) if others else 0.0)
            self._loops[occurrence, of] = max(direct, self._rounds_by_inner(occurrence, of))
        return self._loops[occurrence, of]

    def _rounds_by_inner(self, occurrence: Occurrence, of: str) -> float:
        """The same from the loops of a constant number of rounds within it: a body may consist of nothing else."""
        inner = {
            around[place + 1]
            for piece in self.pieces
            if occurrence in (around := self.places.around(piece.frames))
            and (place := around.index(occurrence)) + 1 < len(around)
        }
        return max((self._rounds(one, of) / one[0].trips for one in inner if one[0].trips), default=0.0)


def _agreed(counts: Sequence[float]) -> float:
    """The largest count that two pieces have, else the largest: one alone may be of a call that its lines leave out."""
    repeated = [count for count in counts if count and counts.count(count) > 1]
    return max(repeated or counts, default=0.0)


@dataclass
class Frequencies:
    """Runs of every block of a kernel, per block of threads."""

    kernel: SassKernel
    counts: Counts
    _unrolled: dict[SassLoop, int] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    """Loops of the SASS of which no loop of the source is known: taken for one round."""

    @cached_property
    def runs(self) -> list[float]:
        """Of each block of the kernel, by number.

        A warp takes one of the two arms of a branch. Arms that the compiler made from the same lines have the counts of
        both: they are cut to what leads to them.
        """
        reached = reachable(self.kernel.blocks)
        found = [self._runs(number) if number in reached else 0.0 for number in range(len(self.kernel.blocks))]
        cuts = [1.0] * len(found)
        for before, first, second in self.kernel.arms():
            both = found[first] + found[second]
            if both > found[before] and self._alike(first, second):
                for number, dominators in enumerate(self.kernel.dominators):
                    if dominators & {first, second}:
                        cuts[number] *= found[before] / both
        return [runs * cut for runs, cut in zip(found, cuts, strict=True)]

    @cached_property
    def _source(self) -> dict[SassLoop, Occurrence | None]:
        return {loop: self._source_of(loop) for loop in self.kernel.loops}

    def _source_of(self, loop: SassLoop) -> Occurrence | None:
        """By the jump back and what is computed before it; else by what most instructions of the loop are inside."""
        for latch in sorted(loop.latches):
            for instruction in reversed(self.kernel.blocks[latch].instructions):
                found = self.counts.places.tested_at(instruction.frames)
                if found is not None and self._mostly_inside(loop, found):
                    return found
        votes: dict[Occurrence, int] = {}
        instructions = list(self._instructions(loop.blocks))
        for instruction in instructions:
            for occurrence in self.counts.places.around(instruction.frames):
                votes[occurrence] = votes.get(occurrence, 0) + 1
        common = [one for one, number in votes.items() if number >= 0.8 * len(instructions)]
        return max(common, key=lambda one: (len(one[1]), one[0].first), default=None)

    def _mostly_inside(self, loop: SassLoop, occurrence: Occurrence) -> bool:
        instructions = list(self._instructions(loop.blocks))
        inside = sum(occurrence in self.counts.places.around(one.frames) for one in instructions)
        return 2 * inside >= len(instructions)

    def _instructions(self, numbers: Iterable[int]) -> Iterable[Instruction]:
        return (one for number in numbers for one in self.kernel.blocks[number].instructions)

    def _own_size(self, loop: SassLoop) -> int:
        """Instructions of the loop that are in no loop within it."""
        inner = [one.blocks for one in self.kernel.loops if one.blocks < loop.blocks]
        return sum(1 for _ in self._instructions(loop.blocks - frozenset().union(*inner)))

    def unrolled(self, loop: SassLoop) -> int:
        """Rounds of the source in one of the SASS.

        As the source asks, for the largest of the loop's copies. Where it does not ask, the compiler takes together
        rounds of innermost loops alone: counted by operations that it neither merges nor splits, else by accesses to
        memory, of which a line may have two, else by the copies' sizes.
        """
        if loop not in self._unrolled:
            self._unrolled[loop] = self._find_unrolled(loop)
        return self._unrolled[loop]

    def _find_unrolled(self, loop: SassLoop) -> int:
        occurrence = self._source[loop]
        if occurrence is None:
            return 1
        asked = occurrence[0].unroll
        sizes = {one: self._own_size(one) for one in self._copies(loop)}
        if asked and (asked == 1 or 1.5 * sizes[loop] > max(sizes.values())):
            return asked
        if any(one.blocks < loop.blocks for one in self.kernel.loops):
            return 1
        if certain := self._operations_in_round(loop, occurrence, CERTAIN):
            return max(1, round(min(certain)))
        if len(sizes) > 1:
            return max(1, round(sizes[loop] / min(sizes.values())))
        accesses = self._operations_in_round(loop, occurrence, ACCESSES)
        return round(min(accesses)) if accesses and min(accesses) >= FEWEST_TOGETHER else 1

    def _operations_in_round(self, loop: SassLoop, occurrence: Occurrence, names: frozenset[str]) -> list[float]:
        """Of each place in the loop with such operations: how many a round of the SASS has for one of the source's."""
        inner = [one.blocks for one in self.kernel.loops if one.blocks < loop.blocks]
        found: dict[tuple[str, Frames], int] = {}
        for instruction in self._instructions(loop.blocks - frozenset().union(*inner)):
            if instruction.name in names and occurrence in self.counts.places.around(instruction.frames):
                place = (instruction.name, instruction.frames)
                found[place] = found.get(place, 0) + 1
        rounds = self.counts.longest(occurrence)
        ratios = []
        for (_, frames), number in found.items():
            innermost = self.counts.longest(self.counts.places.around(frames)[-1])
            if rounds and innermost:
                ratios.append(number * rounds / innermost)
        return ratios

    def _copies(self, loop: SassLoop) -> list[SassLoop]:
        """What the compiler made of the same loop of the source at the same place."""
        parent = self.kernel.parent(loop)
        return [
            one
            for one in self.kernel.loops
            if self._source[one] == self._source[loop] and self.kernel.parent(one) == parent
        ]

    def _rounds(self, loop: SassLoop) -> float:
        """Of a loop of the SASS: whole rounds in its largest copy, the rest in the smaller ones."""
        occurrence = self._source[loop]
        parent = self.kernel.parent(loop)
        around = self._rounds(parent) * self.unrolled(parent) if parent else self.counts.whole
        outer = self._source[parent] if parent else None
        whole = self.counts.rounds(outer) if outer else around
        if occurrence is None:
            self._note_unmatched(loop)
            return around
        left = self.counts.rounds(occurrence) * (min(1.0, around / whole) if whole else 0.0)
        entries = min(left, around)
        by_size: dict[int, list[SassLoop]] = {}
        for copy in self._copies(loop):
            by_size.setdefault(self.unrolled(copy), []).append(copy)
        for unrolled, alike in sorted(by_size.items(), reverse=True):
            is_last = unrolled == min(by_size)
            rounds = left / unrolled if is_last or not entries else entries * (left / entries // unrolled)
            if loop in alike:
                return rounds / len(alike)  # versions of one loop, of which a warp takes one
            left -= rounds * unrolled
        raise AssertionError("a loop is among its own copies")

    def _note_unmatched(self, loop: SassLoop) -> None:
        places = [one.frames[0] for one in self.kernel.blocks[loop.head].instructions if one.frames]
        text = f"{places[0][0]}:{places[0][1]}" if places else f"block {loop.head}"
        if text not in self.unmatched:
            self.unmatched.append(text)

    def _runs(self, number: int) -> float:
        block = self.kernel.blocks[number]
        if block.is_slow_path:
            return 0.0
        loop = self.kernel.loop_of(number)
        around = self._rounds(loop) if loop else self.counts.whole
        if loop and number in self._always[loop]:
            return around
        inside = self._source[loop] if loop else None
        shares = [share for one in block.instructions if (share := self._share(one, inside)) is not None]
        return around * (median(shares) if shares else 1.0)

    def _alike(self, first: int, second: int) -> bool:
        """Whether two blocks come from the same lines for a good part."""
        lines = [{one.frames for one in self.kernel.blocks[number].instructions} for number in (first, second)]
        return 3 * len(lines[0] & lines[1]) >= len(lines[0] | lines[1])

    @cached_property
    def _always(self) -> dict[SassLoop, set[int]]:
        return {loop: self.kernel.always_in(loop) for loop in self.kernel.loops}

    def _share(self, instruction: Instruction, inside: Occurrence | None) -> float | None:
        """How many of the rounds around it run this instruction's line, at most all."""
        count = self.counts.at(instruction.frames)
        if count is None:
            return None
        around = self.counts.places.around(instruction.frames)
        outer = inside if inside in around else None
        share = 1.0
        for occurrence in around[around.index(outer) + 1 if outer else 0 :]:  # loops that the compiler took apart
            share *= self.counts.entered(occurrence, outer) * self._left_over(occurrence, outer, instruction)
            outer = occurrence
        whole = self.counts.rounds(outer) if outer else self.counts.whole
        return share * (min(1.0, count / whole) if whole else 0.0)

    def _left_over(self, occurrence: Occurrence, around: Occurrence | None, instruction: Instruction) -> float:
        """Of a loop's body outside the loop itself, where its last rounds are done: how many of those copies run."""
        copies = [loop for loop, source in self._source.items() if source == occurrence]
        if not copies or self.counts.places.tested_at(instruction.frames) == occurrence:
            return 1.0
        unrolled = max(self.unrolled(loop) for loop in copies)
        longest = self.counts.longest(around) if around else 1.0
        trips = self.counts.longest(occurrence) / longest if longest else 0.0
        return trips % unrolled / (unrolled - 1) if unrolled > 1 else 1.0
