"""The loop over the grid: every group's questions, asked of the full cache first and then of every policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvc_trt.errors import InputError
from kvc_trt.models.limits import longest_sequence
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.verify.accuracy.asking import Asking
from kvc_trt.verify.accuracy.cell import Cell, key_of
from kvc_trt.verify.accuracy.grid import Group, Variant
from kvc_trt.verify.accuracy.questions import QuestionSet, Vocabulary, ask, draw
from kvc_trt.verify.accuracy.results import Results
from kvc_trt.verify.accuracy.subject import Subject
from kvc_trt.verify.tasks.dataset import DataSet


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
    """Samples are drawn once per task and length: both modes follow one another, and ask the same ones."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self._vocabulary, self._sampling = vocabulary, sampling
        self._latest: tuple[tuple[str, int], DataSet] | None = None

    def of(self, group: Group) -> DataSet:
        """The samples of a group."""
        key = group.task, group.length
        if self._latest is None or self._latest[0] != key:
            rule = self._sampling
            drawn = draw(
                *key, self._vocabulary, samples=rule.samples, seed=rule.seed, max_new_tokens=rule.room(group.task)
            )
            self._latest = key, drawn
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
            for cell, is_new in _of_group(Asking(subject, asked, sampling.seed), variants, results):
                cells.append(cell)
                advance(int(is_new))
    return cells


def _of_group(asking: Asking, variants: Sequence[Variant], results: Results) -> Iterable[tuple[Cell, bool]]:
    """The group's cells in the grid's order, each written before it is given, and whether it was asked now."""
    group = asking.asked.group
    known = {variant: results.cells.get(key_of(group, variant)) for variant in variants}
    for cell in known.values():
        if cell is not None:
            _check_same_questions(cell, asking.asked, results)
    asking.subject.announce([variant for variant in variants if known[variant] is None], asking.room)
    full = known[variants[0]] or _kept(asking.full(), results)
    yield full, known[variants[0]] is None
    with ThreadPoolExecutor(asking.subject.workers) as pool:
        pending = {v: pool.submit(asking.cell, v, full) for v in variants[1:] if known[v] is None}
        try:
            for variant in variants[1:]:
                cell = known[variant]
                yield (_kept(pending[variant].result(), results), True) if cell is None else (cell, False)
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
