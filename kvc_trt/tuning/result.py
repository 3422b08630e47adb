"""The result of a run: every candidate with its figures, the recommendation, and the meaning of both in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvc_trt.accuracy.cell import mean
from kvc_trt.accuracy.faithfulness import bootstrap_interval
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.config import BuildConfig
from kvc_trt.machine import machine_record
from kvc_trt.sizes import readable_size
from kvc_trt.tuning.candidates import Candidate, Candidates
from kvc_trt.tuning.differences import FEWEST
from kvc_trt.tuning.recommendation import HalfChoice, Recommendation, front, on_halves, recommend
from kvc_trt.tuning.request import TuneRequest
from kvc_trt.tuning.rounds import Standing
from kvc_trt.tuning.step_times import StepTimes

if TYPE_CHECKING:
    from kvc_trt.accuracy.under_test.policy_engines import ChosenModel

_MIB = 1 << 20
_NAMED = 4
"""Candidates that a finding names; the table has all."""


@dataclass(frozen=True)
class Line:
    """One candidate in the tables and figures. Qualities are shares, or nats where the whole cache is followed."""

    candidate: Candidate
    number: int
    """Its number in figures and tables: the choice, then the finalists by quality."""
    prompts: int
    quality: float | None
    """Mean over the prompts that it was asked: a share, or nats of divergence below zero."""
    low: float | None
    high: float | None
    lost: tuple[float, float, float] | None
    """Against the whole cache on the same prompts, with the 95 % interval."""
    equal: float | None
    step_seconds: float | None
    place: str
    """chosen, alike (not significantly different from the best), behind (asked everything, and worse), dropped,
    unfinished or left out."""
    why: str
    """In words, with the candidate for which it was dropped."""
    on_front: bool

    @property
    def mebibytes(self) -> float:
        """MiB of one row."""
        return self.candidate.row_bytes / _MIB

    @property
    def finalist(self) -> bool:
        """True if it was asked every prompt of the last round."""
        return self.place in ("chosen", "alike", "behind")


@dataclass(frozen=True)
class Tuned:
    """Everything that a run found."""

    asked: TuneRequest
    chosen_model: ChosenModel
    room: Room
    settings: Mapping[str, Any]
    found: Candidates
    state: Standing
    times: StepTimes | None
    seconds: float

    @property
    def model(self) -> str:
        """The model's name."""
        return self.chosen_model.choice.name

    @property
    def labelled(self) -> bool:
        """True if right answers are known."""
        return self.state.prompts.labelled

    @property
    def prompts(self) -> int:
        """The prompts that the choice rests on."""
        return self.state.rounds[-1].prompts if self.state.rounds else 0

    @property
    def finished(self) -> bool:
        """True if the last candidates were asked every prompt of the file."""
        return self.state.finished

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """The choice; None before the first round is over."""
        finalists = self.state.finalists
        if finalists is None:
            return None
        return recommend(finalists, self.whole, self.asked.maximum_loss if self.labelled
                         else self.asked.maximum_divergence)  # fmt: skip

    @property
    def whole(self) -> list[float]:
        """The whole cache's quality on the prompts that the choice rests on."""
        return self.state.whole(self.prompts)

    @cached_property
    def whole_answers(self) -> bool:
        """True if the whole cache answers anything, so that there is something to lose."""
        return not self.labelled or any(self.whole)

    @property
    def good_enough(self) -> bool:
        """True if there is a choice without a significant loss, or with a loss that is allowed."""
        return self.recommendation is not None and self.recommendation.good_enough and self.whole_answers

    @cached_property
    def halves(self) -> tuple[HalfChoice, HalfChoice] | None:
        """Choices on either half of the prompts among the finalists, looked at on the other half."""
        finalists = self.state.finalists
        return None if finalists is None else on_halves(finalists)

    @property
    def build(self) -> BuildConfig | None:
        """The build of the chosen engine, with the weights and the backend that were measured; None without one."""
        if self.recommendation is None:
            return None
        config = self.chosen_model.build(self.recommendation.chosen.variant, self.room)
        described = self.chosen_model.describe()
        added = {"weights": described["weights"], "backend": described["backend"], "max_batch_size": self.asked.rows}
        return config.model_copy(update=added)

    @cached_property
    def lines(self) -> list[Line]:
        """All candidates: the choice, the finalists by quality, those that were dropped, the latest first, the rest."""
        finalists = self.state.finalists
        on_front = set(front(finalists)) if finalists is not None else set()
        fates = {one: self._fate(one) for one in self.found.fitting}
        order = {"chosen": 0, "alike": 1, "behind": 1, "dropped": 2, "unfinished": 3, "left out": 4}

        def rank(one: Candidate) -> tuple[float, ...]:
            values = self.state.of(one)
            late = -len(values) if fates[one][0] == "dropped" else 0
            return order[fates[one][0]], late, -_mean(values), one.row_bytes

        ranked = sorted(self.found.fitting, key=rank)
        return [self._line(number, one, *fates[one], one in on_front) for number, one in enumerate(ranked, 1)]

    def _fate(self, one: Candidate) -> tuple[str, str]:
        """Return how far a candidate came, and why no further."""
        best, finalists = self.recommendation, self.state.finalists
        if best is not None and finalists is not None and one in finalists.by_name:
            if one == best.chosen:
                return "chosen", ""
            if one in best.alike:
                return "alike", f"not distinguishable from {best.best}"
            return "behind", f"worse than {best.best}"
        for number, found in enumerate(self.state.rounds, 1):
            if one in found.dropped:
                return "dropped", f"after round {number}, for {found.dropped[one]}"
        if reason := self.state.reason(one):
            return "left out", reason
        if one not in self.state.candidates:
            return "left out", f"a step takes longer than {self.asked.max_step_ms:g} ms"
        return "unfinished", "the run ended before"

    def _line(self, number: int, one: Candidate, place: str, why: str, on_front: bool) -> Line:
        values = self.state.of(one)
        whole = self.state.whole(len(values))
        count = min(len(values), len(whole))
        lost = None
        if count:
            differences = [a - b for a, b in zip(whole, values[:count], strict=False)]
            lost = mean(differences).value, *bootstrap_interval(differences)
        low, high = bootstrap_interval(values) if values else (None, None)
        return Line(
            candidate=one, number=number, prompts=len(values), quality=_mean(values) if values else None, low=low,
            high=high, lost=lost, equal=self.state.equal(one),
            step_seconds=None if self.times is None else self.times.of(one), place=place, why=why, on_front=on_front,
        )  # fmt: skip

    def line_of(self, candidate: Candidate) -> Line:
        """The line of one candidate."""
        return next(line for line in self.lines if line.candidate == candidate)

    def quality_text(self, value: float) -> str:
        """A quality in words."""
        return f"{100 * value:.1f} %" if self.labelled else f"{-value:.4f} nats per token"

    def loss_text(self, lost: tuple[float, float, float]) -> str:
        """A loss and its interval in words."""
        if not self.labelled:
            return f"{lost[0]:.4f} nats per token [{lost[1]:.4f}, {lost[2]:.4f}]"
        return f"{100 * lost[0]:.1f} points [{100 * lost[1]:.1f}, {100 * lost[2]:.1f}]"

    def findings(self) -> Iterator[str]:
        """Yield the findings of the run, the most important first; each is a sentence."""
        best = self.recommendation
        if best is None:
            yield "No round is over yet, so there is nothing to choose from: run the same command to continue."
            return
        line, rows = self.line_of(best.chosen), self.asked.rows
        assert line.quality is not None
        assert best.lost is not None
        each, total = readable_size(best.chosen.row_bytes), readable_size(rows * best.chosen.row_bytes)
        if not self.whole_answers:
            yield (
                f"The whole cache answers none of these {self.prompts} prompts, so they cannot decide between "
                "candidates."
            )
            return
        if self.good_enough:
            variant = best.chosen.variant
            budget = "" if variant.token_budget is None else f" with a token budget of {variant.token_budget:,}"
            of_all = f", {total} for {rows} rows" if rows > 1 else ""
            yield f"Take {variant.policy}{budget}: {each} a row{of_all}."
        else:
            yield (
                f"No candidate is good enough in {readable_size(self.asked.row_limit)} a row: the choice among them, "
                f"{best.chosen}, loses {self.loss_text(best.lost)} against the whole cache."
            )
        whole = _mean(self.whole)
        if self.labelled:
            yield (
                f"It answers {self.quality_text(line.quality)} of {self.prompts} prompts, the whole cache "
                f"{self.quality_text(whole)}: it loses {self.loss_text(best.lost)} (95 % interval)."
            )
        else:
            equal = f", and {100 * line.equal:.1f} % of its most likely tokens are the same" if line.equal else ""
            yield (
                f"Along the whole cache's own answers to {self.prompts} prompts it diverges by "
                f"{self.loss_text(best.lost)}{equal}."
            )
        yield from self._comparison(best)
        yield from self._halves()
        if not self.finished:
            yield (
                f"Not all prompts were asked: this rests on {self.prompts} of {len(self.state.prompts.names)}; "
                "run the same command to continue."
            )
        if self.labelled and not any(best.lost):
            unseen = 100 * (1 - 0.05 ** (1 / self.prompts))
            yield (
                f"No prompt tells it from the whole cache, so the interval has no width; {self.prompts} prompts do not "
                f"show a difference in fewer than about {unseen:.0f} % of prompts."
            )
        if self.prompts < FEWEST:
            yield f"Fewer than {FEWEST} prompts cannot tell any two candidates apart."

    def _comparison(self, best: Recommendation) -> Iterator[str]:
        others = [one for one in best.alike if one != best.chosen]
        if best.best == best.chosen:
            yield "No other candidate has a better mean."
        else:
            size, better = readable_size(best.best.row_bytes), self.loss_text(best.behind)
            yield (
                f"The best mean is that of {best.best} with {size} a row: better by {better}. That is within one "
                "standard error, so the two are not distinguishable, and the smaller one is taken."
            )
        if others:
            named = ", ".join(str(one) for one in others[:_NAMED])
            more = f" and {len(others) - _NAMED} larger ones" if len(others) > _NAMED else ""
            yield f"Not distinguishable from the best on {self.prompts} prompts: {named}{more}."
        yield (
            f"In {100 * best.confidence:.0f} % of resamples of the prompts no candidate of at most its bytes is better."
        )

    def _halves(self) -> Iterator[str]:
        if self.halves is None:
            return
        for own, other, half in zip(("first", "second"), ("second", "first"), self.halves, strict=True):
            found = "is the best there too"
            if half.chosen != half.best_of_other:
                told = "not distinguishable from" if half.holds else "worse than"
                found = f"is {told} {half.best_of_other}, which is better by {self.loss_text(half.behind)} there"
            yield f"Chosen on every second prompt ({own} half) and asked the others ({other}): {half.chosen} {found}."

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON holds it; sizes in bytes, times in seconds."""
        best = self.recommendation
        return {
            "model": self.model,
            "settings": dict(self.settings),
            "machine": machine_record(),
            "seconds": round(self.seconds, 1),
            "memory_bytes": int(self.asked.memory),
            "rows": self.asked.rows,
            "row_limit_bytes": self.asked.row_limit,
            "max_step_ms": self.asked.max_step_ms,
            "max_input_len": self.room.max_input_len,
            "max_output_len": self.room.max_output_len,
            "quality": "share of right answers" if self.labelled else "nats of divergence, below zero",
            "prompts": self.prompts,
            "finished": self.finished,
            "good_enough": self.good_enough,
            "findings": list(self.findings()),
            "step_times": None if self.times is None else {"how": self.times.how, "rows": self.times.rows},
            "whole": {"quality": _mean(self.whole) if self.prompts else None, "scores": self.whole},
            "recommendation": None if best is None else _recommendation(best),
            "build": None if self.build is None else self.build.stored(),
            "halves": None if self.halves is None else [_half(one) for one in self.halves],
            "rounds": [{"prompts": one.prompts, "stayed": [str(each) for each in one.stayed],
                        "dropped": {str(each): str(other) for each, other in one.dropped.items()}}
                       for one in self.state.rounds],
            "candidates": [{**_candidate(line), "scores": self.state.of(line.candidate)} for line in self.lines],
            "refused": dict(self.found.refused),
        }  # fmt: skip


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("-inf")


def _recommendation(best: Recommendation) -> dict[str, Any]:
    return {
        "chosen": str(best.chosen),
        "row_bytes": best.chosen.row_bytes,
        "best": str(best.best),
        "not_distinguishable": [str(one) for one in best.alike],
        "behind_best": list(best.behind),
        "confidence": best.confidence,
        "lost_against_whole": best.lost,
    }


def _half(half: HalfChoice) -> dict[str, Any]:
    return {"chosen": str(half.chosen), "best_of_other_half": str(half.best_of_other), "behind": list(half.behind)}


def _candidate(line: Line) -> dict[str, Any]:
    found = asdict(line)
    variant = found.pop("candidate")["variant"]
    return {"candidate": str(line.candidate), **variant, "row_bytes": line.candidate.row_bytes, **found}
