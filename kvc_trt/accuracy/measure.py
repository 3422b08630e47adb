"""The loop over the grid: every group's questions, asked of the full cache first and then of every policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from kvc_trt.accuracy.answerers import Answerer
from kvc_trt.accuracy.cell import Cell, key_of
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.model_under_test import ModelUnderTest, Room
from kvc_trt.accuracy.questions import QuestionSet, Vocabulary, ask, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.errors import InputError
from kvc_trt.models.config import longest_sequence
from kvc_trt.policies import BASELINE
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.tasks.dataset import DataSet
from kvc_trt.tasks.registry import task


@dataclass(frozen=True)
class QuestionDraw:
    """How many questions a group has, and which."""

    samples: int
    seed: int
    max_new_tokens: int | Mapping[str, int] | None = None
    """Longest answer, of every task or by name; None, and tasks not named, take the task's own."""

    def room(self, task: str) -> int | None:
        """The longest answer of one task; None is the task's own limit."""
        if isinstance(self.max_new_tokens, Mapping):
            return self.max_new_tokens.get(task)
        return self.max_new_tokens


class _DataSets:
    """Samples are drawn once per task and length, and kept while that length is asked: both modes ask the same ones."""

    def __init__(self, vocabulary: Vocabulary, draw: QuestionDraw) -> None:
        self._vocabulary, self._draw = vocabulary, draw
        self._drawn: dict[tuple[str, int], DataSet] = {}

    def of(self, group: QuestionGroup) -> DataSet:
        """The samples of a group."""
        self._drawn = {key: drawn for key, drawn in self._drawn.items() if key[1] == group.length}
        key, rule = (group.task, group.length), self._draw
        if key not in self._drawn:
            self._drawn[key] = draw(
                *key, self._vocabulary, samples=rule.samples, seed=rule.seed, max_new_tokens=rule.room(group.task)
            )
        return self._drawn[key]


@dataclass(frozen=True)
class GroupMeasurement:
    """Asks one group's questions of one policy after another."""

    model: ModelUnderTest
    questions: QuestionSet
    seed: int

    @cached_property
    def room(self) -> Room:
        """The prompt's room is the group's length without the answer, or what positions leave of it."""
        asked, positions = self.questions, self.model.config.max_position_embeddings
        new = asked.max_new_tokens + asked.late_tokens
        longest = max(len(question.prompt_ids) for question in asked.flat)
        return Room(max(longest, min(asked.group.length - asked.max_new_tokens, positions - new)), new)

    def full(self) -> Cell:
        """The full cache's cell. InputError where the model cannot be asked these questions at all."""
        variant = Variant(BASELINE, None)
        cell = self._answered(self._empty(variant, None), self.model.open(variant, self.room))
        return replace(cell, full_accuracy=cell.mean.value)

    def cell(self, variant: Variant, full: Cell) -> Cell:
        """Another policy's cell; one that has no engine of this budget says why."""
        empty = self._empty(variant, full.mean.value)
        try:
            answerer = self.model.open(variant, self.room)
        except InputError as error:
            return replace(empty, reason=error.message)
        return self._answered(empty, answerer)

    def _empty(self, variant: Variant, full_accuracy: float | None) -> Cell:
        group = self.questions.group
        return Cell(
            task=group.task,
            family=self.questions.task.family,
            mode=group.mode,
            length=group.length,
            policy=variant.policy,
            token_budget=variant.token_budget,
            seed=self.seed,
            dataset=self.questions.digest,
            max_new_tokens=self.questions.max_new_tokens,
            full_accuracy=full_accuracy,
        )

    def _answered(self, empty: Cell, answerer: Answerer) -> Cell:
        started = time.monotonic()
        answers = answerer.answer(self.questions.flat, self.questions.max_new_tokens)
        return replace(
            empty,
            scores=self.questions.score(answers),
            depths=self.questions.depths,
            executor=answerer.executor,
            row_bytes=answerer.row_bytes,
            parameters=asdict(answerer.parameters),
            seconds=round(time.monotonic() - started, 3),
        )


def measure(
    model: ModelUnderTest,
    variants: Sequence[Variant],
    groups: Sequence[QuestionGroup],
    draw: QuestionDraw,
    results: Results,
    progress: Progress | None = None,
) -> list[Cell]:
    """Every cell of the grid, in its order: read from `results`, or asked and appended to it before the next one.

    Groups that can use the same engines are asked one after another.
    `variants` begins with full. InputError for questions that cannot be asked of this model at all; a policy that has
    no engine of some budget is a cell that says why.
    """
    _check_lengths(model, groups)
    vocabulary = Vocabulary(model.tokenizer, model.config.vocab_size)
    data_sets = _DataSets(vocabulary, draw)
    unfinished = [g for g in groups if any(key_of(g, variant) not in results.cells for variant in variants)]
    missing = sum(key_of(group, variant) not in results.cells for group in unfinished for variant in variants)
    with (progress or NullProgress()).task("accuracy", missing) as advance:
        for group in sorted(unfinished, key=lambda one: (one.length, one.mode, _answer_room(one, draw))):
            asked = ask(group, data_sets.of(group), vocabulary)
            for is_new in _ask_all(GroupMeasurement(model, asked, draw.seed), variants, results):
                advance(int(is_new))
    return [results.cells[key_of(group, variant)] for group in groups for variant in variants]


def _answer_room(group: QuestionGroup, draw: QuestionDraw) -> int:
    return draw.room(group.task) or task(group.task).max_new_tokens


def _ask_all(measured: GroupMeasurement, variants: Sequence[Variant], results: Results) -> Iterable[bool]:
    """Ask what the results lack of a group, in the grid's order; for each cell, whether it was asked now."""
    group = measured.questions.group
    known = {variant: results.cells.get(key_of(group, variant)) for variant in variants}
    for cell in known.values():
        if cell is not None:
            _check_same_questions(cell, measured.questions, results)
    measured.model.announce([variant for variant in variants if known[variant] is None], measured.room)
    full = known[variants[0]] or _stored(measured.full(), results)
    yield known[variants[0]] is None
    with ThreadPoolExecutor(measured.model.workers) as pool:
        pending = {v: pool.submit(measured.cell, v, full) for v in variants[1:] if known[v] is None}
        try:
            for variant in variants[1:]:
                if variant in pending:
                    _stored(pending[variant].result(), results)
                yield variant in pending
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _stored(cell: Cell, results: Results) -> Cell:
    results.append(cell)
    return cell


def _check_lengths(model: ModelUnderTest, groups: Sequence[QuestionGroup]) -> None:
    longest, asked = longest_sequence(model.config), max(group.length for group in groups)
    if asked > longest:
        raise InputError(
            f"--lengths {asked}: the model takes at most {longest} tokens", hint=f"--lengths {longest}, or shorter"
        )


def _check_same_questions(known: Cell, asked: QuestionSet, results: Results) -> None:
    if known.dataset != asked.digest or known.max_new_tokens != asked.max_new_tokens:
        raise InputError(
            f"{results.path} holds answers to other questions: {asked.group} is data set {known.dataset[:12]} with "
            f"{known.max_new_tokens} new tokens there, {asked.digest[:12]} with {asked.max_new_tokens} here",
            hint="give another --output-dir",
        )
