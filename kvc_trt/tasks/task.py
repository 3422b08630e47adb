"""A task: a pure generator of questions about long contexts, and how answers are scored.

A file of this package that defines `TASKS`, a tuple of these, adds tasks: `registry` finds it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from kvc_trt.errors import InputError, did_you_mean

Encode = Callable[[str], list[int]]
"""The token ids of a whole prompt, with the tokenizer's start tokens."""
Score = Callable[[str, Sequence[str]], float]
"""A function that returns the score of an output, from 0 to 1, given the reference answers."""
Reads = Literal["text", "ids"]
ScoredBy = Literal["answer", "overlap", "likelihood", "faithfulness"]
_OPTION_TYPES: dict[type, str] = {float: "a number", int: "a whole number", str: "a word"}


@dataclass(frozen=True)
class TaskSample:
    """One question about one context.

    Query-aware, the prompt is context and question: the window that decides which tokens are kept has seen the
    question. Query-agnostic, the prompt is the context alone, and the question is fed through decode after compaction.
    `context` ends where the question begins, and `question` ends with the prefix of the answer, if the task has one.
    `framing` adds the text of a chat template around them.
    """

    task: str
    seed: int
    index: int
    context: str
    question: str
    answers: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict)  # JSON values: the depth, the length, the key or name asked for

    @property
    def prompt(self) -> str:
        """The query-aware prompt."""
        return self.context + self.question

    @property
    def answer_prefix(self) -> str:
        """The end of `question` that is the answer's beginning, with the white space before it.

        It is the text after the question mark, or the last line of a question that is an instruction; a sample whose
        `meta` names it has that one.
        """
        if (named := self.meta.get("answer_prefix")) is not None:
            return str(named)
        asked = self.question.rfind("?") + 1 or self.question.rfind("\n")
        return self.question[asked:] if asked > 0 else ""

    @property
    def first(self) -> TaskSample:
        """The context with the question that is asked before this one, for a task that asks twice."""
        asked = self.meta["first"]
        return replace(self, question=asked["question"], answers=tuple(asked["answers"]), meta={})


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


@dataclass(frozen=True)
class Task:
    """A generator and how its answers are scored.

    Scored by its answer, a sample is answered greedily and `score` rates the text. Scored by likelihood, nothing is
    generated: the one reference is the true continuation of the prompt, its tokens are fed through decode one by one
    (teacher-forced) after the prompt was compacted, and the score is the mean of their negative log-likelihoods in nats
    (`likelihood.mean_negative_log_likelihood`): lower is better, 0 is perfect, and `score` is None.

    `max_new_tokens` is the number that the originals generate, and that a continuation never exceeds; a model that ends
    its answers sooner needs less. A task that reads `ids` is written as decimal token ids between spaces, needs no
    tokenizer, and takes the option `vocabulary_size`.
    """

    name: str
    family: str
    summary: str
    max_new_tokens: int
    generate: Generate | None
    """None for questions that come from a file."""
    score: Score | None
    """None for a task of which no answer is scored as text: by likelihood, or by faithfulness."""
    scored: str
    """A description of the score."""
    reads: Reads = "text"
    options: Mapping[str, type] = field(default_factory=dict)
    """Arguments of `generate` beyond those of every task, with their types."""
    asks_twice: bool = False
    """True if samples have a question that can be asked before theirs (`TaskSample.first`)."""
    basis: ScoredBy | None = None
    """The basis of the score where `score` does not tell; `scored_by` is it, or follows from `score`."""
    first_line: bool = False
    """True if only an answer's first line counts."""

    @property
    def scored_by(self) -> ScoredBy:
        """The basis of a score.

        A generated answer, right or wrong; its overlap with a right one; the likelihood of the right one; or how
        closely a compressed cache follows the whole one's own answer.
        """
        if self.basis is not None:
            return self.basis
        return "likelihood" if self.score is None else "answer"

    def sample(
        self,
        *,
        seed: int,
        index: int,
        target_tokens: int,
        encode: Encode,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> TaskSample:
        """Sample `index` of a generated task, under options; `max_new_tokens` None is the task's own."""
        for name, value in options.items():
            self._check_option(name, value)
        generate: Any = self.generate  # which options it takes is known from `options`, not from its type
        sample: TaskSample = generate(
            seed=seed,
            index=index,
            target_tokens=target_tokens,
            encode=encode,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            **options,
        )
        return sample

    def _check_option(self, name: str, value: object) -> None:
        if name not in self.options:
            raise InputError(
                f"task {self.name} has no option {name!r}{did_you_mean(name, self.options)}",
                hint=f"options: {', '.join(self.options)}" if self.options else None,
            )
        kind = self.options[name]
        accepted = (int, float) if kind is float else (kind,)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise InputError(f"task {self.name}: {name} is {value!r}, expected {_OPTION_TYPES[kind]}")


def first_question(question: str, answers: Sequence[str]) -> dict[str, Any]:
    """Fields of `meta` about the question that can be asked before a sample's own."""
    return {"first": {"question": question, "answers": list(answers)}}


def sample_rng(stream: str, seed: int, index: int) -> np.random.Generator:
    """A generator that depends on nothing but its arguments; streams of different names never overlap."""
    digest = hashlib.sha256(f"{stream}/{seed}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def string_match_all(output: str, answers: Sequence[str]) -> float:
    """The share of references that the output contains, ignoring case: RULER's score of its synthetic tasks."""
    said = output.lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def last_integer(output: str, answers: Sequence[str]) -> float:
    """1 if the last integer of the output is the reference: LongEval's score of its lines."""
    found = re.findall(r"\d+", output)
    return float(bool(found) and found[-1].lstrip("0") in {answer.strip().lstrip("0") for answer in answers})


def position_match(output: str, answers: Sequence[str]) -> float:
    """The share of positions whose word is the reference's, for answers that are token ids in order."""
    return sum(said == answer for said, answer in zip(output.split(), answers, strict=False)) / len(answers)


MATCH_ALL = "share of the references that the answer contains"
"""`string_match_all` in words."""
