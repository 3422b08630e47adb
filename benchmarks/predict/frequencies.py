"""How often each block of a kernel's machine code runs: the emulation's counts of source lines, laid on the SASS.

A loop of the SASS is the loop of the source that its jump back belongs to, by line and by the calls around it. It has
as many rounds as the emulation counted, divided by how many the compiler put into one. Code outside a loop, or in
a branch, runs as often as its lines did beside the lines around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low

from benchmarks.predict.counts import Counts, Frames, Occurrence
from benchmarks.predict.sass import Instruction, SassKernel, SassLoop, reachable

CERTAIN = frozenset(("SHFL", "HMMA", "BAR", "VOTE", "MATCH", "ATOMS", "LDGSTS"))
"""Operations of which one in the source is one in the SASS."""
CLUSTER_BARRIER = frozenset(("UCGABAR_ARV", "UCGABAR_WAIT"))
ACCESSES = frozenset(("LDG", "STG", "LDS", "STS"))
LANE_BY_LANE = "BRA.U.ANY"
"""The jump back of a loop over a warp's lanes, round an instruction whose operands are in uniform registers."""
ASKING = frozenset(("SYNCS", "CCTL", "BRA", "NOP", "YIELD"))
"""Instructions of a loop that asks an mbarrier again."""
FEWEST_TOGETHER = 3
"""Rounds that the compiler takes together unasked are four, as a rule."""


