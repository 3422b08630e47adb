"""The loop over the grid: a few questions of a group at a time, asked of the full cache first and then of every policy.

Prefill is nearly all that a short answer to a long prompt costs. So it is shared: some questions are prefilled, every
policy answers them, as many at a time as fit in memory with what it stores, and then come the next ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from kvc_trt.accuracy.cell import Cell, key_of
from kvc_trt.accuracy.draw import Draw
from kvc_trt.accuracy.faithfulness import WHOLE, WholeCache
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.questions import ModelVocabulary, QuestionSet, ask
from kvc_trt.accuracy.results import Results
from kvc_trt.accuracy.under_test.answerer import Answerer, questions_for
from kvc_trt.accuracy.under_test.model_under_test import ModelUnderTest, Room
from kvc_trt.accuracy.work import GroupWork
from kvc_trt.errors import InputError
from kvc_trt.progress import Advance, NullProgress, Progress
from kvc_trt.tasks.dataset import DataSet

TOKENS_AT_ONCE = 2048
"""Prompt tokens of the questions that one policy is asked before their answers are kept: one long question, or a few
short ones, which are faster together."""


class _DataSets:
    """Samples are drawn once per task and length, and kept while that length is asked: both modes ask the same ones."""

    def __init__(self, vocabulary: ModelVocabulary, draw: Draw) -> None:
        self._vocabulary, self._draw = vocabulary, draw
        self._drawn: dict[tuple[str, int, str], DataSet] = {}

    def of(self, group: QuestionGroup) -> DataSet:
        """The samples of a group."""
        self._drawn = {key: drawn for key, drawn in self._drawn.items() if key[1] == group.length}
        key = (group.task, group.length, group.framing)
        if key not in self._drawn:
            self._drawn[key] = self._draw.data_set(group, self._vocabulary)
        return self._drawn[key]


@dataclass(frozen=True)
class GroupMeasurement:
    """Asks one group's questions of one policy after another."""

    model: ModelUnderTest
    questions: QuestionSet
    seed: int
    tokens_at_once: int | None = None
    """Prompt tokens of the questions that one policy is asked together; None takes TOKENS_AT_ONCE."""

    @cached_property
    def room(self) -> Room:
        """The prompt's room is the group's length without the answer, or what positions leave of it."""
        asked, positions = self.questions, self.model.config.max_position_embeddings
        new, after = asked.max_new_tokens + asked.late_tokens, asked.turn_tokens
        longest = max(len(question.prompt_ids) for question in asked.flat)
        return Room(max(longest, min(asked.group.length - asked.max_new_tokens, positions - new - after)), new, after)

    @property
    def together(self) -> int:
        """The number of samples asked of every policy before the next ones."""
        room = self.room
        fit = questions_for(self.model.config, room.max_input_len + room.max_output_len + room.turn_tokens)
        if self.follows:
            fit = min(fit, WholeCache.questions_for(self.model.config, self.questions.max_new_tokens))
        return max(1, fit // max(len(one) for one in self.questions.questions))

    @property
    def follows(self) -> bool:
        """True if nothing is known to be right, and the whole cache's own answers are followed."""
        return self.questions.task.scored_by == "faithfulness"

    def whole(self, baseline: Variant, first: int, last: int) -> WholeCache:
        """The full cache's answers to the samples first .. last - 1, and its logits along them."""
        asked = self.questions.of(first, last)
        return WholeCache.of(self.model.open(baseline, self.room), asked, self.questions.max_new_tokens, first)

    @property
    def at_once(self) -> int:
        """The number of samples that one policy answers before the answers are kept."""
        longest = max(sum(len(one.prompt_ids) for one in sample) for sample in self.questions.questions)
        return max(1, (self.tokens_at_once or TOKENS_AT_ONCE) // longest)

    def more(
        self, variant: Variant, known: Cell | None, last: int, full: Cell | None, whole: WholeCache | None = None
    ) -> Iterator[Cell]:
        """Yield the cell whenever it has more answers, the last time with those to all samples up to `last`.

        The cell of a variant that has no engine of this budget gives the reason. Only the samples that `known` lacks
        are asked. `full` is the full cache's cell of the same samples, None for its own; `whole` holds the full cache's
        answers where candidates are scored along them. InputError where the full cache itself cannot be asked.
        """
        cell = known or self._empty(variant)
        if cell.samples >= last:
            yield self._beside(cell, last, full)
        while cell.samples < last and not cell.reason:
            upto = min(cell.samples + self.at_once, last)
            try:
                cell = self._asked(cell, self.model.open(variant, self.room), upto, whole, full is None)
            except InputError as error:
                if full is None or cell.scores:
                    raise
                cell = replace(cell, reason=error.message)
            cell = self._beside(cell, last, full)
            yield cell

    def _beside(self, cell: Cell, last: int, full: Cell | None) -> Cell:
        """The cell with the full cache's scores of the same samples."""
        if self.questions.task.score is None:
            return cell
        return replace(cell, full_scores=(full or cell).scores[: cell.samples if cell.scores else last])

    def _empty(self, variant: Variant) -> Cell:
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
            framing=group.framing,
            scored_by=self.questions.task.scored_by,
        )

    def _asked(self, cell: Cell, answerer: Answerer, last: int, whole: WholeCache | None, is_whole: bool) -> Cell:
        """Return the cell with the answerer's results for the samples that it lacks."""
        started, first = time.monotonic(), cell.samples
        asked = self.questions.of(first, last)
        row_bytes = None
        if whole is not None:
            followed = [WHOLE] * len(asked) if is_whole else whole.followed_by(answerer, first, last)
            row_bytes = whole.row_bytes if is_whole else None
            cell = cell.following(followed)
            scores = tuple(one.divergence for one in followed)
        elif self.questions.task.score is None:
            scores = tuple(round(one, 6) for one in answerer.surprise(asked))
        else:
            scores = self.questions.score(answerer.answer(asked, self.questions.max_new_tokens), first)
        return replace(
            cell,
            scores=cell.scores + scores,
            depths=self.questions.depths[:last],
            executor=answerer.executor,
            row_bytes=row_bytes or answerer.row_bytes,
            parameters=json.loads(json.dumps(asdict(answerer.parameters))),  # as the file will have them
            seconds=round(cell.seconds + time.monotonic() - started, 3),
        )


def measure(
    model: ModelUnderTest,
    variants: Sequence[Variant],
    groups: Sequence[QuestionGroup],
    draw: Draw,
    results: Results,
    progress: Progress | None = None,
    *,
    until: float | None = None,
    tokens_at_once: int | None = None,
) -> list[Cell]:
    """The cells of the grid, in its order: read from `results`, or asked and appended to it before the next ones.

    A cell is appended whenever it has more answers, so that a run that was interrupted goes on within a group. Groups
    that can use the same engines are asked one after another. `variants` begins with full. After `until` on the
    monotonic clock no further answer is begun, and what is there is returned: cells may have fewer answers, or be
    missing. One policy is asked questions of `tokens_at_once` prompt tokens together (None takes TOKENS_AT_ONCE): more
    are faster, and who stops loses more. InputError for questions that cannot be asked of this model at all; a policy
    that has no engine of some budget is a cell that says why.
    """
    _check_lengths(model, groups)
    vocabulary = ModelVocabulary(model.tokenizer, model.config.vocab_size, model.template)
    data_sets = _DataSets(vocabulary, draw)
    missing = lacking(variants, groups, draw, results)
    work = {
        group: GroupWork(
            group, draw.answer_room(group.task), draw.count_of(group.task), missing[group], read_once=model.reads_once
        )
        for group in groups
    }
    progress = progress or NullProgress()
    with progress.task("accuracy", sum(one.total for one in work.values())) as advance:
        for group in sorted(groups, key=lambda one: (one.length, one.framing, one.mode, draw.answer_room(one.task))):
            if any(missing[group]) and not _over(until):
                asked = ask(group, data_sets.of(group), vocabulary, draw.task(group.task))
                _check_same_questions(variants, asked, results)
                measured = GroupMeasurement(model, asked, draw.seed, tokens_at_once)
                try:
                    _ask_all(measured, variants, draw, results, until, _reported(work[group], advance))
                except (KeyboardInterrupt, SystemExit):
                    kept = sum(cell.samples for cell in [*results.cells.values()])  # threads may still add some
                    progress.note(f"{results.path}: {kept} answers are kept; the same command goes on from there")
                    raise
    keys = [key_of(group, variant) for group in groups for variant in variants]
    return [results.cells[key] for key in keys if key in results.cells]


def lacking(
    variants: Sequence[Variant], groups: Sequence[QuestionGroup], draw: Draw, results: Results
) -> dict[QuestionGroup, list[int]]:
    """Return the number of answers that each variant lacks, by group."""
    return {
        group: [_missing(results.cells.get(key_of(group, one)), draw.count_of(group.task)) for one in variants]
        for group in groups
    }


def _reported(work: GroupWork, advance: Advance) -> Callable[[int, int], None]:
    """Return the function that advances by the work of new answers of a variant, which then has `samples`."""
    return lambda answers, samples: advance(work.done(answers, samples))


def _missing(cell: Cell | None, count: int) -> int:
    """The number of answers that a cell lacks; one that does not apply lacks none."""
    return count if cell is None else 0 if cell.reason else max(0, count - cell.samples)


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until


def _ask_all(
    measured: GroupMeasurement,
    variants: Sequence[Variant],
    draw: Draw,
    results: Results,
    until: float | None,
    report: Callable[[int, int], None],
) -> None:
    """Ask the questions of a group that the results lack, some samples at a time, and report new answers.

    All questions are asked in other threads, so that this one hears of an interruption at once.
    """
    group, model = measured.questions.group, measured.model
    count, baseline = min(draw.count_of(group.task), len(measured.questions.samples)), variants[0]
    ended = threading.Event()

    def known(variant: Variant) -> Cell | None:
        return results.cells.get(key_of(group, variant))

    def asked(variant: Variant, last: int, full: Cell | None, whole: WholeCache | None) -> None:
        if _over(until):
            return
        for cell in measured.more(variant, known(variant), last, full, whole):
            before = _missing(known(variant), count)
            (results.keep if _missing(cell, last) else results.append)(cell)
            report(before - _missing(cell, count), cell.samples)
            if ended.is_set() or _over(until):
                return

    pool = ThreadPoolExecutor(model.workers)
    try:
        for first in range(0, count, measured.together):
            last = min(first + measured.together, count)
            waiting = [variant for variant in variants if _missing(known(variant), last)]
            others = [variant for variant in waiting if variant != baseline]
            if not waiting or _over(until):
                continue
            model.announce([baseline, *others] if measured.follows else waiting, measured.room)
            new = max(first, min(cell.samples if (cell := known(one)) else 0 for one in waiting))
            whole = pool.submit(measured.whole, baseline, new, last).result() if measured.follows else None
            if baseline in waiting:
                pool.submit(asked, baseline, last, None, whole).result()
            full = known(baseline)
            for one in [pool.submit(asked, variant, last, full, whole) for variant in others]:
                one.result()
            if not _over(until):  # cells may lack answers, and what is kept of them stays
                results.settle()
    except BaseException as error:
        ended.set()
        # Who ends the command does not wait for the question that is being answered, which may take minutes.
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()


def _check_lengths(model: ModelUnderTest, groups: Sequence[QuestionGroup]) -> None:
    longest, asked = model.config.max_position_embeddings, max(group.length for group in groups)
    if asked > longest:
        raise InputError(
            f"--lengths {asked}: the model takes at most {longest} tokens", hint=f"--lengths {longest}, or shorter"
        )


def _check_same_questions(variants: Sequence[Variant], asked: QuestionSet, results: Results) -> None:
    for cell in (results.cells.get(key_of(asked.group, variant)) for variant in variants):
        if cell is not None and (cell.dataset != asked.digest or cell.max_new_tokens != asked.max_new_tokens):
            raise InputError(
                f"{results.path} holds answers to other questions: {asked.group} is data set {cell.dataset[:12]} with "
                f"{cell.max_new_tokens} new tokens there, {asked.digest[:12]} with {asked.max_new_tokens} here",
                hint="give another --output-dir",
            )
