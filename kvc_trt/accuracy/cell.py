"""One cell of the grid: one policy's answers to the questions of one group, and how far its mean can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from kvc_trt.accuracy.faithfulness import Faithfulness, bootstrap_interval
from kvc_trt.accuracy.grid import PLAIN, QuestionGroup, Variant
from kvc_trt.errors import InputError, describe
from kvc_trt.tasks.task import ScoredBy
from kvc_trt.validation import validated_document

ANSWERED = 1.0
"""The score of a question that is answered: every value that was asked for."""
ENOUGH_ANSWERED = 16
"""Questions that the full cache must answer before a cell says something about a method; all, where fewer are asked."""
Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Score = Annotated[float, Field(ge=0, le=1e9)]
Depth = Annotated[float, Field(ge=0, le=1)]
_CONFIDENCE = 1.959964
"""Half the width of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class Mean:
    """The mean of `samples` scores between 0 and 1, or of their differences between -1 and 1."""

    value: float
    standard_error: float
    samples: int

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} ± {100 * self.standard_error:.1f}"


def mean(scores: Sequence[float]) -> Mean:
    """Mean and standard error: the sample's deviation, of n - 1, over sqrt(n). ValueError for no scores.

    The error of a single score, and of scores that are all alike, is 0 and says nothing; `interval` does.
    """
    count = len(scores)
    if count == 0:
        raise ValueError("scores: expected at least one, found none")
    value = math.fsum(scores) / count
    variance = math.fsum((score - value) ** 2 for score in scores) / max(1, count - 1)
    return Mean(value, math.sqrt(variance / count), count)


