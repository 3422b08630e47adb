"""RocketKV's policies beside every other method on the same questions, and the verdict on each pair that chance allows.

A verdict follows the statistic that its test counts. All comparisons of a side about the same questions are one family,
whose chances Holm's method corrects, and fewer questions than ENOUGH give no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from benchmarks.accuracy.kvpress.presses import ADAKV
from benchmarks.accuracy.paired import CHANCE, higher_and_lower, holm, sign_test
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy.smollm2.stages import BUDGETS, ROCKETKV, SAMPLES
from kvc_trt.policies import BASELINE

AGAINST_PRESSES = (ROCKETKV, "hybrid")
"""The policies that are set against every press."""
ENOUGH = SAMPLES
"""Questions from which a comparison decides something."""
TOKENS, BYTES, NO_MORE_BYTES = "equal token budget", "equal bytes", "no more bytes"

Pair = tuple[Answered, Answered]
Verdict = Literal["better", "equal", "worse", "too few"]
"""The verdict on a pair's first method; "equal" if chance explains the difference."""


class Compared(NamedTuple):
    """A policy beside another method."""

    mine: Answered
    method: str
    """The other's."""
    point: str
    other: Answered | None
    alike: str
    """TOKENS, BYTES or NO_MORE_BYTES."""
    verdict: Verdict | None
    """None where there is no other."""
    reason: str = ""
    """The reason why there is no other cell."""


def verdicts(pairs: Sequence[Pair]) -> dict[Pair, Verdict]:
    """Return the verdicts of a family of comparisons, with chances corrected for their number."""
    enough = [pair for pair in dict.fromkeys(pairs) if min(len(one.scores) for one in pair) >= ENOUGH]
    chances = holm([sign_test(mine.scores, other.scores) for mine, other in enough])
    found: dict[Pair, Verdict] = dict.fromkeys(pairs, "too few")
    return found | {pair: _direction(*pair, chance) for pair, chance in zip(enough, chances, strict=True)}


def _direction(mine: Answered, other: Answered, chance: float) -> Verdict:
    if chance > CHANCE:
        return "equal"
    higher, lower = higher_and_lower(mine.scores, other.scores)
    return "better" if (higher > lower) != mine.likelihood else "worse"


def beside_presses(found: Comparison, group: Group) -> list[Compared]:
    """Return each press at the policy's token budget, and at as many bytes as RocketKV stores."""
    presses = methods(found.of(KVPRESS, group))
    compared = []
    for mine, point, alike in _points(found, group):
        others = {press: found.cell(KVPRESS, group, press, point) for press in presses}
        if any(others.values()):
            compared += [
                Compared(mine, press, point, other, alike, None, "" if other else _absent(found, group, press, point))
                for press, other in others.items()
            ]
    return _judged(compared)


def _points(found: Comparison, group: Group) -> Iterator[tuple[Answered, str, str]]:
    for policy in AGAINST_PRESSES:
        for budget in BUDGETS:
            mine = found.cell(OURS, group, policy, f"budget {budget}")
            if mine is not None:
                yield mine, f"budget {budget}", TOKENS
                if policy == ROCKETKV:
                    yield mine, f"bytes of rocketkv {budget}", BYTES


def beside_policies(found: Comparison, group: Group) -> list[Compared]:
    """RocketKV beside our other policies: at its budget, and at the largest budget asked with no more bytes."""
    cells = [cell for cell in found.of(OURS, group) if cell.method != ROCKETKV]
    compared = []
    for budget in BUDGETS:
        mine = found.cell(OURS, group, ROCKETKV, f"budget {budget}")
        if mine is None:
            continue
        compared += [
            Compared(mine, one.method, one.point, one, TOKENS, None) for one in cells if one.point == mine.point
        ]
        no_larger = [cell for cell in cells if cell.stored <= mine.stored]
        largest = {cell.method: cell for cell in sorted(no_larger, key=lambda one: one.stored)}
        compared += [
            Compared(mine, name, largest[name].point, largest[name], NO_MORE_BYTES, None)
            for name in methods(cells)
            if name in largest
        ]
    return _judged(compared)


def _judged(compared: Sequence[Compared]) -> list[Compared]:
    judged = verdicts([(row.mine, row.other) for row in compared if row.other is not None])
    return [row if row.other is None else row._replace(verdict=judged[row.mine, row.other]) for row in compared]


def _absent(found: Comparison, group: Group, press: str, point: str) -> str:
    """Return the reason why a press has no cell at a point."""
    if press == ADAKV:
        return "frees no bytes"
    if found.cell(KVPRESS, group, BASELINE, point) is not None:
        return "the whole prompt fits"
    return "not asked"
