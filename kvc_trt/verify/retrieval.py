"""Rung 4: does the model still find what it is asked for? Full and compressed accuracy on the key-value task.

Asked twice: with the query inside the prompt, where the observation window sees it, and arriving after compaction,
where eviction could not know what will be asked. What the policy loses is reported, not judged: the budget decides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.runtime.batch import batch_of
from kvc_trt.tasks.key_value import KEYS, RECORD_TOKENS, KeyValueSample, Placement, generate
from kvc_trt.verify.checks import Check, Rung
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.prompts import MOST_PAIRS, why_not_asked
from kvc_trt.verify.tokens import Match, explanation, match, reference_greedy

if TYPE_CHECKING:
    from kvc_trt.runtime import Session

Answers = list[tuple[int, ...]]

_ROWS = 8
_REFERENCE_SAMPLES = 32
_NOTICEABLE = 3.0
"""A difference of more standard errors than this gets a separate line."""
PLACEMENTS: dict[Placement, str] = {"in_prompt": "query in the prompt", "after_compaction": "query after compaction"}


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers among `samples`."""

    right: int
    samples: int

    @property
    def rate(self) -> float:
        """The share itself, between 0 and 1."""
        return self.right / self.samples

    @property
    def standard_error(self) -> float:
        """The rate's binomial standard error."""
        return math.sqrt(self.rate * (1 - self.rate) / self.samples)

    def __str__(self) -> str:
        return f"{self.rate:.1%} ± {self.standard_error:.1%}"


def check_retrieval(tested: EngineUnderTest, rung: Rung) -> None:
    """Ask both engines the same questions, and the reference some of them."""
    if (reason := why_not_asked(tested.engine)) is not None:
        rung.reason = reason
        return
    limit = tested.engine.parameters.max_input_len
    contexts = [length for length in tested.plan.contexts if length <= limit] or [limit]
    with tested.progress.task("retrieval", len(contexts) * len(PLACEMENTS)) as advance:
        for context in contexts:
            for placement in PLACEMENTS:
                rung.checks += _ask(tested, context, placement)
                advance(1)


def _ask(tested: EngineUnderTest, context: int, placement: Placement) -> list[Check]:
    pairs = max(1, min(MOST_PAIRS, len(KEYS), (context - 3) // RECORD_TOKENS))
    samples = [
        generate(seed=tested.seed, index=i, context_tokens=context, pairs=pairs, placement=placement)
        for i in range(tested.plan.samples_at(context))
    ]
    with tested.answering():
        found = answers(tested.session(_ROWS), samples)
    compressed = score(found, samples)
    where = f"{PLACEMENTS[placement]}, {context} tokens"
    asked, note = f"{len(samples)} questions", f"{pairs} pairs in {context} tokens, seed {tested.seed}"
    checks = []
    if not tested.engine.parameters.compresses:
        checks.append(Check(f"full, {where}", asked, str(compressed), "no bar", note=note))
    else:
        with tested.phase("dense twin"):
            full = score(answers(tested.twin_session(_ROWS), samples), samples)
        both = f"{full} | {compressed}"
        checks.append(Check(f"full | compressed, {where}", asked, both, "no bar", note=note))
        _note_loss(tested, where, full, compressed)
    return [*checks, _against_reference(tested, where, samples, found)]


def answers(session: Session, samples: Sequence[KeyValueSample]) -> Answers:
    """Greedy answers; a query that is not in the prompt is fed to the row after its cache was compacted."""
    from kvc_trt.runtime import Request

    found: dict[int, tuple[int, ...]] = {}
    for first in range(0, len(samples), session.max_batch_size):
        some = samples[first : first + session.max_batch_size]
        rows = session.add([Request(s.prompt_ids, max_new_tokens=len(s.answer_ids), ignore_eos=True) for s in some])
        for row, sample in zip(rows, some, strict=True):
            session.extend(row, sample.query_ids)
        index = {row: first + i for i, row in enumerate(rows)}
        while session.rows:
            for event in session.step():
                if event.output is not None:
                    found[index[event.row]] = event.output.token_ids
    return [found[i] for i in range(len(samples))]


def score(found: Answers, samples: Sequence[KeyValueSample]) -> Accuracy:
    """Share of right answers: right means every token of the answer."""
    right = sum(answer == sample.answer_ids for answer, sample in zip(found, samples, strict=True))
    return Accuracy(right, len(samples))


def _against_reference(tested: EngineUnderTest, where: str, samples: Sequence[KeyValueSample], found: Answers) -> Check:
    bars, some = tested.thresholds, samples[:_REFERENCE_SAMPLES]
    total = Match(0, 0, 0, 0, 0)
    with tested.phase("reference"):
        for first in range(0, len(some), _ROWS):
            part = some[first : first + _ROWS]
            query = np.array([s.query_ids for s in part], np.int64).T
            batch = batch_of([s.prompt_ids for s in part])
            expected = reference_greedy(tested.reference, batch, len(part[0].answer_ids), query)
            one = match(found[first : first + len(part)], expected, bars.near_equal_logits)
            total = Match(
                total.matched + one.matched,
                total.compared + one.compared,
                total.near_equal + one.near_equal,
                0,
                total.unexplained + one.unexplained,
            )
    tested.near_ties.near_equal_tokens += total.near_equal
    return Check(
        "answers as the reference's",
        f"{len(some)} questions",
        f"{len(some) - total.unexplained - total.near_equal}",
        f"<= {bars.unexplained_answers:.0%} unexplained",
        total.unexplained <= bars.unexplained_answers * len(some),
        explanation(total),
        where,
    )


def _note_loss(tested: EngineUnderTest, where: str, full: Accuracy, compressed: Accuracy) -> None:
    error = math.hypot(full.standard_error, compressed.standard_error)
    if full.rate - compressed.rate > _NOTICEABLE * max(error, 1 / full.samples):
        tested.findings.append(f"{where}: compression costs accuracy, {full} with the full cache, {compressed} with it")
