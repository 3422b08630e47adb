"""Sentences that follow from the figures of caches in formats, whoever they favour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.accuracy.formats.losses import (
    LARGEST_DIVERGENCE,
    LARGEST_LOSS,
    against,
    divergence,
    enough_questions,
    farther,
    in_nats,
    open_with,
    pooled,
)
from benchmarks.accuracy.formats.methods import split
from benchmarks.accuracy.formats.recorded import OPENVINO, Formats, peers
from benchmarks.accuracy.paired import CHANCE, higher_and_lower, holm, sign_test
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Group, methods
from benchmarks.accuracy.smollm2.stages import SAMPLES
from benchmarks.page import bullet, paragraph, span
from kvc_trt.accuracy.cell import on_answered
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.policies import BASELINE

MIB = 1 << 20
NEARLY = 0.9
"""Share of the whole cache's right answers from which a cache counts as answering nearly as well."""
ENOUGH = 16
"""Questions below which a cache is no part of a claim about bytes."""
NAMED = 5
"""Most caches that a claim names of one side."""
FORMATS = tuple(form for form in CACHE_FORMATS if form != AUTO)


def costs(found: Formats) -> Iterator[str]:
    """Yield the cost of each format beside fp32, and the reasons against it as the default."""
    yield paragraph(
        "**The cost of a format** beside the same cache in fp32, with 95 % intervals. Questions are in points: each of "
        "the n questions counts with its mean over all methods and budgets, and the interval also covers two made-up "
        "questions, one that a single cache gains and one that it loses. A summary, and the divergence along plain "
        "text, are in nats a token, without made-up texts."
    )
    lines = []
    for form in FORMATS:
        said = [_loss(found, group, form) for group in found.groups]
        said += [_divergences(found, form)] if found.lengths else []
        lines.append(bullet(f"**`{form}`**: {'; '.join(one for one in said if one)}."))
    yield "\n".join(lines)
    yield paragraph(
        f"**To be the default**, a format must exclude a loss of {100 * LARGEST_LOSS:.0f} points in every group (in "
        f"nats: of {LARGEST_DIVERGENCE:g}) and diverge by at most {LARGEST_DIVERGENCE:g} nats a token under every "
        f"method. One method at one budget cannot show that here: {SAMPLES} questions without any difference still "
        f"allow a loss of {100 * open_with(SAMPLES):.1f} points (Wilson), and it takes {enough_questions()} to exclude "
        f"{100 * LARGEST_LOSS:.0f}. So the intervals are those of all methods together, and a single method is named "
        f"where it loses more than chance explains. Fewer than {SAMPLES} questions decide nothing."
    )
    yield "\n".join(_verdict(found, form) for form in FORMATS)


def _loss(found: Formats, group: Group, form: str) -> str:
    loss = pooled(found, group, form)
    if loss is None:
        return ""
    if in_nats(found, group):
        return f"{group.short} {loss.value:+.4f} nats [{loss.low:+.4f}, {loss.high:+.4f}], n {loss.asked}"
    return f"{group.short} {100 * loss.value:+.1f} [{100 * loss.low:+.1f}, {100 * loss.high:+.1f}], n {loss.asked}"


def _divergences(found: Formats, form: str) -> str:
    means = {one: divergence(found, *one, form) for one in found.followed}
    whole = [
        f"{one.value:.4f} [{one.low:.4f}, {one.high:.4f}] at {length:,} tokens (n {one.asked})"
        for (length, method), one in means.items() if method == BASELINE
    ]  # fmt: skip
    others = [place for place in means if place[1] != BASELINE]
    said = f"the whole cache diverges by {', '.join(whole)}"
    if not others:
        return said
    own = span(f"{one:.4f}" for one in sorted(means[place].value for place in others))
    more = max((farther(found, *place, form) for place in others), key=lambda one: one.value)
    return (
        f"{said}; each other method diverges from itself in fp32, by {own}, and is at most {more.value:.4f} "
        f"[{more.low:.4f}, {more.high:.4f}] farther from the whole fp32 cache than it is in fp32"
    )


def _verdict(found: Formats, form: str) -> str:
    reasons = list(against(found, form))
    return bullet(f"`{form}`: {'; '.join(reasons) if reasons else 'nothing speaks against it'}.")


