"""What the real model's accuracy allows to say of one method beside another, and of the smallest cache.

A verdict follows the statistic that its test counts, and a comparison of fewer questions than ENOUGH is said to be a
direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.accuracy_smollm2_cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy_smollm2_stages import BUDGETS, ROCKETKV, SAMPLES
from kvc_trt.accuracy.cell import Mean
from kvc_trt.accuracy.paired import CHANCE, difference, higher_and_lower, sign_test

AGAINST_PRESSES = (ROCKETKV, "hybrid")
"""The policies that are set against every press."""
NEARLY = 0.9
"""Share of what the whole cache answers from which a method is said to answer still."""
ENOUGH = SAMPLES
"""Questions from which a comparison decides something."""
FEWER = f"What fewer than {ENOUGH} questions say is called a direction."
_MIB = 1 << 20


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
        f"differ as much in more than {CHANCE:.0%} of such measurements (exact sign test, which counts questions: a "
        f"mean may point the other way). {FEWER}"
    )
    yield "\n".join(line for group in groups for line in _sentences(found, group))
    for group in groups:
        yield f"### {group}"
        yield "\n".join(_comparisons(found, group))


def _comparisons(found: Comparison, group: Group) -> Iterator[str]:
    presses = methods(found.of(KVPRESS, group))
    yield "| policy | against | " + " | ".join(f"`{press}`" for press in presses) + " |"
    yield "|---|---|" + "---|" * len(presses)
    for policy in AGAINST_PRESSES:
        for budget in BUDGETS:
            mine = found.cell(OURS, group, policy, f"budget {budget}")
            points = [f"budget {budget}", *([f"bytes of rocketkv {budget}"] if policy == ROCKETKV else [])]
            for point in points if mine is not None else ():
                row = [_against(mine, found.cell(KVPRESS, group, press, point)) for press in presses]
                what = "equal token budget" if point.startswith("budget") else "equal bytes"
                yield f"| `{policy}` {budget} | {what} | " + " | ".join(row) + " |"


def _against(mine: Answered | None, other: Answered | None) -> str:
    if mine is None or other is None or (gained := difference(mine.scores, other.scores)) is None:
        return "n/a"
    digits, scale = (3, 1) if mine.likelihood else (1, 100)
    text = f"{signed(gained, scale, digits)} ({gained.samples})"
    return {"better": f"**{text}**", "worse": f"*{text}*", "equal": text}[verdict(mine, other)]


def signed(one: Mean, scale: float, digits: int) -> str:
    """A mean difference and its standard error, which says nothing where all differences are alike."""
    value = f"{scale * one.value:+.{digits}f}"
    error = f"± {scale * one.standard_error:.{digits}f}" if one.standard_error > 0 else "on each"
    return f"{value} {error}"


def verdict(mine: Answered, other: Answered) -> str:
    """better or worse on more questions, or equal as far as chance allows to say."""
    if sign_test(mine.scores, other.scores) > CHANCE:
        return "equal"
    higher, lower = higher_and_lower(mine.scores, other.scores)
    return "better" if (higher > lower) != mine.likelihood else "worse"


def _sentences(found: Comparison, group: Group) -> Iterator[str]:
    """What the table of a group says of RocketKV, in words."""
    presses = methods(found.of(KVPRESS, group))
    for budget in BUDGETS:
        mine = found.cell(OURS, group, ROCKETKV, f"budget {budget}")
        for point, what in ((f"budget {budget}", "equal tokens"), (f"bytes of rocketkv {budget}", "equal bytes")):
            others = [cell for press in presses if (cell := found.cell(KVPRESS, group, press, point)) is not None]
            if mine is not None and others:
                yield f"- {group}, budget {budget}, {what} {_sentence(mine, others)}"


def among_ours(found: Comparison) -> Iterator[str]:
    """RocketKV beside our other policies at the same budget."""
    yield "## RocketKV beside the other policies at equal token budgets"
    yield f"They store different amounts: the tables below say how much. {FEWER}"
    lines = []
    for group in found.groups:
        for budget in BUDGETS:
            mine = found.cell(OURS, group, ROCKETKV, f"budget {budget}")
            others = [
                one for one in found.of(OURS, group) if one.point == f"budget {budget}" and one.method != ROCKETKV
            ]
            if mine is not None and others:
                lines.append(f"- {group}, budget {budget} {_sentence(mine, others)}")
    yield "\n".join(lines)


def _sentence(mine: Answered, others: Sequence[Answered]) -> str:
    """better than these, not told from those, worse than the rest."""
    words = {"better": "better than", "equal": "not told from", "worse": "worse than"}
    verdicts = {name: [f"`{one.method}`" for one in others if verdict(mine, one) == name] for name in words}
    said = "; ".join(f"{words[name]} {', '.join(found)}" for name, found in verdicts.items() if found)
    asked = min(len(one.scores) for one in (mine, *others))
    return f"({_weight(asked)}): `{ROCKETKV}` is {said}."


def _weight(asked: int) -> str:
    return f"n = {asked}" if asked >= ENOUGH else f"a direction, n = {asked}"


def smallest(found: Comparison) -> Iterator[str]:
    """Per group, the methods by the fewest bytes from which on they answer nearly what the whole cache answers."""
    groups = [group for group in found.groups if (full := found.full(group)) is not None and not full.likelihood]
    if not groups:
        return
    yield "## The smallest cache that still answers"
    yield (
        f"MiB of cache for one sequence at the smallest point asked from which on, at every larger point too, a "
        f"method answers {NEARLY:.0%} of the questions that its whole cache answers. kvpress's presses are asked at "
        f"more points than the policies, so theirs can be found closer to the true one. {FEWER}"
    )
    yield "\n".join(line for group in groups for side in (OURS, KVPRESS) for line in _smallest_of(found, group, side))


def _smallest_of(found: Comparison, group: Group, side: str) -> Iterator[str]:
    cells, full = found.of(side, group), found.full(group, side)
    if full is None or not cells:
        return
    smaller, not_smaller, never = [], [], []
    for method in methods(cells):
        points = [cell for cell in cells if cell.method == method]
        stored = _smallest_stored(found, points)
        entry = (stored or 0, f"`{method}`" + (f" {stored / _MIB:.1f}" if stored is not None else ""))
        (never if stored is None else smaller if stored < full.stored else not_smaller).append(entry)
    named = [", ".join(name for _, name in sorted(entries)) for entries in (smaller, not_smaller, never)]
    answered = found.on_answered(full)
    asked = f"{_weight(len(full.scores))}, of which the whole cache answers {answered.samples if answered else 0}"
    amounts = max(len([cell for cell in cells if cell.method == method]) for method in methods(cells))
    yield (
        f"- {group}, {side} ({asked} with {full.stored / _MIB:.1f} MiB; at most {amounts} points a method): "
        f"{named[0] or 'none'}"
        + (f"; no smaller than the whole cache: {named[1]}" if named[1] else "")
        + (f"; at no point: {named[2]}" if named[2] else "")
        + "."
    )


def _smallest_stored(found: Comparison, points: Sequence[Answered]) -> int | None:
    """Bytes of the smallest of a method's points that, like all that store as much or more, still answers."""
    failed = [one.stored for one in points if (kept := found.on_answered(one)) is None or kept.value < NEARLY]
    passed = [one.stored for one in points if one.stored > max(failed, default=-1)]
    return min(passed, default=None)
