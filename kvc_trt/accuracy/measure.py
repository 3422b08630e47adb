"""The loop over the grid: every group's questions, asked of the full cache first and then of every policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvc_trt.accuracy.asking import Asking
from kvc_trt.accuracy.cell import Cell, key_of
from kvc_trt.accuracy.grid import Group, Variant
from kvc_trt.accuracy.questions import QuestionSet, Vocabulary, ask, draw
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.subject import Subject
from kvc_trt.errors import InputError
from kvc_trt.models.limits import longest_sequence
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.tasks.dataset import DataSet
from kvc_trt.tasks.registry import task


@dataclass(frozen=True)
class Sampling:
    """How many questions a group has, and which."""

    samples: int
    seed: int
    max_new_tokens: int | Mapping[str, int] | None = None
    """Longest answer, of every task or by name; None, and tasks not named, take the task's own."""

    def room(self, task: str) -> int | None:
        """The longest answer of one task; None is its own."""
        if isinstance(self.max_new_tokens, Mapping):
            return self.max_new_tokens.get(task)
        return self.max_new_tokens


class _Draws:
    """Samples are drawn once per task and length, and kept while that length is asked: both modes ask the same ones."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self._vocabulary, self._sampling = vocabulary, sampling
        self._drawn: dict[tuple[str, int], DataSet] = {}

    def of(self, group: Group) -> DataSet:
        """The samples of a group."""
        self._drawn = {key: drawn for key, drawn in self._drawn.items() if key[1] == group.length}
        key, rule = (group.task, group.length), self._sampling
        if key not in self._drawn:
            self._drawn[key] = draw(
                *key, self._vocabulary, samples=rule.samples, seed=rule.seed, max_new_tokens=rule.room(group.task)
            )
        return self._drawn[key]


def measure(
    subject: Subject,
    variants: Sequence[Variant],
    groups: Sequence[Group],
    sampling: Sampling,
    results: Results,
    progress: Progress | None = None,
) -> list[Cell]:
    """Every cell of the grid, in its order: read from `results`, or asked and appended to it before the next one.

    Groups that can use the same engines are asked behind one another.
    `variants` begins with full. InputError for questions that cannot be asked of this model at all; a policy that has
    no engine of some budget is a cell that says why.
    """
    _check_lengths(subject, groups)
    vocabulary = Vocabulary(subject.tokenizer, subject.model.vocab_size)
    draws = _Draws(vocabulary, sampling)
    unfinished = [g for g in groups if any(key_of(g, variant) not in results.cells for variant in variants)]
    missing = sum(key_of(group, variant) not in results.cells for group in unfinished for variant in variants)
    with (progress or NullProgress()).task("accuracy", missing) as advance:
        for group in sorted(unfinished, key=lambda one: (one.length, one.mode, _answer_room(one, sampling))):
            asked = ask(group, draws.of(group), vocabulary)
            for is_new in _ask_all(Asking(subject, asked, sampling.seed), variants, results):
                advance(int(is_new))
    return [results.cells[key_of(group, variant)] for group in groups for variant in variants]


def _answer_room(group: Group, sampling: Sampling) -> int:
    return sampling.room(group.task) or task(group.task).max_new_tokens


def _ask_all(asking: Asking, variants: Sequence[Variant], results: Results) -> Iterable[bool]:
    """Ask what the results lack of a group, in the grid's order; for each cell, whether it was asked now."""
    group = asking.asked.group
    known = {variant: results.cells.get(key_of(group, variant)) for variant in variants}
    for cell in known.values():
        if cell is not None:
            _check_same_questions(cell, asking.asked, results)
    asking.subject.announce([variant for variant in variants if known[variant] is None], asking.room)
    full = known[variants[0]] or _kept(asking.full(), results)
    yield known[variants[0]] is None
    with ThreadPoolExecutor(asking.subject.workers) as pool:
        pending = {v: pool.submit(asking.cell, v, full) for v in variants[1:] if known[v] is None}
        try:
            for variant in variants[1:]:
                if variant in pending:
                    _kept(pending[variant].result(), results)
                yield variant in pending
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _kept(cell: Cell, results: Results) -> Cell:
    results.append(cell)
    return cell


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
