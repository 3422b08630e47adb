"""The questions of a group as token ids, and how answers to them are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvc_trt.accuracy.grid import CHAT, PLAIN, SECOND_QUESTION, STORED_CONTEXT, QuestionGroup
from kvc_trt.errors import InputError
from kvc_trt.tasks import framing as framings
from kvc_trt.tasks.dataset import DataSet, draw_data_set
from kvc_trt.tasks.framing import Framing, Template
from kvc_trt.tasks.kinds.associative_recall import ids_of
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import Task, TaskSample, string_match_all
from kvc_trt.tasks.tokenizer import TaskTokenizer

_QUESTION_BLOCK = 8
"""A late question's room is a multiple of this, so that tasks whose questions are about as long share engines."""


@dataclass(frozen=True)
class ModelVocabulary:
    """The vocabulary of a model: its tokenizer, or token ids alone, with its chat template."""

    tokenizer: TaskTokenizer | None
    """The model's tokenizer; None for a model of token ids."""
    size: int
    template: Template | None = None
    """The model's chat template, if it has one."""

    def framing(self, name: str) -> Framing:
        """Return the framing `name`, which turns samples into token ids; InputError for chat without a template."""
        assert self.tokenizer is not None
        if name != CHAT:
            return framings.plain(self.tokenizer.tokenizer)
        return self._chat

    def framing_of(self, sample: TaskSample, name: str) -> Framing:
        """Return the framing `name` for a sample, or plain for a sample that takes no template."""
        return self.framing(name if sample.meta.get("template", True) else PLAIN)

    @cached_property
    def _chat(self) -> Framing:
        assert self.tokenizer is not None
        if self.template is None:
            raise InputError("the model has no chat template", hint="ask with the framing plain")
        return framings.chat(self.tokenizer.tokenizer, self.template)

    def decode(self, chosen: Task, ids: Sequence[int]) -> str:
        """The text of an answer."""
        if chosen.reads == "ids":
            return " ".join(map(str, ids))
        assert self.tokenizer is not None
        return str(self.tokenizer.tokenizer.decode(list(ids)))


def _never(ids: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True)
class Question:
    """One question as a model reads it."""

    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]
    """Fed through decode after compaction; empty where the prompt ends with the question."""
    target_ids: tuple[int, ...] = ()
    """The true continuation, where its likelihood is the score."""
    turn_ids: tuple[int, ...] = ()
    """Fed as a turn; the answer to it is scored. Empty: no turn."""
    answers_first: bool = True
    """True if the prompt ends with a question of its own, which is answered before the turn."""
    is_answered: Callable[[Sequence[int]], bool] = field(default=_never, compare=False)
    """True if a longer answer can no longer change the score, or may not be given."""


@dataclass(frozen=True)
class QuestionSet:
    """All questions of one group."""

    group: QuestionGroup
    task: Task
    vocabulary: ModelVocabulary
    samples: tuple[TaskSample, ...]
    questions: tuple[tuple[Question, ...], ...]
    """Per sample: one, or one per prediction that is scored where the question is fed token by token."""
    max_new_tokens: int
    """Longest answer to one question, or longest continuation."""
    digest: str

    @property
    def flat(self) -> list[Question]:
        """The questions of all samples, one after another."""
        return self.of(0, len(self.questions))

    def of(self, first: int, last: int) -> list[Question]:
        """The questions of samples first .. last - 1, one after another."""
        return [question for one in self.questions[first:last] for question in one]

    @property
    def late_tokens(self) -> int:
        """Room for a late question after the compacted cache."""
        longest = max(len(question.continuation_ids) for question in self.flat)
        return -(-longest // _QUESTION_BLOCK) * _QUESTION_BLOCK

    @property
    def turn_tokens(self) -> int:
        """Positions that a question asked as a turn takes with its answer; 0 where none is."""
        longest = max(len(question.turn_ids) for question in self.flat)
        return longest and longest + self.max_new_tokens

    @property
    def depths(self) -> tuple[float, ...]:
        """The depth of every sample's needle; empty where a sample has none or several."""
        found = [sample.meta.get("depth", sample.meta.get("depths")) for sample in self.samples]
        single = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in found]
        numbers = tuple(float(one) for one in single if isinstance(one, int | float))
        return numbers if len(numbers) == len(single) else ()

    def score(self, answers: Sequence[Sequence[int]], first: int = 0) -> tuple[float, ...]:
        """Return the score, from 0 to 1, of every sample from `first` on, given the answers to `of(first, ...)`.

        If the answers end early, so do the scores.
        """
        rate, given = self.task.score, iter(answers)
        assert rate is not None  # a task that is scored by its answers
        scores = []
        for questions, sample in zip(self.questions[first:], self.samples[first:], strict=True):
            said = [next(given, None) for _ in questions]
            if None in said:
                break
            output = " ".join(self.vocabulary.decode(self.task, ids) for ids in said if ids is not None)
            scores.append(rate(output, sample.answers))
        return tuple(scores)


