"""What the real model's accuracy allows to say of one method beside another, and of the smallest cache.

A verdict follows the statistic that its test counts. All comparisons of a section about the same questions are one
family, whose chances Holm's method corrects, and fewer questions than ENOUGH give no verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from benchmarks.accuracy.kvpress.presses import ADAKV
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy.smollm2.stages import BUDGETS, ROCKETKV, SAMPLES
from kvc_trt.accuracy.cell import Mean
from kvc_trt.accuracy.pages.paired import CHANCE, difference, higher_and_lower, holm, sign_test
from kvc_trt.policies import BASELINE

AGAINST_PRESSES = (ROCKETKV, "hybrid")
"""The policies that are set against every press."""
NEARLY = 0.9
"""Share of what the whole cache answers from which a method is said to answer still."""
ENOUGH = SAMPLES
"""Questions from which a comparison decides something."""
FEWER = f"Of fewer than {ENOUGH} questions nothing is said."
_MIB = 1 << 20

Pair = tuple[Answered, Answered]
Verdict = Literal["better", "equal", "worse", "too few"]
"""Of the pair's first: on more questions, or equal as far as chance allows to say."""


def verdicts(pairs: Sequence[Pair]) -> dict[Pair, Verdict]:
    """A family of comparisons, its chances corrected for how many it has."""
    enough = [pair for pair in dict.fromkeys(pairs) if min(len(one.scores) for one in pair) >= ENOUGH]
    chances = holm([sign_test(mine.scores, other.scores) for mine, other in enough])
    found: dict[Pair, Verdict] = dict.fromkeys(pairs, "too few")
    return found | {pair: _direction(*pair, chance) for pair, chance in zip(enough, chances, strict=True)}


def _direction(mine: Answered, other: Answered, chance: float) -> Verdict:
    if chance > CHANCE:
        return "equal"
    higher, lower = higher_and_lower(mine.scores, other.scores)
    return "better" if (higher > lower) != mine.likelihood else "worse"


def beside_kvpress(found: Comparison) -> Iterable[str]:
    """RocketKV's policies against every press, question by question, at equal tokens and at equal bytes."""
    groups = [group for group in found.groups if found.of(KVPRESS, group)]
    if not groups:
        return
    yield "## Beside kvpress, question by question"
    yield (
        "The policy's score minus the press's on the same questions, ± one standard error (n), in points of accuracy; "
        "for the summary in nats, where less is better and a minus is in the policy's favour. At an **equal token "
        "budget** the press keeps `t` tokens, the answer included: what one step of the policy may read. At **equal "
        "bytes** it keeps as many tokens as fit in what RocketKV stores at that budget, page bounds included. "
        f"**Bold**: the policy is better on more questions; *italic*: the press is; plain: equally good methods would "
        f"differ as much somewhere in the group's table in more than {CHANCE:.0%} of such measurements (exact sign "
        f"test, which counts questions: a mean may point the other way; Holm's correction). {FEWER}"
    )
    said, tables = [], []
    for group in groups:
        rows = list(_rows(found, group))
        judged = verdicts([pair for row in rows for pair in row.pairs])
        tables += [f"### {group}", "\n".join(_comparisons(found, group, rows, judged))]
        for row in rows:
            if row.mine.method == ROCKETKV and (sentence := _sentence(row.pairs, judged)):
                said.append(f"- {group}, budget {_number(row.mine)}, {row.what} {sentence}")
    if said:
        yield "\n".join(said)
    yield from tables


class _Row(NamedTuple):
    """A policy at one budget, and each press beside it at one point."""

    mine: Answered
    what: str
    """What is equal."""
    point: str
    """The presses'."""
    pairs: list[Pair]


def _rows(found: Comparison, group: Group) -> Iterator[_Row]:
    presses = methods(found.of(KVPRESS, group))
    for policy in AGAINST_PRESSES:
        for budget in BUDGETS:
            mine = found.cell(OURS, group, policy, f"budget {budget}")
            points = {f"budget {budget}": "equal token budget"}
            if policy == ROCKETKV:
                points[f"bytes of rocketkv {budget}"] = "equal bytes"
            for point, what in points.items() if mine is not None else ():
                others = [found.cell(KVPRESS, group, press, point) for press in presses]
                pairs = [(mine, other) for other in others if mine is not None and other is not None]
                if mine is not None and pairs:
                    yield _Row(mine, what, point, pairs)


def _comparisons(
    found: Comparison, group: Group, rows: Sequence[_Row], judged: Mapping[Pair, Verdict]
) -> Iterator[str]:
    presses = methods(found.of(KVPRESS, group))
    yield "| policy | against | " + " | ".join(f"`{press}`" for press in presses) + " |"
    yield "|---|---|" + "---|" * len(presses)
    for row in rows:
        pairs = {pair[1].method: pair for pair in row.pairs}
        cells = [
            _against(pairs[press], judged) if press in pairs else _absent(found, group, press, row.point)
            for press in presses
        ]
        yield f"| `{row.mine.method}` {_number(row.mine)} | {row.what} | " + " | ".join(cells) + " |"


def _against(pair: Pair, judged: Mapping[Pair, Verdict]) -> str:
    gained = difference(pair[0].scores, pair[1].scores)
    if gained is None:
        return "n/a"
    digits, scale = (3, 1) if pair[0].likelihood else (1, 100)
    text = f"{signed(gained, scale, digits)} ({gained.samples})"
    return {"better": f"**{text}**", "worse": f"*{text}*"}.get(judged[pair], text)