@dataclass
class Frequencies:
    """Runs of every block of a kernel, per block of threads."""

    kernel: SassKernel
    counts: Counts
    _unrolled: dict[SassLoop, int] = field(default_factory=dict)
    _rounds_of: dict[SassLoop, float] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    """Loops of the SASS of which no loop of the source is known: taken for one round."""

    @cached_property
    def runs(self) -> list[float]:
        """Return how often each block of the kernel runs, by number.

        A warp takes one of the two arms of a branch. Arms that the compiler made from the same lines have the counts of
        both: they are cut to the count of the blocks that lead to them. Of two that are versions of the same calls, one
        may never be run: its own lines say so. A barrier of a cluster has an arm for launches without clusters, which
        are not predicted.
        """
        reached = reachable(self.kernel.blocks)
        found = [self._runs(number) if number in reached else 0.0 for number in range(len(self.kernel.blocks))]
        cuts = [1.0] * len(found)
        for before, first, second in self.kernel.arms():
            both = found[first] + found[second]
            if both <= found[before]:
                continue
            idle = {arm for arm in (first, second) if self._is_idle(arm, first + second - arm)}
            in_clusters = {arm for arm in (first, second) if self._has_cluster_barrier(arm)}
            if len(in_clusters) == 1:
                idle = {first, second} - in_clusters
            for arm in (first, second):
                if len(idle) == 1:
                    cut = 0.0 if arm in idle else min(1.0, found[before] / found[arm]) if found[arm] else 1.0
                elif self._alike(first, second):
                    cut = found[before] / both
                else:
                    continue
                for number in self._behind(arm):
                    cuts[number] *= cut
        return [runs * cut for runs, cut in zip(found, cuts, strict=True)]

    def _behind(self, arm: int) -> list[int]:
        """Return the blocks that only this arm of a branch leads to."""
        return [number for number, dominators in enumerate(self.kernel.dominators) if arm in dominators]

    def _is_idle(self, arm: int, other: int) -> bool:
        """Return True if no line ran that this arm of a branch has and the other arm lacks."""
        lines, others = ({one.frames for one in self._instructions(self._behind(start))} for start in (arm, other))
        counts = [count for frames in lines - others if (count := self.counts.at(frames)) is not None]
        return bool(counts) and not any(counts)

    def _has_cluster_barrier(self, number: int) -> bool:
        return any(one.name in CLUSTER_BARRIER for one in self.kernel.blocks[number].instructions)

    @cached_property
    def _source(self) -> dict[SassLoop, Occurrence | None]:
        return {loop: self._source_of(loop) for loop in self.kernel.loops}

    def _source_of(self, loop: SassLoop) -> Occurrence | None:
        """Return the source's loop by the jump back and the code before it, else the one around most instructions."""
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
        """Return, for each place in the loop with such operations, how many the SASS has per round of the source."""
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

    def _asks_again(self, loop: SassLoop) -> bool:
        """Return True if the loop repeats a question for bytes that stands before it: the first one waits for them."""
        if not {one.name for one in self._instructions(loop.blocks)} <= ASKING:
            return False
        asked = {_outside_ptx(one.frames) for one in self._instructions(loop.blocks) if one.waits_for_bytes}
        before = self._instructions(self.kernel.dominators[loop.head] - loop.blocks)
        return any(one.waits_for_bytes and _outside_ptx(one.frames) in asked for one in before)

    def _copies(self, loop: SassLoop) -> list[SassLoop]:
        """Return the compiler's copies of the same loop of the source at the same place."""
        parent = self.kernel.parent(loop)
        return [
            one
            for one in self.kernel.loops
            if self._source[one] == self._source[loop]
            and self.kernel.parent(one) == parent
            and (one == loop or not self._asks_again(one))
        ]

    def _rounds(self, loop: SassLoop) -> float:
        """Return the rounds of a loop of the SASS, found once: many blocks ask."""
        if loop not in self._rounds_of:
            self._rounds_of[loop] = self._find_rounds(loop)
        return self._rounds_of[loop]

    def _find_rounds(self, loop: SassLoop) -> float:
        """Return the rounds of a loop of the SASS: whole rounds in its largest copy, the rest in the smaller ones.

        A warp that enters the loop is taken to have as many rounds of it as the warp with most.
        """
        occurrence = self._source[loop]
        parent = self.kernel.parent(loop)
        around = self._rounds(parent) * self.unrolled(parent) if parent else self.counts.whole
        outer = self._source[parent] if parent else None
        whole = self.counts.rounds(outer) if outer else around
        if self._asks_again(loop):
            return 0.0
        if by_lane := [one for one in self._instructions(loop.blocks) if one.opcode == LANE_BY_LANE]:
            return around * self.counts.lanes(by_lane[0].frames)
        if occurrence is None:
            self._note_unmatched(loop)
            return around
        left = self.counts.rounds(occurrence) * (min(1.0, around / whole) if whole else 0.0)
        longest = self.counts.longest(outer) if outer else 1.0
        trips = max(1.0, self.counts.longest(occurrence) / longest) if longest else 1.0
        entries = left / trips
        by_size: dict[int, list[SassLoop]] = {}
        for copy in self._copies(loop):
            by_size.setdefault(self.unrolled(copy), []).append(copy)
        for unrolled, alike in sorted(by_size.items(), reverse=True):
            is_last = unrolled == min(by_size) and not self._has_rest(loop, unrolled)
            rounds = left / unrolled if is_last else entries * (trips // unrolled)
            if loop in alike:
                return rounds / len(alike)  # versions of one loop, of which a warp takes one
            left -= rounds * unrolled
            trips %= unrolled
        raise AssertionError("a loop is among its own copies")

    def _has_rest(self, loop: SassLoop, unrolled: int) -> bool:
        """Return True if the rounds that whole ones leave over run behind the loop."""
        occurrence = self._source[loop]
        copies: frozenset[int] = frozenset().union(*(one.blocks for one in self._copies(loop)))
        parent = self.kernel.parent(loop)
        around = parent.blocks if parent else reachable(self.kernel.blocks)
        rest = sum(
            occurrence in self.counts.places.around(one.frames)
            and self.counts.places.tested_at(one.frames) != occurrence
            for one in self._instructions(around - copies)
        )
        return rest * unrolled >= 0.5 * self._own_size(loop) * (unrolled - 1) > 0

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
        first = self.kernel.together[number]
        if first == 0:
            return around
        inside = self._source[loop] if loop else None
        same = [one for one, leader in enumerate(self.kernel.together) if leader == first]
        instructions = list(self._instructions(same))
        certain = [one for one in instructions if one.name in CERTAIN]
        shares = [share for one in certain or instructions if (share := self._share(one, inside)) is not None]
        return around * (median_low(shares) if shares else 1.0)

    def _alike(self, first: int, second: int) -> bool:
        """Return True if at least a third of the two blocks' lines are the same."""
        lines = [{one.frames for one in self.kernel.blocks[number].instructions} for number in (first, second)]
        return 3 * len(lines[0] & lines[1]) >= len(lines[0] | lines[1])

    @cached_property
    def _always(self) -> dict[SassLoop, set[int]]:
        return {loop: self.kernel.always_in(loop) for loop in self.kernel.loops}

    def _share(self, instruction: Instruction, inside: Occurrence | None) -> float | None:
        """Return the share of the surrounding loop's rounds that run this instruction's line, at most all."""
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
        """Return how many copies of a loop's body outside the loop run; the loop's last rounds are done there."""
        copies = [loop for loop, source in self._source.items() if source == occurrence]
        if not copies or self.counts.places.tested_at(instruction.frames) == occurrence:
            return 1.0
        unrolled = max(self.unrolled(loop) for loop in copies)
        longest = self.counts.longest(around) if around else 1.0
        trips = self.counts.longest(occurrence) / longest if longest else 0.0
        return trips % unrolled / (unrolled - 1) if unrolled > 1 else 1.0


def _outside_ptx(frames: Frames) -> Frames:
    """Return the place in the kernels alone, without ptx.cuh and the compiler's headers.

    There the first question of a wait has other lines than the next.
    """
    return tuple(frame for frame in frames if frame[0].endswith(".cuh") and frame[0] != "ptx.cuh")
