"""The emulation's counts of one launch, by place: how often a line runs, and how often the body of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median

from benchmarks.predict.executions import Piece
from benchmarks.predict.sass import Frame
from benchmarks.predict.source_loops import SourceLoop, loops_of

Frames = tuple[Frame, ...]
Occurrence = tuple[SourceLoop, Frames]
"""A loop of the source at one place: the loop, and the lines of the calls that were inlined around it."""


class RowSlots:
    """The loops around a place of the source, through the calls that were inlined."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.name: path for path in folder.glob("*.cuh")}
        self._around: dict[Frames, tuple[Occurrence, ...]] = {}

    def knows(self, frames: Frames) -> bool:
        """Return True if the innermost line is a kernel's."""
        return bool(frames) and frames[0][0] in self._files

    def around(self, frames: Frames) -> tuple[Occurrence, ...]:
        """Return the loops around a place, outermost first."""
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
        """Return the innermost loop of whose test the place is a part."""
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

    places: RowSlots
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
        """Lines and counts of the pieces of each function; of a call, those that are in none of its loops."""
        found: dict[tuple[str, Frames], list[tuple[int, float]]] = {}
        for piece in self._own:
            around = self.places.around(piece.frames)
            for depth, (name, line) in enumerate(piece.frames):
                if self.places.around(piece.frames[depth:]) == around:
                    place = (name, piece.frames[depth + 1 :])
                    found.setdefault(place, []).append((line, getattr(piece, self.of)))
        return found

    @cached_property
    def _bodies(self) -> dict[SourceLoop, list[tuple[Frames, bool, Piece]]]:
        """Return each loop's own pieces, with the calls around them, and True for pieces of the loop's test."""
        found: dict[SourceLoop, list[tuple[Frames, bool, Piece]]] = {}
        for piece in self.pieces:
            around = self.places.around(piece.frames)
            if around:
                loop, calls = around[-1]
                line = piece.frames[len(piece.frames) - len(calls) - 1][1]
                in_test = loop.in_test(line) and not loop.in_test(loop.body)
                found.setdefault(loop, []).append((calls, in_test, piece))
        return found

    def lanes(self, frames: Frames) -> float:
        """Return how many lanes of a warp run a place together, for what a warp does lane by lane.

        On average over all warps; for the longest warp, the next whole number.
        """
        all_lanes, all_warps = (
            Counts(self.places, self.pieces, self.whole, of).at(frames) for of in ("lanes", "warps")
        )
        lanes = all_lanes / all_warps if all_lanes and all_warps else 1.0
        return ceil(lanes) if self.of == "longest" else lanes

    def at(self, frames: Frames) -> float | None:
        """Return how often a place runs: the count of the nearest piece before it, in the same function and call."""
        for depth in range(len(frames)):
            for end in range(len(frames), depth, -1):  # of a function that the host does not inline, no calls are known
                count = self._nearest(frames[depth:end])
                if count is not None:
                    return count
        return None

    def _nearest(self, frames: Frames) -> float | None:
        (name, line), calls = frames[0], frames[1:]
        around = self.places.around(frames)
        here: dict[int, set[float]] = {}
        for at, count in self._in_context.get((name, calls), []):
            if self.places.around(((name, at), *calls)) == around:
                here.setdefault(at, set()).add(count)
        nearest = max((at for at in here if at <= line), default=None)
        if nearest is None:
            return None
        after = min((at for at in here if at > line), default=None)
        if nearest < line and after is not None:  # behind `if (...) break;` both its test and the code after it count
            return max(here[nearest] & here[after] or here[nearest])
        return max(here[nearest])

    def rounds(self, occurrence: Occurrence) -> float:
        """Return how often the body of a loop runs."""
        return self._rounds(occurrence, self.of)

    def longest(self, occurrence: Occurrence) -> float:
        """Return how often the warp that runs the body of a loop most runs it."""
        return self._rounds(occurrence, "longest")

    def entered(self, occurrence: Occurrence, around: Occurrence | None) -> float:
        """Return how often a loop is entered per round of the one around it, or per run of the kernel; at most 1.

        That is as often as the code beside it in an inlined function. Else a warp that enters it is taken to have as
        many rounds of it as the warp with most.
        """
        whole = self.rounds(around) if around else self.whole
        beside = self._beside(occurrence)
        if beside is None:
            longest = self._rounds(around, "longest") if around else 1.0
            trips = max(1.0, self._rounds(occurrence, "longest") / longest) if longest else 1.0
            beside = self.rounds(occurrence) / trips
        return min(1.0, beside / whole) if whole else 0.0

    def _beside(self, occurrence: Occurrence) -> float | None:
        """Return the count of the nearest piece before or behind the loop, in the inlined function around it."""
        loop, calls = occurrence
        outer = [one for one, _ in self.places.around(((loop.file, loop.first), *calls))[:-1]]
        outside = {}
        for piece in self._own:
            (name, line), known = piece.frames[0], piece.frames[1:]
            around = [one for one, _ in self.places.around(piece.frames)]
            if name == loop.file and known and known == calls[: len(known)] and around == outer[-len(around) :]:
                outside[line] = getattr(piece, self.of)
        nearest = [max((at for at in outside if at < loop.first), default=None)]
        nearest.append(min((at for at in outside if at > loop.last), default=None))
        found = [outside[at] for at in nearest if at is not None]
        return max(found) if found and 0 < max(found) <= self.rounds(occurrence) else None

    def _rounds(self, occurrence: Occurrence, of: str) -> float:
        if (occurrence, of) not in self._loops:
            loop, calls = occurrence
            here = self._bodies.get(loop, [])
            same = [one for one in here if one[0] == calls[: len(one[0])]] or here
            body = [piece for _, in_test, piece in same if not in_test] or [piece for _, _, piece in same]
            own = [getattr(piece, of) for piece in body if self.places.knows(piece.frames)]
            tests = [getattr(piece, of) for _, in_test, piece in same if in_test]
            others = [getattr(piece, of) for piece in body if not self.places.knows(piece.frames)]
            direct = _agreed(own, tests)
            if others and (not direct or loop.in_test(loop.body)):  # on one line: its own pieces may be of its start
                direct = max(direct, median(others))
            self._loops[occurrence, of] = max(direct, self._rounds_by_inner(occurrence, of))
        return self._loops[occurrence, of]

    def _rounds_by_inner(self, occurrence: Occurrence, of: str) -> float:
        """Return the rounds by the loops of a constant number of rounds within: a body may consist of nothing else.

        Of a function that the host does not inline, no calls are known.
        """
        inner = set()
        for piece in self.pieces:
            around = self.places.around(piece.frames)
            for (loop, calls), within in pairwise(around):
                if loop == occurrence[0] and calls == occurrence[1][: len(calls)]:
                    inner.add(within)
        return max((self._rounds(one, of) / one[0].trips for one in inner if one[0].trips), default=0.0)


def _agreed(counts: Sequence[float], tests: Sequence[float]) -> float:
    """Return the largest count that two pieces share or that a piece of the loop's test confirms, else the largest.

    A count that only one piece has may be that of a call that its lines leave out.
    """
    repeated = [count for count in counts if count and (counts.count(count) > 1 or count in tests)]
    return max(repeated or counts, default=0.0)
