"""The rounds of a run: ask some prompts of every candidate that is left, narrow these down, and ask more prompts.

The scores known so far are in the results of `kvc_trt.accuracy`, answer by answer, so a run that was stopped goes on
where it was: rounds whose answers are known are judged again from the file, which gives the same candidates as before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvc_trt.accuracy.cell import Cell, CellKey, key_of
from kvc_trt.accuracy.grid import QuestionGroup, Variant, question_groups
from kvc_trt.accuracy.measure import lacking, measure
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.under_test.model_under_test import ModelUnderTest
from kvc_trt.policies import BASELINE
from kvc_trt.progress import Advance, Progress
from kvc_trt.tuning.candidates import Candidate
from kvc_trt.tuning.differences import Qualities
from kvc_trt.tuning.halving import SHARE, Round, narrowed, rounds
from kvc_trt.tuning.prompts import OrderedPrompts

WHOLE = Variant(BASELINE, None)
"""The cache that candidates are compared with, whether a row of it fits or not."""
MODE = "query-aware"


@dataclass(frozen=True)
class Standing:
    """The answers of all candidates after some rounds."""

    prompts: OrderedPrompts
    candidates: tuple[Candidate, ...]
    """All of them."""
    cells: Mapping[CellKey, Cell]
    groups: tuple[QuestionGroup, ...]
    rounds: tuple[Round, ...]
    """The rounds that are over."""

    @property
    def left(self) -> tuple[Candidate, ...]:
        """The candidates that go on after the last round that is over, the best first."""
        return self.rounds[-1].stayed if self.rounds else self.candidates

    @property
    def finished(self) -> bool:
        """True if those that are left were asked every prompt."""
        return bool(self.rounds) and self.rounds[-1].prompts == len(self.prompts.names)

    @property
    def finalists(self) -> Qualities[Candidate] | None:
        """The candidates of the last round that is over, with their qualities; None before there is one."""
        if not self.rounds:
            return None
        before = self.rounds[-2].stayed if len(self.rounds) > 1 else self.candidates
        return self._qualities(before, self.rounds[-1].prompts)

    def whole(self, count: int) -> list[float]:
        """The whole cache's quality on the first `count` prompts."""
        return self._of(WHOLE)[:count]

    def of(self, candidate: Candidate) -> list[float]:
        """A candidate's quality on the prompts that it was asked: more is better."""
        return self._of(candidate.variant)

    def equal(self, candidate: Candidate) -> float | None:
        """The share of equal most likely tokens, where the whole cache is followed."""
        shares = self._numbers(candidate.variant, lambda cell: cell.equal)
        return sum(shares) / len(shares) if shares else None

    def reason(self, candidate: Candidate) -> str:
        """Return the reason why a candidate could not be asked; empty if it could."""
        found = (self.cells.get(key_of(group, candidate.variant)) for group in self.groups)
        return next((cell.reason for cell in found if cell is not None and cell.reason), "")

    def narrowed(self, count: int) -> Round | None:
        """Return the round that the first `count` prompts decide; None where some answer is missing."""
        able = [one for one in self.left if not self.reason(one)]
        found = self._qualities(able, count)
        return None if found is None else narrowed(found)

    def _qualities(self, some: Sequence[Candidate], count: int) -> Qualities[Candidate] | None:
        by_name = {one: self.of(one)[:count] for one in some if not self.reason(one)}
        if not by_name or any(len(values) < count for values in [*by_name.values(), self.whole(count)]):
            return None
        return Qualities(by_name)

    def _of(self, variant: Variant) -> list[float]:
        sign = 1.0 if self.prompts.labelled else -1.0
        return [sign * score for score in self._numbers(variant, lambda cell: cell.scores)]

    def _numbers(self, variant: Variant, field: Callable[[Cell], Sequence[float]]) -> list[float]:
        """The numbers of one field in the order of the prompts, up to the first that is not known."""
        by_set = {group.task: self.cells.get(key_of(group, variant)) for group in self.groups}
        found = []
        for name, place in self.prompts.places:
            cell = by_set[name]
            if cell is None or len(values := field(cell)) <= place:
                break
            found.append(float(values[place]))
        return found


def groups_of(prompts: OrderedPrompts, length: int, framing: str) -> tuple[QuestionGroup, ...]:
    """The sets as groups of one length."""
    return tuple(question_groups([prompts.task(name) for name in prompts.sets], [length], (MODE,), (framing,)))


def known(
    prompts: OrderedPrompts, candidates: Sequence[Candidate], groups: Sequence[QuestionGroup], results: Results
) -> Standing:
    """The standing by the results, with every round that is over judged."""
    asked = Standing(prompts, tuple(candidates), results.cells, tuple(groups), ())
    for count in rounds(len(prompts.names)):
        if (found := asked.narrowed(count)) is None:
            break
        asked = Standing(prompts, asked.candidates, results.cells, asked.groups, (*asked.rounds, found))
    return asked


def ask(
    model: ModelUnderTest,
    asked: Standing,
    results: Results,
    progress: Progress,
    *,
    until: float | None,
    after_round: Callable[[Standing], object],
) -> Standing:
    """Ask the remaining rounds, until the time is over; `after_round` gets the standing after each."""
    counts = list(rounds(len(asked.prompts.names)))
    pace = _Pace()
    for number, count in enumerate(counts, 1):
        if number <= len(asked.rounds):
            continue
        if until is not None and time.monotonic() >= until:
            break
        some = [one for one in asked.left if not asked.reason(one)]
        progress.note(
            f"round {number} of {len(counts)}: {len(some)} candidates on the first {count} prompts"
            f"{pace.left(len(some), counts[number - 2] if number > 1 else 0, counts[number - 1 :])}"
        )
        variants = list(dict.fromkeys([WHOLE, *(one.variant for one in some)]))
        prompts = asked.prompts.first(count)
        answers = sum(map(sum, lacking(variants, asked.groups, prompts, results).values()))
        within = _Round(progress, f"round {number} of {len(counts)}", pace, answers)
        measure(model, variants, asked.groups, prompts, results, within, until=until)
        now = known(asked.prompts, asked.candidates, asked.groups, results)
        if len(now.rounds) < number:
            break
        asked = now
        after_round(asked)
    return known(asked.prompts, asked.candidates, asked.groups, results)


class _Pace:
    """The average time of an answer, with its share of reading the prompt."""

    def __init__(self) -> None:
        self.answers, self.seconds = 0.0, 0.0

    def left(self, candidates: int, before: int, counts: Sequence[int]) -> str:
        """Say how long all rounds from here on take if half of the candidates stay each time."""
        if not self.answers:
            return ""
        answers = 0.0
        for count in counts:
            answers += (candidates + 1) * (count - before)
            before, candidates = count, max(1, round(SHARE * candidates))
        seconds = answers * self.seconds / self.answers
        return f"; about {seconds / 60:.0f} min left" if seconds >= 100 else f"; about {seconds:.0f} s left"


class _Round:
    """The progress of one round under its own name; it also measures the pace."""

    def __init__(self, outer: Progress, name: str, pace: _Pace, answers: int) -> None:
        self._outer, self._name, self._pace, self._answers = outer, name, pace, answers

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        started = time.monotonic()
        with self._outer.task(self._name, total) as advance:

            def counted(amount: int) -> None:
                self._pace.answers += self._answers * amount / total if total else 0.0
                advance(amount)

            try:
                yield counted
            finally:
                self._pace.seconds += time.monotonic() - started

    def note(self, message: str) -> None:
        self._outer.note(message)
