"""One cell of the grid: what one policy answered to the questions of one group, and how far its mean can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from kvc_trt.accuracy.grid import PLAIN, QuestionGroup, Variant
from kvc_trt.errors import InputError
from kvc_trt.policies import BASELINE
from kvc_trt.tasks.task import ScoredBy

EVIDENCE = 0.99
"""Accuracy of the full cache from which a cell says something about the method: a loss is then the method's."""

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
    """Mean and standard error; for scores of 0 and 1 the binomial sqrt(p (1 - p) / n). ValueError for no scores."""
    count = len(scores)
    if count == 0:
        raise ValueError("scores: expected at least one, found none")
    value = math.fsum(scores) / count
    variance = math.fsum((score - value) ** 2 for score in scores) / count
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
    length: int
    """Tokens of prompt and answer together."""
    policy: str
    token_budget: int | None
    seed: int
    dataset: str
    """SHA-256 of the data set that the questions come from."""
    max_new_tokens: int
    framing: str = PLAIN
    scored_by: ScoredBy = "answer"
    full_accuracy: float | None = None
    """Accuracy of the full cache on the same questions; None where scores are likelihoods."""
    scores: tuple[float, ...] = ()
    """In the order of the questions: between 0 and 1, or negative log-likelihoods per token in nats."""
    depths: tuple[float, ...] = ()
    """The depth of each question's needle, 0 at the start and 1 at the end; empty where the task has no single one."""
    executor: str = ""
    """onnxruntime, another backend, or reference (PyTorch) for policies that have no engine."""
    row_bytes: int | None = None
    """Bytes of cache allocated for one sequence."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """The policy's parameters, resolved for this length."""
    seconds: float = 0.0
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
        """How many questions were asked."""
        return len(self.scores)

    @property
    def query_aware(self) -> bool:
        """Whether compaction saw the question."""
        return self.mode == "query-aware"

    @property
    def mean(self) -> Mean:
        """Accuracy, or negative log-likelihood, with its standard error; ValueError where the policy does not apply."""
        return mean(self.scores)

    @property
    def figure(self) -> str:
        """The mean in words: percent, or nats."""
        if self.scored_by == "answer":
            return str(self.mean)
        return f"{self.mean.value:.3f} ± {self.mean.standard_error:.3f} nats"

    @property
    def evidence(self) -> bool:
        """Whether the full cache answers nearly everything; only then does this cell count."""
        if self.scored_by != "answer":
            return False
        if self.policy == BASELINE:
            return bool(self.scores) and self.mean.value >= EVIDENCE
        return self.full_accuracy is not None and self.full_accuracy >= EVIDENCE

    def to_json(self) -> dict[str, Any]:
        """Every field, and the figures that follow from the scores."""
        figures = self.mean if self.scores else None
        return {
            **asdict(self),
            "samples": self.samples,
            "accuracy": figures.value if figures and self.scored_by == "answer" else None,
            "negative_log_likelihood": figures.value if figures and self.scored_by == "likelihood" else None,
            "standard_error": figures and figures.standard_error,
            "query_aware": self.query_aware,
            "evidence": self.evidence,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Cell:
        """The cell that `to_json` wrote; InputError for anything else."""
        known = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        try:
            cell = cls(**{**known, "scores": tuple(known["scores"]), "depths": tuple(known["depths"])})
            highest = 1 if cell.scored_by == "answer" else math.inf
            if not all(0 <= score <= highest for score in cell.scores):
                raise ValueError(f"scores outside 0..{highest}")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a cell of results: {error}") from error
        return cell


def key_of(group: QuestionGroup, variant: Variant) -> CellKey:
    """The key of a cell that may not exist yet."""
    return CellKey(group.task, group.mode, group.length, variant.policy, variant.token_budget, group.framing)
