"""The loss of a cache format in answers and in nats, with intervals, and the rule for a default format.

The rule: in every group of questions the 95 % interval of the loss, question by question, excludes more than
LARGEST_LOSS, and the mean divergence is at most LARGEST_DIVERGENCE. A group whose score is a likelihood has no points;
its interval excludes a loss of more than LARGEST_DIVERGENCE. Fewer questions than SAMPLES decide nothing: an interval
of a handful is narrower than it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.formats.methods import METHODS
from benchmarks.accuracy.formats.recorded import Formats, caches
from benchmarks.accuracy.paired import CHANCE, higher_and_lower, holm, sign_test
from benchmarks.accuracy.smollm2.cells import Answered, Group
from benchmarks.accuracy.smollm2.stages import SAMPLES
from kvc_trt.accuracy.cell import interval
from kvc_trt.accuracy.faithfulness import bootstrap_interval
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.policies import BASELINE

LARGEST_LOSS = 0.03
"""Share of the questions."""
LARGEST_DIVERGENCE = 0.01
"""Nats per token."""


class Loss(NamedTuple):
    """A mean difference by questions or texts, the format minus fp32, with its 95 % interval."""

    value: float
    low: float
    high: float
    asked: int
    """Questions or texts."""


def pooled(found: Formats, group: Group, form: str) -> Loss | None:
    """Return the loss of a format over all methods and budgets of a group: a mean for each question, then of those.

    Questions are resampled, not answers: a question that is hard for one method is hard for others too. For losses in
    points, two more questions are added, one on which the format gains its answer and one on which it loses it: without
    them an interval of equal answers would have no width. None where some method was not asked.
    """
    pairs = list(found.pairs(group, form))
    if len(pairs) < len(caches()):
        return None
    count = min(len(one.scores) for pair in pairs for one in pair)
    changed = np.mean([np.subtract(other.scores[:count], own.scores[:count]) for own, other in pairs], axis=0)
    values = [float(one) for one in changed]
    unseen = [] if in_nats(found, group) else [1 / len(pairs), -1 / len(pairs)]
    return Loss(float(np.mean(values)), *bootstrap_interval([*values, *unseen]), count)


class Alone(NamedTuple):
    """One method at one budget in a format, beside the same in fp32."""

    own: Answered
    other: Answered
    gained: int
    lost: int
    """Counts of the questions that only the fp32 cache answers, or only this one."""
    worse: bool
    """True if chance does not explain the loss: exact sign test, Holm's correction over a group's comparisons."""


def alone(found: Formats, group: Group, form: str) -> list[Alone]:
    """Return every method and budget of a group on its own."""
    pairs = list(found.pairs(group, form))
    chances = holm([sign_test(other.scores, own.scores) for own, other in pairs])
    counted = [higher_and_lower(other.scores, own.scores) for own, other in pairs]
    sign = -1 if pairs and pairs[0][0].likelihood else 1
    both = [pair[::sign] for pair in counted]
    return [
        Alone(own, other, gained, lost, chance <= CHANCE and lost > gained)
        for (own, other), (gained, lost), chance in zip(pairs, both, chances, strict=True)
    ]


def open_with(questions: int) -> float:
    """Return the loss of a single method that as many questions cannot exclude, even if none of them shows any."""
    return interval(0.0, questions)[1]


def enough_questions() -> int:
    """Return the fewest questions without any difference that would exclude LARGEST_LOSS for a single method."""
    count = 1
    while open_with(count) > LARGEST_LOSS:
        count += 1
    return count


def divergence(found: Formats, length: int, method: str, form: str) -> Loss:
    """Return the mean divergence of a method's cache in a format from the same in fp32, over texts of a length."""
    values = found.divergences(length, method, form).from_own
    return Loss(float(np.mean(values)), *bootstrap_interval(values), len(values))


def farther(found: Formats, length: int, method: str, form: str) -> Loss:
    """Return by how much a cache in a format is farther from the whole fp32 cache than the same in fp32, text by text.

    A cache may choose other tokens in a format, and so diverge from itself in fp32, without being worse.
    """
    its, own = (found.divergences(length, method, one).from_whole for one in (form, AUTO))
    values = [float(one) for one in np.subtract(its, own)]
    return Loss(float(np.mean(values)), *bootstrap_interval(values), len(values))


def against(found: Formats, form: str) -> Iterator[str]:
    """Yield the objections to a format as the default, a clause each."""
    few: dict[int, list[str]] = {}
    for group in found.groups:
        loss = pooled(found, group, form)
        count = 0 if loss is None else loss.asked
        if count < SAMPLES:
            few.setdefault(count, []).append(group.short)
        if loss is not None:
            yield from _losses(found, group, form, loss)
    for count, groups in few.items():
        yield f"{count} of {SAMPLES} questions were asked of: {'; '.join(groups)}"
    absent = []
    for method in METHODS:
        what = "the whole cache" if method == BASELINE else f"`{method}`"
        means = [(divergence(found, *one, form).value, one[0]) for one in found.followed if one[1] == method]
        largest, length = max(means, default=(0.0, 0))
        if not means:
            absent.append(what)
        elif largest > LARGEST_DIVERGENCE:
            yield f"{what} diverges by {largest:.3f} nats a token at {length:,} tokens"
    if absent:
        yield f"divergence was not measured of {', '.join(absent)}"


def _losses(found: Formats, group: Group, form: str, loss: Loss) -> Iterator[str]:
    """Yield the evidence of a group against a format: losses beyond chance; with enough questions, all not excluded."""
    decided = loss.asked >= SAMPLES
    if in_nats(found, group):
        if loss.high > LARGEST_DIVERGENCE and (decided or loss.low > 0):
            yield f"{group.short}: a loss of up to {loss.high:.3f} nats is not excluded"
        return
    if loss.low < -LARGEST_LOSS and (decided or loss.high < 0):
        yield f"{group.short}: a loss of up to {-100 * loss.low:.1f} points is not excluded"
    for one in alone(found, group, form):
        if one.worse:
            yield f"{group.short}: `{one.own.method}`, {one.own.point}, is worse in it beyond chance"


def in_nats(found: Formats, group: Group) -> bool:
    """Return whether a group's score is a likelihood, of which less is better."""
    full = found.answered.full(group)
    return full is not None and full.likelihood
