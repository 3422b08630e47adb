"""The loop over the grid: every group's questions, asked of the full cache first and then of every policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from kvc_trt.errors import InputError
from kvc_trt.models.limits import longest_sequence
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.verify.accuracy.cell import Cell, key_of
from kvc_trt.verify.accuracy.grid import FULL, Group, Variant
from kvc_trt.verify.accuracy.questions import QuestionSet, Vocabulary, ask, draw
from kvc_trt.verify.accuracy.results import Results
from kvc_trt.verify.accuracy.subject import Room, Subject
from kvc_trt.verify.tasks.dataset import DataSet


@dataclass(frozen=True)
class Sampling:
    """How many questions a group has, and which."""

    samples: int
    seed: int
    max_new_tokens: int | None = None
    """Longest answer; None is each task's own."""


class _Draws:
    """Samples are drawn once per task and length: both modes follow one another, and ask the same ones."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self._vocabulary, self._sampling = vocabulary, sampling
        self._latest: tuple[tuple[str, int], DataSet] | None = None

    def of(self, group: Group) -> DataSet:
        """The samples of a group."""
        key = group.task, group.length
        if self._latest is None or self._latest[0] != key:
            self._latest = key, draw(*key, self._vocabulary, **vars(self._sampling))
        return self._latest[1]


def measure(
    subject: Subject,
    variants: Sequence[Variant],
    groups: Sequence[Group],
    sampling: Sampling,
    results: Results,
    progress: Progress | None = None,
) -> list[Cell]:
    """Every cell of the grid, in its order: read from `results`, or asked and appended to it before the next one.

    `variants` begins with full. InputError for questions that cannot be asked of this model at all; a policy that has
    no engine of some budget is a cell that says why.
    """
    _check_lengths(subject, groups)
    vocabulary = Vocabulary(subject.tokenizer, subject.model.vocab_size)
    draws = _Draws(vocabulary, sampling)
    cells: list[Cell] = []
    missing = sum(key_of(group, variant) not in results.cells for group in groups for variant in variants)
    with (progress or NullProgress()).task("accuracy", missing) as advance:
        for group in groups:
            if all(key_of(group, variant) in results.cells for variant in variants):
                cells += [results.cells[key_of(group, variant)] for variant in variants]
                continue
            asked = ask(group, draws.of(group), vocabulary)
            for cell, is_new in _of_group(subject, variants, asked, sampling.seed, results):
                cells.append(cell)
                advance(int(is_new))
    return cells


def _of_group(
    subject: Subject, variants: Sequence[Variant], asked: QuestionSet, seed: int, results: Results
) -> Iterable[tuple[Cell, bool]]:
    """The group's cells, and whether each was asked now."""
    group, room = asked.group, _room(subject, asked)
    missing = [variant for variant in variants if key_of(group, variant) not in results.cells]
    subject.announce(missing, room)
    full: Cell | None = None
    for variant in variants:
        known = results.cells.get(key_of(group, variant))
        if known is not None:
            _check_same_questions(known, asked, results)
        cell = known or _cell(subject, variant, room, asked, seed, full)
        if known is None:
            results.append(cell)
        full = full or cell
        yield cell, known is None


def _cell(subject: Subject, variant: Variant, room: Room, asked: QuestionSet, seed: int, full: Cell | None) -> Cell:
    """Ask one variant; the first one of a group is the full cache."""
    started = time.monotonic()
    group = asked.group
    empty = Cell(
        task=group.task,
        family=asked.task.family,
        mode=group.mode,
        length=group.length,
        policy=variant.policy,
        token_budget=variant.token_budget,
        seed=seed,
        dataset=asked.digest,
        max_new_tokens=asked.max_new_tokens,
        full_accuracy=full.mean.value if full is not None and full.scores else None,
    )
    try:
        answerer = subject.open(variant, room)
    except InputError as error:
        if variant.policy == FULL:
            raise
        return replace(empty, reason=error.message)
    answers = answerer.answer(asked.flat, asked.max_new_tokens)
    cell = replace(
        empty,
        scores=asked.score(answers),
        depths=asked.depths,
        executor=answerer.executor,
        row_bytes=answerer.row_bytes,
        parameters=asdict(answerer.parameters),
        seconds=round(time.monotonic() - started, 3),
    )
    return cell if full is not None else replace(cell, full_accuracy=cell.mean.value)


def _room(subject: Subject, asked: QuestionSet) -> Room:
    """The prompt's room is the group's length without the answer, or what positions leave of it."""
    new = asked.max_new_tokens + asked.late_tokens
    longest = max(len(question.prompt_ids) for question in asked.flat)
    positions = subject.model.max_position_embeddings
    return Room(max(longest, min(asked.group.length - asked.max_new_tokens, positions - new)), new)


def _check_lengths(subject: Subject, groups: Sequence[Group]) -> None:
    longest, asked = longest_sequence(subject.model), max(group.length for group in groups)
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
