"""The questions of verification, independent of their wording."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvc_trt.tasks.kinds.key_value import Placement

PLACEMENTS: dict[Placement, str] = {"in_prompt": "query in the prompt", "after_compaction": "query after compaction"}


@dataclass(frozen=True)
class TokenQuestion:
    """One question as token ids."""

    prompt_ids: tuple[int, ...]
    query_ids: tuple[int, ...]
    """The tokens of a late query, which are fed through decode after the prompt; empty if the prompt has the query."""


@dataclass(frozen=True)
class PlacedQuestions:
    """Questions of one placement at one length, and their right answers."""

    questions: Sequence[TokenQuestion]
    new_tokens: int
    """The number of tokens that are generated for an answer."""
    is_right: Callable[[int, Sequence[int]], bool]
    """Return whether given tokens answer the question with the given number."""
    about: str
    """The task, its length and its seed, for the stored report."""

    @property
    def room(self) -> int:
        """The number of tokens that a late query and its answer take after the prompt."""
        return self.new_tokens + max(len(question.query_ids) for question in self.questions)

    def accuracy(self, answers: Sequence[Sequence[int]]) -> Accuracy:
        """Return the share of right answers, which are in the order of the questions."""
        right = sum(self.is_right(number, answer) for number, answer in enumerate(answers))
        return Accuracy(right, len(self.questions))


@dataclass(frozen=True)
class Accuracy:
    """The number of right answers among `samples`."""

    right: int
    samples: int

    @property
    def rate(self) -> float:
        """The share of right answers, between 0 and 1."""
        return self.right / self.samples

    @property
    def standard_error(self) -> float:
        """The rate's binomial standard error."""
        return math.sqrt(self.rate * (1 - self.rate) / self.samples)

    def __str__(self) -> str:
        return f"{self.rate:.1%} ± {self.standard_error:.1%}"


class Wording(Protocol):
    """A source of questions and prompts in a vocabulary that the model has."""

    @property
    def name(self) -> str:
        """The task and the form of its questions, in a few words."""

    @property
    def prompt_text(self) -> str:
        """The source of the prompts that the model continues, in a few words."""

    @property
    def is_text(self) -> bool:
        """True if questions are sentences, which need longer prompts than a vocabulary made for the task."""

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Return a prompt of exactly each length for the model to continue; these are not questions to be answered."""

    def ask(self, *, context: int, placement: Placement, samples: int, seed: int) -> PlacedQuestions:
        """Return questions with contexts of `context` tokens, which include the query if it is in the prompt."""
