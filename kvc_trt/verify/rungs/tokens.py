"""Rung 3: greedy answers, token by token, from a session with all rows in one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvc_trt.runtime import Request
from kvc_trt.runtime.session.batch import Batch
from kvc_trt.verify.checks import Check
from kvc_trt.verify.engine_under_test import EngineUnderTest

if TYPE_CHECKING:
    from kvc_trt.reference.model.decoder import ReferenceDecoder


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens [N,B] and the logits [N,B,vocab] that they are the best of."""

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class Match:
    """Greedy tokens of the engine against the reference's, up to each row's first difference."""

    matched: int
    compared: int
    near_equal: int
    """Rows that first differ where two logits nearly tie; the rest is another sentence and is not compared."""
    by_choice: int
    """Rows that first differ after a near-tie choice that was judged and forced on the reference; likewise."""
    unexplained: int
    """Rows that differ for neither reason."""

    def __add__(self, other: Match) -> Match:
        """Both comparisons together."""
        return Match(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rate(self) -> float:
        """Share of compared tokens that are equal."""
        return self.matched / self.compared if self.compared else 1.0


def reference_greedy(
    decoder: ReferenceDecoder, batch: Batch, steps: int, continuation: NDArray[np.int64] | None = None
) -> Greedy:
    """`steps` greedy tokens per row by cached decoding; `continuation` [n,B] is fed first, after the prompt's cache."""
    logits, cache = decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    for fed in continuation if continuation is not None else ():
        logits = decoder.decode(torch.from_numpy(fed), cache)
    tokens, seen = [], []
    for step in range(steps):
        seen.append(logits.numpy().astype(np.float32))
        tokens.append(seen[-1].argmax(-1))
        if step + 1 < steps:
            logits = decoder.decode(torch.from_numpy(tokens[-1]), cache)
    return Greedy(np.stack(tokens), np.stack(seen))


def match(
    answers: Sequence[Sequence[int]],
    expected: Greedy,
    near_equal_logits: float,
    forced: NDArray[np.float32] | None = None,
) -> Match:
    """Row by row; `forced` [N,B,vocab] are the logits under the engine's choices along the reference's tokens."""
    matched = compared = near_equal = by_choice = unexplained = 0
    steps = len(expected.tokens)
    for row, answer in enumerate(answers):
        wanted = expected.tokens[:, row]
        places = np.flatnonzero(np.asarray(answer[:steps]) != wanted[: len(answer)])
        if not places.size:
            matched, compared = matched + steps, compared + steps
            continue
        first = int(places[0])
        close = _gap(expected.logits[first, row], answer[first]) <= near_equal_logits
        chosen = not close and forced is not None and _gap(forced[first, row], answer[first]) <= near_equal_logits
        matched += first
        compared += first if close or chosen else steps
        near_equal, by_choice = near_equal + int(close), by_choice + int(chosen)
        unexplained += int(not close and not chosen)
    return Match(matched, compared, near_equal, by_choice, unexplained)


def _gap(logits: NDArray[np.float32], token: int) -> float:
    """The distance of a token's logit below the best one."""
    return float(logits.max() - logits[token])


def shared_prefix(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Share of the tokens before each row's first difference."""
    total = shared = 0
    for a, b in zip(one, other, strict=True):
        places = np.flatnonzero(np.asarray(a) != np.asarray(b))
        total += len(a)
        shared += int(places[0]) if places.size else len(a)
    return shared / total if total else 1.0


def explanation(found: Match) -> str:
    """The number of rows that differ for a good reason."""
    reasons = ((found.near_equal, "at near-equal logits"), (found.by_choice, "at a near-tie choice"))
    return ", ".join(f"{count} rows differ {reason}" for count, reason in reasons if count)


def _under_forced_choices(tested: EngineUnderTest, answers: Sequence[Sequence[int]]) -> NDArray[np.float32] | None:
    """Logits under the engine's choices, if its answers are the tokens that those were observed on."""
    same = np.array_equal(np.array(answers).T, tested.engine_run.tokens)
    return tested.forced_choices.logits if same and not tested.is_followed else None


def _expected(tested: EngineUnderTest, answers: Sequence[Sequence[int]]) -> Greedy:
    """Return the reference's greedy tokens; where it follows codes or experts of the engine, along those.

    Up to where an answer differs first, the tokens that the reference says after the answer's are its greedy ones.
    """
    if not tested.is_followed:
        with tested.phase("reference"):
            return reference_greedy(tested.reference, tested.batch, tested.plan.steps)
    tokens = np.array(answers, np.int64).T
    same = np.array_equal(tokens, tested.engine_run.tokens)
    along = tested.forced_choices if same else tested.reference_along(tested.batch, tokens)
    logits = along.logits[: len(tokens)]
    return Greedy(logits.argmax(-1), logits)


def check_tokens(tested: EngineUnderTest) -> list[Check]:
    """Greedy answers of the engine, of the reference under the same policy, and of the dense twin."""
    batch, steps, bars = tested.batch, tested.plan.steps, tested.thresholds
    requests = [Request(row, max_new_tokens=steps, ignore_eos=True) for row in batch.rows()]
    with tested.answering():
        answers = [output.token_ids for output in tested.session(len(batch)).generate(requests)]
    expected = _expected(tested, answers)
    found = match(answers, expected, bars.near_equal_logits, _under_forced_choices(tested, answers))
    tested.near_ties.near_equal_tokens += found.near_equal
    sample = f"{len(batch)} rows x {steps} tokens"
    checks = [
        Check(
            "greedy match with the reference",
            sample,
            f"{found.rate:.2%}",
            f"<= {bars.unexplained_tokens} unexplained",
            found.unexplained <= bars.unexplained_tokens,
            explanation(found),
        )
    ]
    if tested.halves.engine is not None:
        tested.halves.engine = dataclasses.replace(tested.halves.engine, greedy_match=found.rate)
    if tested.engine.parameters.compresses:
        with tested.phase("dense twin"):
            dense = [output.token_ids for output in tested.twin_session(len(batch)).generate(requests)]
        rate = shared_prefix(answers, dense)
        checks.append(Check("greedy match with the full cache", sample, f"{rate:.2%}", "no bar"))
        if tested.halves.compression is not None:
            tested.halves.compression = dataclasses.replace(tested.halves.compression, greedy_match=rate)
    return checks
