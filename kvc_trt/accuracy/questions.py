"""The questions of a group as token ids, and how answers to them are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvc_trt.accuracy.grid import QuestionGroup
from kvc_trt.errors import InputError
from kvc_trt.tasks.associative_recall import ids_of
from kvc_trt.tasks.dataset import DataSet, draw_data_set
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer

_QUESTION_BLOCK = 8
"""A late question's room is a multiple of this, so that tasks whose questions are about as long share engines."""


@dataclass(frozen=True)
class Vocabulary:
    """How a model reads text or token ids."""

    tokenizer: TaskTokenizer | None
    """The model's tokenizer; None for a model of token ids."""
    size: int

    def encode(self, chosen: Task, text: str, *, continues: bool = False) -> tuple[int, ...]:
        """Ids of a whole prompt, with what the tokenizer puts before one unless it continues another."""
        if chosen.reads == "ids":
            return tuple(ids_of(text))
        assert self.tokenizer is not None
        return tuple(self.tokenizer.tokenizer.encode(text, add_special_tokens=not continues).ids)

    def decode(self, chosen: Task, ids: Sequence[int]) -> str:
        """The text of an answer."""
        if chosen.reads == "ids":
            return " ".join(map(str, ids))
        assert self.tokenizer is not None
        return str(self.tokenizer.tokenizer.decode(list(ids)))


@dataclass(frozen=True)
class Question:
    """One question as a model reads it."""

    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    """Fed through decode after compaction; empty where the prompt ends with the question."""


@dataclass(frozen=True)
class QuestionSet:
    """All questions of one group."""

    group: QuestionGroup
    task: Task
    vocabulary: Vocabulary
    samples: tuple[TaskSample, ...]
    questions: tuple[tuple[Question, ...], ...]
    """Per sample: one, or one per prediction that is scored where the question is fed token by token."""
    max_new_tokens: int
    """Longest answer to one question."""
    digest: str

    @property
    def flat(self) -> list[Question]:
        """The questions of all samples, one after another."""
        return [question for one in self.questions for question in one]

    @property
    def late_tokens(self) -> int:
        """Room for a late question after the compacted cache."""
        longest = max(len(question.continuation_ids) for question in self.flat)
        return -(-longest // _QUESTION_BLOCK) * _QUESTION_BLOCK

    @property
    def depths(self) -> tuple[float, ...]:
        """The depth of every sample's needle; empty where a sample has none or several."""
        found = [sample.meta.get("depth", sample.meta.get("depths")) for sample in self.samples]
        single = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in found]
        numbers = tuple(float(one) for one in single if isinstance(one, int | float))
        return numbers if len(numbers) == len(single) else ()

    def score(self, answers: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """How well the answers to `flat` answer each sample, 0..1."""
        rate, rest = self.task.score, iter(answers)
        assert rate is not None  # `draw` refuses what is not scored by its answers
        outputs = [" ".join(self.vocabulary.decode(self.task, next(rest)) for _ in one) for one in self.questions]
        pairs = zip(outputs, self.samples, strict=True)
        return tuple(rate(output, sample.answers) for output, sample in pairs)


def draw(
    name: str, length: int, vocabulary: Vocabulary, *, samples: int, seed: int, max_new_tokens: int | None
) -> DataSet:
    """The samples that both modes of a task are asked at one length; `max_new_tokens` None is the task's own.

    InputError where the task's shortest prompt is longer than that, or the model cannot spell it.
    """
    chosen = task(name)
    if chosen.reads == "text" and vocabulary.tokenizer is None:
        raise InputError(f"task {name} is text, and the model has no tokenizer", hint="kvc-trt tasks lists the tasks")
    if chosen.scored_by != "answer":
        raise InputError(f"task {name} is scored by {chosen.scored_by}, expected one that is scored by its answers")
    recall = chosen.reads == "ids"
    return draw_data_set(
        chosen,
        seed=seed,
        samples=samples,
        target_tokens=length,
        tokenizer=None if recall else vocabulary.tokenizer,
        max_new_tokens=None if recall else max_new_tokens,
        options={"vocabulary_size": vocabulary.size} if recall else {},
    )


def ask(group: QuestionGroup, drawn: DataSet, vocabulary: Vocabulary) -> QuestionSet:
    """The questions of a group: at the end of the prompt, or after the compacted context."""
    chosen = task(group.task)
    recall = chosen.reads == "ids"
    make = _recall_questions if recall else _text_question
    questions = tuple(make(chosen, sample, vocabulary, group) for sample in drawn.samples)
    return QuestionSet(
        group, chosen, vocabulary, drawn.samples, questions, 1 if recall else drawn.max_new_tokens, drawn.digest
    )


def _text_question(
    chosen: Task, sample: TaskSample, vocabulary: Vocabulary, group: QuestionGroup
) -> tuple[Question, ...]:
    if group.mode == "query-aware":
        return (Question(vocabulary.encode(chosen, sample.prompt), ()),)
    late = vocabulary.encode(chosen, sample.question, continues=True)
    return (Question(vocabulary.encode(chosen, sample.context), late),)


def _recall_questions(
    chosen: Task, sample: TaskSample, vocabulary: Vocabulary, group: QuestionGroup
) -> tuple[Question, ...]:
    """The question fed through decode up to each key of it, in both modes: one token is predicted at each."""
    aware = group.mode == "query-aware"
    prompt = vocabulary.encode(chosen, sample.prompt if aware else sample.context)
    section = vocabulary.encode(chosen, sample.question, continues=True)
    return tuple(Question(prompt, section[: offset + 1]) for offset in sample.meta["asked_offsets"])
