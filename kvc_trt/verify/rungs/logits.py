"""Rung 2: compare the engine's logits along given tokens with the reference's, and find their first difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvc_trt.models.cache_formats import AUTO
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.ranges import Ranges
from kvc_trt.verify.reference_run import KnownRun, reference_run
from kvc_trt.verify.report import ErrorFigures
from kvc_trt.verify.rungs.drafts import check_drafts
from kvc_trt.verify.rungs.operators import index_check
from kvc_trt.verify.rungs.turns import check_turns

if TYPE_CHECKING:
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies import PolicyParameters

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """The differences of one run's logits [N+1,B,vocab] from another's."""

    figures: ErrorFigures
    near_equal: int
    """The number of top-1 differences between logits that nearly tie."""
    unexplained: int
    """The number of top-1 differences between logits that do not nearly tie."""


def difference(found: Logits, expected: Logits, near_equal_logits: float) -> Difference:
    """Return the errors of `found`; KL is the divergence of its next-token distribution from the expected one."""
    if not np.isfinite(found).all():
        return Difference(ErrorFigures(float("nan"), float("nan"), 0.0, 0), 0, found.shape[0] * found.shape[1])
    scale = max(1.0, float(np.abs(expected).max()))
    choice, wanted = found.argmax(-1), expected.argmax(-1)
    differs = choice != wanted
    gap = expected.max(-1) - np.take_along_axis(expected, choice[..., None], axis=-1)[..., 0]
    steps = np.flatnonzero(differs.any(axis=1))
    figures = ErrorFigures(
        max_logit_error=float(np.abs(found - expected).max()) / scale,
        mean_kl=float(_kl(expected, found).mean()),
        top1_agreement=float(1 - differs.mean()),
        first_divergence=int(steps[0]) if steps.size else None,
    )
    near = int((differs & (gap <= near_equal_logits)).sum())
    return Difference(figures, near, int(differs.sum()) - near)


def _kl(expected: Logits, found: Logits) -> NDArray[np.float64]:
    p, q = _log_softmax(expected), _log_softmax(found)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(-1)
    return np.maximum(divergence, 0.0)


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def check_logits(tested: EngineUnderTest) -> list[Check]:
    """Fill the columns of the error table, and return the checks, which are of the engine's own error."""
    bars, batch, run = tested.thresholds, tested.batch, tested.judged_run
    with tested.phase("reference"):
        ours = tested.reference_run
    found = difference(run.logits, tested.forced_choices.logits, bars.near_equal_logits)
    tested.halves.engine = found.figures
    tested.near_ties.near_equal_tokens += found.near_equal

    rows, steps = len(batch), len(run.tokens)
    sample = f"{rows} rows x {steps + 1} positions"
    lengths = f"prompts of {', '.join(map(str, batch.prompt_lengths))}"
    kl, error = found.figures.mean_kl, found.figures.max_logit_error
    assert kl is not None
    assert error is not None
    checks = [
        _check_ranges(ours.ranges),
        *_judge_choices(tested),
        *_judge_routes(tested),
        at_most("max logit error", sample, error, bars.logits_max_error, note=lengths),
        at_most("mean KL (nats)", sample, kl, bars.logits_mean_kl),
        Check(
            "top-1 agreement",
            sample,
            f"{found.figures.top1_agreement:.2%}",
            f"<= {bars.unexplained_tokens} unexplained",
            found.unexplained <= bars.unexplained_tokens,
            f"{found.near_equal} near-equal" if found.near_equal else "",
        ),
    ]
    _measure_compression(tested, ours.logits)
    _measure_quantisation(tested, ours.logits)
    _measure_cache_format(tested, ours.logits)
    return [*checks, *check_turns(tested), *check_drafts(tested)]


def _check_ranges(ranges: Ranges) -> Check:
    """Return the check of activations' ranges, which comes first: a tensor beyond its range explains later failures."""
    name = f"activations beyond {ranges.activations}"
    return at_most(name, f"{ranges.measured} tensors", len(ranges.beyond), 0, ranges.first, "in the reference")


def _judge_choices(tested: EngineUnderTest) -> list[Check]:
    forced = tested.forced_choices
    if forced.explained is None:
        return []
    name, slack = "choices unlike the reference's own run", tested.thresholds.choice_slack
    if slack is None:
        sample = f"{forced.explained.compared} lists"
        measured, detail = f"{forced.explained.near_ties} differ", "forced on the reference"
        note = "activations are rounded coarsely: choices are judged on equal inputs (ops), and here only forced"
        return [Check(name, sample, measured, detail=detail, note=note)]
    judged = "what a step reads on what it chose by, all else" if forced.inputs_off is not None else "each"
    where = f"{len(forced.rows)} rows; {judged} within {slack:g} times a near-tie's tolerance; forced on the reference"
    checks = [index_check(name, forced.explained, where)]
    if forced.inputs_off is not None:
        note = "of a query or a key from the reference's, over the longest of its row and cache"
        checks.append(Check("inputs of choices", "largest difference", forced.inputs_off, "no bar", note=note))
    return checks


def _judge_routes(tested: EngineUnderTest) -> list[Check]:
    routes = tested.forced_choices.routes
    return [] if routes is None else [routes.check()]


def _measure_compression(tested: EngineUnderTest, ours: Logits) -> None:
    parameters, batch = tested.engine.parameters, tested.batch
    if not parameters.compresses:
        tested.halves.notes["compression"] = "a full engine compresses nothing"
        return
    if tested.compresses_nothing():
        longest = int(batch.prompt_lengths.max()) + len(tested.engine_run.tokens)
        tested.halves.notes["compression"] = f"{longest} tokens fit the budget: nothing is compressed"
        return
    full = _reference_logits(tested, tested.engine.weights(), parameters.keeping_everything())
    tested.halves.compression = difference(ours, full, 0.0).figures
    prompts = "random tokens" if isinstance(tested.wording, str) else tested.wording.prompt_text
    tested.halves.notes["compression"] = f"the policy against the full cache, both in the reference, on {prompts}"


def _measure_quantisation(tested: EngineUnderTest, ours: Logits) -> None:
    source, note = tested.checkpoint
    tested.halves.notes["quantisation"] = note
    if source is not None:
        exact = _reference_logits(tested, source, tested.engine.parameters)
        tested.halves.quantisation = difference(ours, exact, 0.0).figures


def _measure_cache_format(tested: EngineUnderTest, ours: Logits) -> None:
    parameters = tested.engine.parameters
    if tested.has_codes:
        exact = _reference_logits(tested, tested.engine.weights(), replace(parameters, kv_cache=AUTO))
        tested.halves.cache_format = difference(ours, exact, 0.0).figures
        tested.halves.notes["cache format"] = f"{parameters.kv_cache} against exact caches, both in the reference"


def _reference_logits(tested: EngineUnderTest, weights: WeightSource, parameters: PolicyParameters) -> Logits:
    with tested.phase("reference"):
        model, tokens = tested.engine.model, tested.engine_run.tokens
        return reference_run(KnownRun(model, weights, parameters, tested.batch, tokens, tested.progress)).logits
