"""The questions of verification, independent of the words that they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvc_trt.tasks.kinds.key_value import Placement

PLACEMENTS: dict[Placement, str] = {"in_prompt": "query in the prompt", "after_compaction": "query after compaction"}


@dataclass(frozen=True)
class Question:
    """One question as it is fed."""

    prompt_ids: tuple[int, ...]
    query_ids: tuple[int, ...]
    """Fed through decode after the prompt; empty where the prompt ends with the query."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one placement at one length, and their right answers."""

    questions: Sequence[Question]
    new_tokens: int
    """Tokens that are generated for an answer."""
    is_right: Callable[[int, Sequence[int]], bool]
    """Checks if these tokens answer the question of that number."""
    about: str
    """The task, its length and its seed, for the stored report."""

    @property
    def room(self) -> int:
        """Tokens that a late query and its answer need after the prompt."""
        return self.new_tokens + max(len(question.query_ids) for question in self.questions)

    def accuracy(self, answers: Sequence[Sequence[int]]) -> Accuracy:
        """Share of right answers; they come in the order of the questions."""
        right = sum(self.is_right(number, answer) for number, answer in enumerate(answers))
        return Accuracy(right, len(self.questions))


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers among `samples`."""

    right: int
    samples: int

    @property
    def rate(self) -> float:
        """The share itself, between 0 and 1."""
        return self.right / self.samples

    @property
    def standard_error(self) -> float:
        """The rate's binomial standard error."""
        return math.sqrt(self.rate * (1 - self.rate) / self.samples)

    def __str__(self) -> str:
        return f"{self.rate:.1%} ± {self.standard_error:.1%}"


class Wording(Protocol):
    """Questions in a vocabulary that the model has."""

    @property
    def name(self) -> str:
        """The task and how it is asked, in a few words."""

    @property
    def prompt_text(self) -> str:
        """The source of prompts that are continued, in a few words."""

    @property
    def is_text(self) -> bool:
        """True if questions are sentences, which need longer prompts than a vocabulary made for the task."""

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """A prompt of exactly each length, to be continued: not a question of the rung."""

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> QuestionSet:
        """Questions about a context of `context` tokens, the query included where it is in the prompt."""
