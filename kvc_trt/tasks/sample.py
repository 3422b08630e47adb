"""What a generator of the task suite returns, and what it needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Encode = Callable[[str], list[int]]
"""The token ids of a whole prompt, with what the tokenizer puts in front of one."""


@dataclass(frozen=True)
class TaskSample:
    """One question about one context.

    Query-aware, the prompt is context and question: the window that decides what is kept has seen the question.
    Query-agnostic, the prompt is the context alone, and the question is fed through decode after compaction. `context`
    ends where the question begins, and `question` ends with the prefix of the answer, if the task has one.
    """

    task: str
    seed: int
    index: int
    context: str
    question: str
    answers: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)  # JSON values: the depth, the length, what was asked

    @property
    def prompt(self) -> str:
        """The query-aware prompt."""
        return self.context + self.question


class Generate(Protocol):
    """A pure generator: equal arguments give equal samples, in any order and on any machine."""

    def __call__(
        self,
        *,
        seed: int,
        index: int,
        target_tokens: int,
        encode: Encode,
        max_new_tokens: int = ...,
    ) -> TaskSample:
        """Sample `index`, as long as tokens(prompt) + max_new_tokens <= target_tokens allows.

        InputError if the shortest prompt of the task is longer than that. Options of one task have defaults.
        """