def smallest(found: Formats) -> Iterator[str]:
    """Yield the smallest caches that still answer, group by group."""
    yield paragraph(
        f"**The smallest caches that keep {100 * NEARLY:.0f} %** of the answers of their side's whole cache, in MiB. "
        "All larger caches of the same method and format keep as much. At most "
        f"{NAMED} of a side are named, and none that was asked fewer than {ENOUGH} questions:"
    )
    lines = []
    for group in found.groups:
        full = found.answered.full(group)
        if full is None or full.likelihood or len(full.scores) < ENOUGH:
            continue
        said = [f"{_named(found, found.answered.of(OURS, group) + _wholes(found, group), full)}"]
        for side in (KVPRESS, OPENVINO):
            cells = [cell for cell in peers(found, group) if cell.side == side]
            whole = found.answered.full(group, KVPRESS) if side == KVPRESS else _whole_openvino(cells)
            if cells and whole is not None:
                said.append(f"{side} {_named(found, cells, whole)}")
        lines.append(
            bullet(f"**{group.short.capitalize()}**, whole in fp32 {full.stored / MIB:.1f}: {'; '.join(said)}.")
        )
    yield "\n".join(lines)


def _wholes(found: Formats, group: Group) -> list[Answered]:
    """Return the whole cache in fp32; in the formats it is one method of many."""
    whole = found.answered.full(group)
    return [] if whole is None else [whole]


def _whole_openvino(cells: Sequence[Answered]) -> Answered | None:
    return next((cell for cell in cells if cell.point == BASELINE), None)


def _named(found: Formats, cells: Sequence[Answered], whole: Answered) -> str:
    sizes = []
    asked = [cell for cell in cells if len(cell.scores) >= ENOUGH]
    for method in methods(asked):
        enough = None
        for cell in sorted((one for one in asked if one.method == method), key=lambda one: -one.stored):
            kept = on_answered(cell.scores, whole.scores)
            if kept is None or kept.value < NEARLY:
                break
            enough = cell.stored
        if enough is not None:
            sizes.append((enough, method))
    return ", ".join(f"`{method}` {size / MIB:.1f}" for size, method in sorted(sizes)[:NAMED]) or "none"


def at_equal_bytes(found: Formats) -> Iterator[str]:
    """Whole caches in few bits beside evicting ones in fp32, and evicting ones in few bits beside those."""
    yield paragraph(
        "**At equal bytes**: the comparisons in which a cache is better or worse beyond chance (exact sign test over "
        "the questions, Holm's correction over a claim's comparisons in a group). All groups count together, without "
        f"caches that were asked fewer than {ENOUGH} questions:"
    )
    lines = []
    for form in FORMATS:
        larger = _record(found, form, _evicting(AUTO, larger=True))
        smaller = {one: _record(found, form, _evicting(one, larger=False)) for one in FORMATS}
        said = "; ".join(f"in `{one}` {record}" for one, record in smaller.items() if record)
        if not larger and not said:
            continue
        sizes = sorted(cell.stored / MIB for one in found.groups if (cell := found.cell(one, BASELINE, form, None)))
        beside = f" beside evicting caches in fp32 with at least as many bytes: {larger}." if larger else "."
        lines.append(
            bullet(
                f"**The whole cache in `{form}`** ({span(f'{one:.1f}' for one in sizes)} MiB){beside}"
                + (f" Beside evicting caches with no more bytes: {said}." if said else "")
            )
        )
    yield "\n".join(lines)


Kept = Callable[[Answered, Answered], bool]
"""A function that returns True if the second cache is compared with the first."""


def _evicting(form: str, *, larger: bool) -> Kept:
    def kept(mine: Answered, other: Answered) -> bool:
        method, its = split(other.method)
        sized = other.stored >= mine.stored if larger else other.stored <= mine.stored
        return method != BASELINE and its == form and sized

    return kept


def _record(found: Formats, form: str, kept: Kept) -> str:
    """Return how often the whole cache in a format is better and worse than others in all groups; "" without others."""
    better = worse = count = 0
    for group in found.groups:
        own = found.cell(group, BASELINE, form, None)
        if own is None or len(own.scores) < ENOUGH:
            continue
        others = [one for one in found.answered.of(OURS, group) if kept(own, one) and len(one.scores) >= ENOUGH]
        sign = -1 if own.likelihood else 1
        chances = holm([sign_test(own.scores, cell.scores) for cell in others])
        for cell, chance in zip(others, chances, strict=True):
            higher, lower = higher_and_lower(own.scores, cell.scores)[::sign]
            better += chance <= CHANCE and higher > lower
            worse += chance <= CHANCE and lower > higher
            count += 1
    return f"better than {better}, worse than {worse} of {count}" if count else ""