def interval(value: float, samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a mean of scores between 0 and 1.

    Exact enough at 0 and 1, where the standard error says nothing; for scores in between it is too wide, not too
    narrow, because no distribution on [0, 1] varies more than 0 and 1 themselves.
    """
    z2 = _CONFIDENCE**2 / samples
    centre = (value + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (value * (1 - value) + z2 / 4)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Mean:
    """First minus second over the same questions: what both find hard does not widen the error."""
    if len(first) != len(second):
        raise ValueError(f"scores: expected the same questions, found {len(first)} and {len(second)}")
    return mean([a - b for a, b in zip(first, second, strict=True)])


def on_answered(scores: Sequence[float], full: Sequence[float]) -> Mean | None:
    """A policy's accuracy on the questions that the full cache answers; None if it answers none.

    A measurement that was cut short may have more of the full cache's scores: what only one of the two has is left out.
    """
    kept = [mine for mine, theirs in zip(scores, full, strict=False) if theirs >= ANSWERED]
    return mean(kept) if kept else None


class CellKey(NamedTuple):
    """The place of a cell in the grid."""

    task: str
    mode: str
    length: int
    policy: str
    token_budget: int | None
    framing: str = PLAIN


@dataclass(frozen=True)
class Cell:
    """Plain data; one line of the results file. A cell without scores does not apply, as `reason` says."""

    task: str
    family: str
    mode: str
    length: Number
    """Tokens of prompt and answer together."""
    policy: str
    token_budget: Number | None
    seed: int
    dataset: str
    """SHA-256 of the data set that the questions come from."""
    max_new_tokens: Number
    framing: str = PLAIN
    scored_by: ScoredBy = "answer"
    scores: tuple[Score, ...] = ()
    """In the order of the questions: between 0 and 1, or negative log-likelihoods or divergences from the full cache
    per token, in nats."""
    full_scores: tuple[Score, ...] = ()
    """The full cache's, of the same questions; empty where scores are in nats."""
    equal: tuple[Depth, ...] = ()
    """If the full cache is followed: per answer, the share of its tokens that are the most likely ones here too."""
    first_differences: tuple[Number | None, ...] = ()
    """If the full cache is followed: per answer, the place of the first token that is not the most likely one; None if
    all are."""
    depths: tuple[Depth, ...] = ()
    """The depth of each question's needle, 0 at the start and 1 at the end; empty where the task has no single one."""
    executor: str = ""
    """onnxruntime, another backend, or reference (PyTorch) for policies that have no engine."""
    row_bytes: Number | None = None
    """Bytes of cache allocated for one sequence."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """The policy's parameters, resolved for this length."""
    seconds: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    reason: str = ""

    @property
    def key(self) -> CellKey:
        """The cell's place in the grid."""
        return CellKey(self.task, self.mode, self.length, self.policy, self.token_budget, self.framing)

    @property
    def group(self) -> QuestionGroup:
        """The group of questions that it answers."""
        return QuestionGroup(self.task, self.mode, self.length, self.framing)

    @property
    def samples(self) -> int:
        """The number of questions asked."""
        return len(self.scores)

    @property
    def query_aware(self) -> bool:
        """True if compaction saw the question."""
        return self.mode == "query-aware"

    @property
    def mean(self) -> Mean:
        """Accuracy, or negative log-likelihood, with its standard error; ValueError where the policy does not apply."""
        return mean(self.scores)

    @property
    def figure(self) -> str:
        """The mean as text: percent, or nats with the share of equal tokens."""
        if not self.in_nats:
            return str(self.mean)
        if self.scored_by == "faithfulness":
            low, high = bootstrap_interval(self.scores)
            equal = f"{100 * statistics.fmean(self.equal):.1f} % equal"
            return f"{self.mean.value:.4f} [{low:.4f}, {high:.4f}] nats, {equal}"
        return f"{self.mean.value:.3f} ± {self.mean.standard_error:.3f} nats"

    @property
    def in_nats(self) -> bool:
        """True if scores are likelihoods or divergences: less is better."""
        return self.scored_by in ("likelihood", "faithfulness")

    @property
    def answered_from(self) -> float:
        """The least score of a question that counts as answered: 1, or more than 0 where answers only overlap."""
        return math.nextafter(0, 1) if self.scored_by == "overlap" else ANSWERED

    def following(self, found: Sequence[Faithfulness]) -> Cell:
        """The cell with these results appended to `equal` and `first_differences`; the scores are left as they are."""
        return replace(
            self,
            equal=self.equal + tuple(round(one.equal, 6) for one in found),
            first_differences=self.first_differences + tuple(one.first_difference for one in found),
        )

    @property
    def divergence_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean divergence from the full cache, by bootstrap over the questions."""
        return bootstrap_interval(self.scores) if self.scored_by == "faithfulness" and self.scores else None

    @property
    def full_accuracy(self) -> float | None:
        """Accuracy of the full cache on the same questions; None where scores are likelihoods."""
        return mean(self.full_scores).value if self.full_scores else None

    @property
    def on_answered(self) -> Mean | None:
        """Accuracy on the questions that the full cache answers; None where there are none, or answers only overlap."""
        return None if self.scored_by == "overlap" else on_answered(self.scores, self.full_scores)

    @property
    def lost(self) -> Mean | None:
        """The full cache minus this policy, question by question; None where nothing was asked."""
        return paired_difference(self.full_scores, self.scores) if self.scores and self.full_scores else None

    @property
    def evidence(self) -> bool:
        """True if the full cache answers enough of the questions; only then does this cell count."""
        answered = sum(score >= self.answered_from for score in self.full_scores)
        return answered > 0 and answered >= min(ENOUGH_ANSWERED, len(self.full_scores))

    def to_json(self) -> dict[str, Any]:
        """Every field, and the figures that follow from the scores."""
        figures = self.mean if self.scores else None
        interval = self.divergence_interval
        return {
            **asdict(self),
            "samples": self.samples,
            "full_accuracy": self.full_accuracy,
            "accuracy": figures.value if figures and not self.in_nats else None,
            "negative_log_likelihood": figures.value if figures and self.scored_by == "likelihood" else None,
            "divergence": figures.value if figures and self.scored_by == "faithfulness" else None,
            "divergence_low": interval and interval[0],
            "divergence_high": interval and interval[1],
            "equal_tokens": statistics.fmean(self.equal) if self.equal else None,
            "standard_error": figures and figures.standard_error,
            "query_aware": self.query_aware,
            "evidence": self.evidence,
        }

    @classmethod
    def from_json(cls, stored: Any) -> Cell:
        """The cell that `to_json` wrote; InputError for anything else."""
        cell = validated_document(cls, stored, "not a cell of results")
        if (said := stored.get("samples")) != cell.samples:
            raise InputError(f"not a cell of results: {cell.samples} scores, samples is {describe(said)}")
        if not cell.in_nats and any(score > ANSWERED for score in (*cell.scores, *cell.full_scores)):
            raise InputError("not a cell of results: scores outside 0..1")
        followed = cell.samples if cell.scored_by == "faithfulness" else 0
        if any(len(found) != followed for found in (cell.equal, cell.first_differences)):
            raise InputError(f"not a cell of results: {len(cell.equal)} shares of equal tokens, expected {followed}")
        for name in ("depths", "full_scores") if cell.scores else ():
            if len(getattr(cell, name)) not in (0, cell.samples):
                raise InputError(f"not a cell of results: {len(getattr(cell, name))} {name}, {cell.samples} scores")
        return cell


def key_of(group: QuestionGroup, variant: Variant) -> CellKey:
    """The key of a cell that may not exist yet."""
    return CellKey(group.task, group.mode, group.length, variant.policy, variant.token_budget, group.framing)