def draw(
    name: str,
    length: int,
    vocabulary: ModelVocabulary,
    *,
    samples: int,
    seed: int,
    max_new_tokens: int | None,
    framing: str = PLAIN,
) -> DataSet:
    """The samples that both modes of a task are asked at one length; `max_new_tokens` None is the task's own.

    InputError where the task's shortest prompt is longer than that, or the model cannot spell it.
    """
    chosen = task(name)
    if chosen.reads == "text" and vocabulary.tokenizer is None:
        raise InputError(f"task {name} is text, and the model has no tokenizer", hint="kvc-trt tasks lists the tasks")
    if chosen.reads == "ids" and framing == CHAT:
        raise InputError(f"task {name} is token ids, which no chat template takes", hint="ask with the framing plain")
    recall = chosen.reads == "ids"
    return draw_data_set(
        chosen,
        seed=seed,
        samples=samples,
        target_tokens=length,
        tokenizer=None if recall else vocabulary.tokenizer,
        max_new_tokens=None if recall else max_new_tokens,
        options={"vocabulary_size": vocabulary.size} if recall else {},
        framing=None if recall else vocabulary.framing(framing),
    )


def ask(group: QuestionGroup, drawn: DataSet, vocabulary: ModelVocabulary, chosen: Task | None = None) -> QuestionSet:
    """The questions of a group: at the end of the prompt, or after the compacted context.

    `chosen` is the group's task; None takes the registered one of its name.
    """
    chosen = chosen or task(group.task)
    recall = chosen.reads == "ids"
    make = _recall_questions if recall else _text_question
    questions = tuple(make(chosen, sample, vocabulary, group) for sample in drawn.samples)
    return QuestionSet(
        group, chosen, vocabulary, drawn.samples, questions, 1 if recall else drawn.max_new_tokens, drawn.digest
    )


def _text_question(
    chosen: Task, sample: TaskSample, vocabulary: ModelVocabulary, group: QuestionGroup
) -> tuple[Question, ...]:
    framing, is_answered = vocabulary.framing_of(sample, group.framing), _is_answered(chosen, sample, vocabulary)
    if group.mode == SECOND_QUESTION:
        first = framing.ids(sample.first, query_aware=True)
        return (Question(first.context, (), turn_ids=framing.turn(sample), is_answered=is_answered),)
    nothing_before = not framing.texts(sample)[0]
    ids = framing.ids(sample, query_aware=group.mode == "query-aware" or nothing_before)
    if group.mode == STORED_CONTEXT:
        return (Question(ids.context, (), turn_ids=ids.question, answers_first=False, is_answered=is_answered),)
    targets = framing.continuation(sample) if chosen.scored_by == "likelihood" else ()
    return (Question(ids.context, ids.question, targets, is_answered=is_answered),)


def _is_answered(chosen: Task, sample: TaskSample, vocabulary: ModelVocabulary) -> Callable[[Sequence[int]], bool]:
    """Return the function that tells whether an answer is over before it reaches the longest length of its task."""
    longest: int | None = sample.meta.get("max_new_tokens")

    def says_all(answer: Sequence[int]) -> bool:  # and what comes after takes nothing back
        return string_match_all(vocabulary.decode(chosen, answer), sample.answers) == 1

    def is_over(answer: Sequence[int]) -> bool:
        ends = chosen.first_line and "\n" in vocabulary.decode(chosen, answer).lstrip("\n")
        return ends or longest is None or len(answer) >= longest

    if longest is not None:
        return is_over
    return says_all if chosen.score is string_match_all else _never


def _recall_questions(
    chosen: Task, sample: TaskSample, vocabulary: ModelVocabulary, group: QuestionGroup
) -> tuple[Question, ...]:
    """The question fed through decode up to each key of it, in both modes: one token is predicted at each."""
    prompt = tuple(ids_of(sample.prompt if group.mode == "query-aware" else sample.context))
    section = tuple(ids_of(sample.question))
    return tuple(Question(prompt, section[: offset + 1]) for offset in sample.meta["asked_offsets"])
