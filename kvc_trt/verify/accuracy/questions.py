"""The questions of a group as token ids, and the digest that says which they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.verify.accuracy.grid import Group
from kvc_trt.verify.tasks.registry import Task, task
from kvc_trt.verify.tasks.sample import TaskSample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_QUESTION_BLOCK = 8
"""A late question's room is a multiple of this, so that tasks whose questions are about as long share engines."""


@dataclass(frozen=True)
class Question:
    """One sample as a model reads it."""

    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    """Fed through decode after compaction; empty where the prompt ends with the question."""


@dataclass(frozen=True)
class Reader:
    """How text becomes ids and back."""

    encode: Callable[[str], list[int]]
    """A whole prompt, with what the tokenizer puts in front of one."""
    encode_more: Callable[[str], list[int]]
    """Text that continues a prompt."""
    decode: Callable[[Sequence[int]], str]
    vocabulary_size: int


@dataclass(frozen=True)
class QuestionSet:
    """All questions of one group."""

    group: Group
    task: Task
    reader: Reader
    samples: tuple[TaskSample, ...]
    questions: tuple[tuple[Question, ...], ...]
    """Per sample: one, or one per prediction that is scored where the question is fed token by token."""
    max_new_tokens: int
    """Of one question."""
    digest: str

    @property
    def flat(self) -> list[Question]:
        """The questions of all samples behind one another."""
        return [question for one in self.questions for question in one]

    @property
    def late_tokens(self) -> int:
        """Room for a late question behind the compacted cache."""
        longest = max(len(question.continuation_ids) for question in self.flat)
        return -(-longest // _QUESTION_BLOCK) * _QUESTION_BLOCK

    @property
    def depths(self) -> tuple[float, ...]:
        """The depth of every sample's needle; empty where a sample has none or several."""
        found = [sample.meta.get("depth", sample.meta.get("depths")) for sample in self.samples]
        single = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in found]
        return tuple(map(float, single)) if all(isinstance(one, int | float) for one in single) else ()

    def score(self, answers: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """How well the answers to `flat` answer each sample, 0..1."""
        rest = iter(answers)
        outputs = [" ".join(self.reader.decode(next(rest)) for _ in one) for one in self.questions]
        pairs = zip(outputs, self.samples, strict=True)
        return tuple(self.task.score(output, sample.answers) for output, sample in pairs)


def ask(
    group: Group, reader: Reader, *, samples: int, seed: int, max_new_tokens: int | None = None
) -> QuestionSet:
    """The first `samples` samples of a group's task; both modes of a task are asked the same ones.

    `max_new_tokens` None is the task's own. InputError where the task's shortest prompt is longer than the group's
    length, or the tokenizer cannot spell an answer.
    """
    chosen = task(group.task)
    recall = chosen.reads == "ids"
    room = chosen.max_new_tokens if recall or max_new_tokens is None else max_new_tokens
    options = {"vocabulary_size": reader.vocabulary_size} if recall else {}
    drawn = tuple(
        chosen.sample(
            seed=seed,
            index=index,
            target_tokens=group.length,
            encode=reader.encode,
            max_new_tokens=room,
            **options,
        )
        for index in range(samples)
    )
    for sample in drawn:
        _check_spelling(sample, reader)
    questions = tuple(_recalled(sample, reader, group) if recall else _asked(sample, reader, group) for sample in drawn)
    return QuestionSet(group, chosen, reader, drawn, questions, 1 if recall else room, _digest(drawn))


def _asked(sample: TaskSample, reader: Reader, group: Group) -> tuple[Question]:
    """The question at the end of the prompt, or behind the compacted context."""
    if group.mode == "query-aware":
        return (Question(tuple(reader.encode(sample.prompt)), ()),)
    return (Question(tuple(reader.encode(sample.context)), tuple(reader.encode_more(sample.question))),)


def _recalled(sample: TaskSample, reader: Reader, group: Group) -> tuple[Question, ...]:
    """The question fed through decode up to each key of it, in both modes: one token is predicted at each."""
    prompt = reader.encode(sample.prompt if group.mode == "query-aware" else sample.context)
    section = reader.encode_more(sample.question)
    return tuple(Question(tuple(prompt), tuple(section[: offset + 1])) for offset in sample.meta["asked_offsets"])


def reader_for(chosen: Task, tokenizer: Tokenizer | None, vocabulary_size: int) -> Reader:
    """The tokenizer's, or decimal ids for a task that is written in them. InputError for a model without words."""
    if chosen.reads == "ids":
        return Reader(_read_ids, _read_ids, lambda ids: " ".join(map(str, ids)), vocabulary_size)
    if tokenizer is None:
        raise InputError(f"task {chosen.name} is text, and the model has no tokenizer")
    if tokenizer.get_vocab_size() == 0:
        raise InputError(f"task {chosen.name} is text, and the model's tokenizer has an empty vocabulary")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    def encode_more(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return Reader(encode, encode_more, lambda ids: str(tokenizer.decode(list(ids))), vocabulary_size)


def _read_ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _check_spelling(sample: TaskSample, reader: Reader) -> None:
    """An answer that the tokenizer cannot write can never be given: that is no loss of any policy."""
    for answer in sample.answers:
        spelt = reader.decode(reader.encode_more(answer))
        if answer.lower() not in spelt.lower():
            raise InputError(
                f"task {sample.task}: the model's tokenizer cannot spell the answer {answer!r}, it reads {spelt!r}",
                hint="take a task whose words the tokenizer knows, or another model",
            )


def _digest(samples: Sequence[TaskSample]) -> str:
    lines = [json.dumps(asdict(sample), sort_keys=True, ensure_ascii=False) for sample in samples]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
