"""Rung 4: measure the accuracy of retrieval with the full cache and with the compressed one.

Any model with a tokenizer is asked for needles in text, through its chat template if it has one; the model with the
vocabulary of the key-value task is asked for records of words. Each question is asked twice: with the query inside the
prompt, where the observation window sees it, and after compaction, when eviction could not know the query. The policy's
loss is reported and not judged, because it depends on the budget. The engine must answer as the reference does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.errors import InputError
from kvc_trt.progress import Advance
from kvc_trt.runtime import Request
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.checks import Check, Rung
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.questions.question import PLACEMENTS, Accuracy, PlacedQuestions, TokenQuestion, Wording
from kvc_trt.verify.rungs.tokens import Greedy, Match, explanation, match, reference_greedy

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.runtime import Event, Session

Answers = list[tuple[int, ...]]

_MOST_ROWS = 8
_MOST_ROWS_WITH_CODES = 2
"""The most rows at once if the keys and values of every layer are exposed."""
_ROWS_BYTES = 1 << 30
"""The most bytes that the full caches of all rows answered together may take."""
_NOTICEABLE = 3.0
"""A difference of more standard errors than this gets a line of its own."""


def check_retrieval(tested: EngineUnderTest, rung: Rung) -> None:
    """Ask both engines the same questions, and the reference some of them."""
    wording = tested.wording
    if isinstance(wording, str):
        rung.reason = wording
        return
    contexts = tested.plan.contexts_for(tested.engine.parameters.max_input_len, text=wording.is_text)
    samples_of = {context: tested.plan.samples_at(context, text=wording.is_text) for context in contexts}
    total = len(PLACEMENTS) * sum(_answers_to(tested, wording, samples) for samples in samples_of.values())
    with tested.progress.task("retrieval", total) as advance:
        for context, samples in samples_of.items():
            for placement in PLACEMENTS:
                try:
                    asked = wording.ask(context=context, placement=placement, samples=samples, seed=tested.seed)
                except InputError as error:
                    rung.reason = error.message
                    return
                where = f"{PLACEMENTS[placement]}, {context} tokens"
                rung.checks += _ask(tested, rung, wording, asked, where, advance)


def _answers_to(tested: EngineUnderTest, wording: Wording, samples: int) -> int:
    """Return the number of answers to `samples` questions: of the engine, of its dense twin, and of the reference."""
    engines = 1 + tested.engine.parameters.compresses
    return engines * samples + tested.plan.reference_samples(samples, text=wording.is_text)


def _ask(
    tested: EngineUnderTest, rung: Rung, wording: Wording, asked: PlacedQuestions, where: str, advance: Advance
) -> list[Check]:
    parameters = tested.engine.parameters
    if asked.room > parameters.max_output_len:
        detail = f"query and answer are {asked.room} tokens, the engine has room for {parameters.max_output_len}"
        return [Check(f"full | compressed, {where}", "0 questions", "not asked", detail=detail)]
    rows = _rows_for(tested.engine.model, parameters.max_sequence_len)
    with tested.answering():
        found = answers(tested.session(rows), asked, advance)
    compressed, count = asked.accuracy(found), f"{len(asked.questions)} questions"
    if not parameters.compresses:
        checks = [Check(f"full, {where}", count, str(compressed), "no bar", detail=wording.name, note=asked.about)]
        rung.summary.append(
            f"of {count} the full cache answers {compressed.right} ({where}; {wording.name}); nothing is compressed"
        )
    else:
        with tested.phase("dense twin"):
            full = asked.accuracy(answers(tested.twin_session(rows), asked, advance))
        both, how = f"{full} | {compressed}", f"{wording.name}, budget {parameters.token_budget}"
        checks = [Check(f"full | compressed, {where}", count, both, "no bar", detail=how, note=asked.about)]
        rung.summary.append(
            f"of {count} the full cache answers {full.right}, {parameters.policy} at budget "
            f"{parameters.token_budget} {compressed.right} ({where}; {wording.name})"
        )
        _note_loss(tested, where, full, compressed)
    return [*checks, _against_reference(tested, wording, where, asked, found, advance)]


def answers(session: Session, asked: PlacedQuestions, advance: Advance) -> Answers:
    """Return greedy answers; a query that is not in the prompt is fed to the row after its cache was compacted.

    `advance` is called after each answer.
    """
    requests = [
        Request(
            question.prompt_ids,
            max_new_tokens=asked.new_tokens,
            continuation_token_ids=question.query_ids,
            ignore_eos=True,
        )
        for question in asked.questions
    ]

    def note(number: int, event: Event) -> None:
        if event.output is not None:
            advance(1)

    return [output.token_ids for output in session.generate(requests, note)]


def _against_reference(
    tested: EngineUnderTest, wording: Wording, where: str, asked: PlacedQuestions, found: Answers, advance: Advance
) -> Check:
    bars = tested.thresholds
    count = tested.plan.reference_samples(len(asked.questions), text=wording.is_text)
    total = Match(0, 0, 0, 0, 0)
    for part in _alike(asked.questions[:count], _MOST_ROWS_WITH_CODES if tested.has_codes else _MOST_ROWS):
        given = [found[number] for number in part]
        expected = _expected(tested, [asked.questions[number] for number in part], given)
        total += match(given, expected, bars.near_equal_logits)
        advance(len(part))
    tested.near_ties.near_equal_tokens += total.near_equal
    return Check(
        "answers as the reference's",
        f"{count} questions",
        f"{count - total.unexplained - total.near_equal}",
        f"<= {bars.unexplained_answers:.0%} unexplained",
        total.unexplained <= bars.unexplained_answers * count,
        explanation(total),
        where,
    )


def _expected(tested: EngineUnderTest, questions: Sequence[TokenQuestion], given: Answers) -> Greedy:
    """Return the reference's answers to questions whose late queries are equally long.

    If caches have a format, the reference is fed the engine's answers and continues with the engine's codes; its
    answers are then its best tokens along them.
    """
    query = np.array([question.query_ids for question in questions], np.int64).T
    batch, answers = batch_of([question.prompt_ids for question in questions]), np.array(given, np.int64).T
    if not tested.has_codes:
        with tested.phase("reference"):
            return reference_greedy(tested.reference, batch, len(answers), query)
    fed = np.concatenate([query.reshape(-1, len(questions)), answers[:-1]])
    logits = tested.reference_along(batch, fed).logits[-len(answers) :]
    return Greedy(logits.argmax(-1), logits)


def _alike(questions: Sequence[TokenQuestion], most: int) -> list[list[int]]:
    """Return groups of at most `most` questions, by number, whose late queries are equally long, to decode together."""
    by_length: dict[int, list[int]] = {}
    for number, question in enumerate(questions):
        by_length.setdefault(len(question.query_ids), []).append(number)
    return [numbers[first : first + most] for numbers in by_length.values() for first in range(0, len(numbers), most)]


def _rows_for(model: ModelConfig, sequence: int) -> int:
    """Return the number of rows of `sequence` tokens that are answered together."""
    values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_size * sequence
    return max(1, min(_MOST_ROWS, _ROWS_BYTES // (4 * values)))


def _note_loss(tested: EngineUnderTest, where: str, full: Accuracy, compressed: Accuracy) -> None:
    error = math.hypot(full.standard_error, compressed.standard_error)
    if full.rate - compressed.rate > _NOTICEABLE * max(error, 1 / full.samples):
        tested.findings.append(f"{where}: compression costs accuracy, {full} with the full cache, {compressed} with it")
