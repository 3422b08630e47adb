"""Sentences that follow from the real model's accuracy, whoever they favour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, methods
from benchmarks.accuracy.smollm2.comparisons import (
    BYTES,
    ENOUGH,
    NO_MORE_BYTES,
    TOKENS,
    Compared,
    beside_policies,
    beside_presses,
)
from benchmarks.accuracy.smollm2.stages import LEFT_OUT, ROCKETKV
from benchmarks.page import bullet, paragraph, span

NEARLY = 0.9
"""Share of the whole cache's right answers from which a method counts as answering nearly as well."""
MIB = 1 << 20
KINDS = {
    "query-aware": "on questions in the prompt",
    "query-agnostic": "on questions after compaction",
    "log-summary": "on the likelihood of a summary",
}
"""Groups that are counted together: by task, or else by mode."""


def kind_of(group: Group) -> str:
    """Return the key of KINDS that a group belongs to."""
    return group.task if group.task in KINDS else group.mode


def beside_others(found: Comparison) -> Iterator[str]:
    """Yield how often RocketKV is better or worse than each method, over all groups and budgets of a kind together."""
    asked = [group for group in found.groups if found.of(OURS, group)]
    for kind, heading in KINDS.items():
        groups = [group for group in asked if kind_of(group) == kind]
        ours = [row for group in groups for row in beside_policies(found, group)]
        presses = [row for group in groups for row in beside_presses(found, group) if row.mine.method == ROCKETKV]
        lines = [
            bullet(f"{who}. {'. '.join(said)}.")
            for who, rows, shares in (
                ("Our policies", ours, {NO_MORE_BYTES: "With *no more bytes*", TOKENS: "At an *equal token budget*"}),
                ("kvpress", presses, {BYTES: "At *equal bytes*", TOKENS: "At an *equal token budget*"}),
            )
            if (said := list(_records(rows, shares)))
        ]
        if lines:
            place = f" ({'; '.join(group.short for group in groups)})" if len(groups) > 1 else ""
            yield "\n".join([paragraph(f"**`{ROCKETKV}` {heading}**{place}:"), *lines])


def _records(rows: Sequence[Compared], shares: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each shared property: the methods that a policy never beats, and those that it beats, with the
    counts.

    Policies that were asked two groups alone stand in the table and in the CSV.
    """
    judged = [row for row in rows if row.verdict not in (None, "too few") and not _aside(row)]
    for alike, words in shares.items():
        never: list[tuple[float, str, str]] = []
        often: list[tuple[float, str, str]] = []
        for method in dict.fromkeys(row.method for row in judged if row.alike == alike):
            mine = [row for row in judged if (row.method, row.alike) == (method, alike)]
            better, worse = (sum(row.verdict == verdict for row in mine) for verdict in ("better", "worse"))
            if better:
                told = f"{better} of {len(mine)}" + (f"; worse in {worse}" if worse else "")
                often.append((better / len(mine), method, told))
            else:
                told = f"worse in {worse} of {len(mine)}" if worse else f"nor worse in {len(mine)}"
                never.append((worse / len(mine), method, told + _bytes(mine)))
        both = (("**never better than**", never), ("better than", often))
        if said := "; ".join(f"{how} {_listed(found)}" for how, found in both if found):
            yield f"{words}: {said}"


def _aside(row: Compared) -> bool:
    return row.other is not None and row.other.side == OURS and row.method in LEFT_OUT


def _listed(found: Sequence[tuple[float, str, str]]) -> str:
    """Methods by how often, those with the same figures together."""
    named: dict[str, list[str]] = {}
    for _, method, told in sorted(found, key=lambda one: -one[0]):
        named.setdefault(told, []).append(f"`{method}`")
    return ", ".join(f"{', '.join(names)} ({told})" for told, names in named.items())


def _bytes(rows: Sequence[Compared]) -> str:
    """Return the other's bytes as a share of RocketKV's, in words; empty if they are equal."""
    shares = sorted(row.other.stored / row.mine.stored for row in rows if row.other is not None)
    said = span(f"{share:.2f}" for share in shares)
    return "" if said == "1.00" else f", with {said} of the bytes"


def by_group(found: Comparison) -> Iterator[str]:
    """Yield RocketKV's share of the whole cache's answers by group, and the smallest caches that still answer."""
    for group in found.groups:
        full = found.full(group)
        mine = [one for one in found.of(OURS, group) if one.method == ROCKETKV]
        if full is None or full.likelihood or not mine:
            continue
        kept = ", ".join(f"{100 * one.value:.0f}" for cell in mine if (one := found.on_answered(cell)) is not None)
        smallest = "; ".join(said for side in (OURS, KVPRESS) if (said := _smallest_of(found, group, side)))
        answered = sum(full.scores)
        yield bullet(
            f"**{group.short.capitalize()}**: {kept} % of {answered:g} answers"
            + (f"; {100 * NEARLY:.0f} % need, of {full.stored / MIB:.1f} MiB: {smallest}." if smallest else ".")
        )


def _smallest_of(found: Comparison, group: Group, side: str) -> str:
    """Return the methods that answer nearly as well as the whole cache with fewer bytes, by the fewest bytes from which
    on they do."""
    cells, full = [cell for cell in found.of(side, group) if len(cell.scores) >= ENOUGH], found.full(group, side)
    if full is None or not cells:
        return ""
    stored = {name: smallest_stored(found, [one for one in cells if one.method == name]) for name in methods(cells)}
    enough = sorted((size, name) for name, size in stored.items() if size is not None and size < full.stored)
    named = ", ".join(f"`{name}` {size / MIB:.1f}" for size, name in enough) or "none"
    return f"{'kvpress ' if side == KVPRESS else ''}{named}"


def smallest_stored(found: Comparison, points: Sequence[Answered]) -> int | None:
    """Return the bytes of the smallest of a method's points that still answers, as all larger ones do.

    Of points that store the same, one with a larger budget, which stands behind it, is the larger.
    """
    smallest = None
    for _, point in sorted(enumerate(points), key=lambda placed: (placed[1].stored, placed[0]), reverse=True):
        kept = found.on_answered(point)
        if kept is None or kept.value < NEARLY:
            break
        smallest = point.stored
    return smallest