def _absent(found: Comparison, group: Group, press: str, point: str) -> str:
    """Why a press has no cell at a point."""
    if press == ADAKV:
        return "frees no bytes"
    if found.cell(KVPRESS, group, BASELINE, point) is not None:
        return "the whole prompt fits"
    return "n/a"


def _number(cell: Answered) -> str:
    return cell.point.partition(" ")[2]


def signed(one: Mean, scale: float, digits: int) -> str:
    """A mean difference and its standard error, which says nothing where all differences are alike."""
    value = f"{scale * one.value:+.{digits}f}"
    error = f"± {scale * one.standard_error:.{digits}f}" if one.standard_error > 0 else "on each"
    return f"{value} {error}"


def among_ours(found: Comparison) -> Iterator[str]:
    """RocketKV beside our other policies: at the same budget, and at what they answer with no more bytes."""
    groups = [group for group in found.groups if found.of(OURS, group)]
    if not groups:
        return
    yield "## RocketKV beside the other policies"
    yield (
        "At an equal token budget they store different amounts. *With no more bytes* sets RocketKV beside each policy "
        f"at the largest budget asked at which that one stores no more than RocketKV does. {FEWER}"
    )
    said = []
    for group in groups:
        rows = list(_beside_ours(found, group))
        judged = verdicts([pair for _, pairs in rows for pair in pairs])
        for what, pairs in rows:
            if sentence := _sentence(pairs, judged):
                said.append(f"- {group}, {what} {sentence}")
    if said:
        yield "\n".join(said)


def _beside_ours(found: Comparison, group: Group) -> Iterator[tuple[str, list[Pair]]]:
    cells = [cell for cell in found.of(OURS, group) if cell.method != ROCKETKV]
    for budget in BUDGETS:
        mine = found.cell(OURS, group, ROCKETKV, f"budget {budget}")
        if mine is None:
            continue
        yield f"budget {budget}", [(mine, other) for other in cells if other.point == mine.point]
        no_larger = [cell for cell in cells if cell.stored <= mine.stored]
        largest = {cell.method: cell for cell in sorted(no_larger, key=lambda one: one.stored)}
        what = f"budget {budget} and others with no more bytes"
        yield what, [(mine, largest[name]) for name in methods(cells) if name in largest]


def _sentence(pairs: Sequence[Pair], judged: Mapping[Pair, Verdict]) -> str | None:
    """Say what RocketKV is better than, not distinguishable from, and worse than; None where nothing can be said."""
    words: dict[Verdict, str] = {"better": "better than", "equal": "not distinguishable from", "worse": "worse than"}
    by_verdict = {name: [_named(*pair) for pair in pairs if judged[pair] == name] for name in words}
    said = "; ".join(f"{words[name]} {', '.join(found)}" for name, found in by_verdict.items() if found)
    asked = min((len(one.scores) for pair in pairs if judged[pair] != "too few" for one in pair), default=0)
    return f"(n = {asked}): `{ROCKETKV}` is {said}." if said else None


def _named(mine: Answered, other: Answered) -> str:
    """A method, with its budget where that is another than RocketKV's."""
    other_budget = other.side == OURS and other.point != mine.point
    return f"`{other.method}`" + (f" {_number(other)}" if other_budget else "")


def smallest(found: Comparison) -> Iterator[str]:
    """Per group, the methods by the fewest bytes from which on they answer nearly what the whole cache answers."""
    lines = [line for group in found.groups for side in (OURS, KVPRESS) for line in _smallest_of(found, group, side)]
    if lines:
        yield "## The smallest cache that still answers"
        yield (
            "MiB of cache for one sequence at the smallest point asked from which on, at every larger point too, a "
            f"method answers {NEARLY:.0%} of the questions that its whole cache answers. kvpress's presses are asked "
            f"at more points than the policies, so theirs can be found closer to the true one. {FEWER}"
        )
        yield "\n".join(lines)


def _smallest_of(found: Comparison, group: Group, side: str) -> Iterator[str]:
    cells, full = [cell for cell in found.of(side, group) if len(cell.scores) >= ENOUGH], found.full(group, side)
    if full is None or full.likelihood or not cells:
        return
    smaller, not_smaller, never = [], [], []
    for method in methods(cells):
        points = [cell for cell in cells if cell.method == method]
        stored = _smallest_stored(found, points)
        entry = (stored or 0, f"`{method}`" + (f" {stored / _MIB:.1f}" if stored is not None else ""))
        (never if stored is None else smaller if stored < full.stored else not_smaller).append(entry)
    named = [", ".join(name for _, name in sorted(entries)) for entries in (smaller, not_smaller, never)]
    answered = found.on_answered(full)
    asked = f"n = {len(full.scores)}, of which the whole cache answers {answered.samples if answered else 0}"
    amounts = max(len([cell for cell in cells if cell.method == method]) for method in methods(cells))
    yield (
        f"- {group}, {side} ({asked} with {full.stored / _MIB:.1f} MiB; at most {amounts} points a method): "
        f"{named[0] or 'none'}"
        + (f"; no smaller than the whole cache: {named[1]}" if named[1] else "")
        + (f"; at no point: {named[2]}" if named[2] else "")
        + "."
    )


def _smallest_stored(found: Comparison, points: Sequence[Answered]) -> int | None:
    """Bytes of the smallest of a method's points that still answers, as all larger ones do.

    Of points that store the same, one with a larger budget, which stands behind it, is the larger.
    """
    smallest = None
    for _, point in sorted(enumerate(points), key=lambda placed: (placed[1].stored, placed[0]), reverse=True):
        kept = found.on_answered(point)
        if kept is None or kept.value < NEARLY:
            break
        smallest = point.stored
    return smallest
