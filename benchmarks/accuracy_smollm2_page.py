"""docs/results/accuracy-smollm2.md: written from the two results alone, between its marks.

    python -m benchmarks.accuracy_smollm2_page

Nothing here depends on who wins: every sentence follows from the figures, and a difference that chance explains is
none (exact sign test over the questions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from benchmarks import accuracy_kvpress, accuracy_smollm2, machine
from benchmarks.accuracy_page import BEGIN, END
from benchmarks.accuracy_smollm2_cells import KVPRESS, OURS, Answered, Comparison, Group, methods, read
from benchmarks.accuracy_smollm2_figures import against_budget, against_bytes
from kvc_trt.accuracy.cell import Mean
from kvc_trt.accuracy.paired import CHANCE, difference, sign_test
from kvc_trt.atomic_files import write_whole

PAGE = machine.ROOT / "docs" / "results" / "accuracy-smollm2.md"
IMAGES = machine.ROOT / "docs" / "images"
CLAIMED = ("rocketkv", "hybrid")
"""The policies that are set against every press."""
NEARLY = 0.9
"""Share of what the whole cache answers from which a method is said to answer still."""
PANELS = 3
"""Groups side by side in one figure."""
_MIB = 1 << 20


def main() -> None:
    """Write the figures and the page's measured part."""
    results = machine.RESULTS
    found = read(results / f"{accuracy_smollm2.NAME}.json", results / f"{accuracy_kvpress.NAME}.json")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"error: {PAGE} has no marks {BEGIN} ... {END}")
    images = dict(_images(found))
    for name, image in images.items():
        write_whole(IMAGES / name, image)
    write_whole(PAGE, f"{before}{BEGIN}\n\n{measured(found, list(images))}\n\n{END}{after}".encode())
    print(PAGE)


def measured(found: Comparison, images: Sequence[str] = ()) -> str:
    """The part of the page between the marks."""
    parts = [
        _head(found),
        *_asked(found),
        *(f"![{name.removesuffix('.png')}](../images/{name})" for name in images),
        *_smallest(found),
        *_among_ours(found),
        *_beside_kvpress(found),
        *(part for group in found.groups for part in _group(found, group)),
        *_rest(found),
    ]
    return "\n\n".join(parts)


def _images(found: Comparison) -> Iterator[tuple[str, bytes]]:
    for kind, groups in groupby(sorted(found.groups, key=_kind), key=_kind):
        chosen = list(groups)
        for first in range(0, len(chosen), PANELS):
            some, number = chosen[first : first + PANELS], f"-{first // PANELS + 1}" if len(chosen) > PANELS else ""
            yield f"accuracy-smollm2-{kind}-bytes{number}.png", against_bytes(found, some)
            yield f"accuracy-smollm2-{kind}-budget{number}.png", against_budget(found, some)


def _kind(group: Group) -> str:
    return "likelihood" if group.task == "log-summary" else "answers"


def _head(found: Comparison) -> str:
    ours, theirs = found.ours["machine"], found.theirs.get("machine")
    settings, spent = found.ours["settings"], found.ours["spent"]
    lines = [
        f"`make bench-accuracy-smollm2`, commit {ours['commit']}, kvc-trt {ours['versions']['kvc_trt']}, ONNX Runtime "
        f"{ours['versions']['onnxruntime']}, {ours['device']}, {settings['weights']}; {spent['processor_seconds']:,} s "
        f"of processor time.",
        f"Seed {settings['seed']}, greedy; longest answers in tokens: "
        f"{', '.join(f'{task} {room}' for task, room in settings['max_new_tokens'].items())}.",
    ]
    if theirs is not None:
        versions = theirs["versions"]
        lines.append(
            f"kvpress {versions['kvpress']}, transformers {versions['transformers']}, torch {versions['torch']}, "
            f"commit {theirs['commit']}; {found.theirs['seconds']:,} s of wall time."
        )
    return "\n".join(lines)


def _asked(found: Comparison) -> Iterable[str]:
    """What the whole cache answers, in both engines, and what was not asked."""
    yield "## What the model answers with its whole cache"
    yield (
        "Percent of the questions with Wilson's 95 % interval, or nats per token ± one standard error. The last column "
        "says on how many questions kvc-trt and transformers, which read the same token ids, come to the same score "
        "(likelihoods: to within 0.001)."
    )
    lines = ["| questions | n | kvc-trt | transformers | equal |", "|---|---|---|---|---|"]
    for group in found.groups:
        ours, theirs = found.full(group), found.full(group, KVPRESS)
        if ours is None:
            continue
        equal = "not asked" if theirs is None else _equal(ours, theirs)
        other = "not asked" if theirs is None else f"{_value(theirs)} (n {len(theirs.scores)})"
        lines.append(f"| {group} | {len(ours.scores)} | {_value(ours)} | {other} | {equal} |")
    yield "\n".join(lines)
    if missing := _missing(found):
        yield "**Not run yet**: " + "; ".join(missing) + ". The same command asks them later and keeps what is here."


def _equal(ours: Answered, theirs: Answered) -> str:
    pairs = list(zip(ours.scores, theirs.scores, strict=False))
    return f"{sum(abs(a - b) <= 1e-3 for a, b in pairs)} of {len(pairs)}"


def _missing(found: Comparison) -> list[str]:
    """Stages of the core grid with questions that were not asked."""
    missing = []
    for name, stage in accuracy_smollm2.CORE.items():
        asked = [
            (cell := found.full(Group(g.task, g.mode, g.length, g.framing))) is not None
            and len(cell.scores) >= stage.asked
            for g in stage.groups
        ]
        if not all(asked):
            missing.append(f"`{name}` ({sum(asked)} of {len(asked)} groups have all {stage.asked} questions)")
    return missing


def _beside_kvpress(found: Comparison) -> Iterable[str]:
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
        f"**Bold**: the policy is better; *italic*: the press is; plain: equally good methods would differ as much in "
        f"more than {CHANCE:.0%} of such measurements (exact sign test)."
    )
    yield "\n".join(line for group in groups for line in _sentences(found, group))
    for group in groups:
        yield f"### {group}"
        yield "\n".join(_comparisons(found, group))


def _comparisons(found: Comparison, group: Group) -> Iterator[str]:
    presses = methods(found.of(KVPRESS, group))
    yield "| policy | against | " + " | ".join(f"`{press}`" for press in presses) + " |"
    yield "|---|---|" + "---|" * len(presses)
    for policy in CLAIMED:
        for budget in accuracy_smollm2.BUDGETS:
            mine = found.cell(OURS, group, policy, f"budget {budget}")
            points = [f"budget {budget}", *([f"bytes of rocketkv {budget}"] if policy == "rocketkv" else [])]
            for point in points if mine is not None else ():
                row = [_against(mine, found.cell(KVPRESS, group, press, point)) for press in presses]
                what = "equal token budget" if point.startswith("budget") else "equal bytes"
                yield f"| `{policy}` {budget} | {what} | " + " | ".join(row) + " |"


def _against(mine: Answered | None, other: Answered | None) -> str:
    if mine is None or other is None or (gained := difference(mine.scores, other.scores)) is None:
        return "n/a"
    digits, scale = (3, 1) if mine.likelihood else (1, 100)
    text = f"{scale * gained.value:+.{digits}f} ± {scale * gained.standard_error:.{digits}f} ({gained.samples})"
    return {"better": f"**{text}**", "worse": f"*{text}*", "equal": text}[_verdict(mine, other)]


def _verdict(mine: Answered, other: Answered) -> str:
    """better, worse, or equal as far as chance allows to say."""
    gained = difference(mine.scores, other.scores)
    if gained is None or sign_test(mine.scores, other.scores) > CHANCE:
        return "equal"
    return "better" if (gained.value < 0) == mine.likelihood else "worse"


def _sentences(found: Comparison, group: Group) -> Iterator[str]:
    """What the table of a group says of RocketKV, in words."""
    presses = methods(found.of(KVPRESS, group))
    for budget in accuracy_smollm2.BUDGETS:
        mine = found.cell(OURS, group, CLAIMED[0], f"budget {budget}")
        for point, what in ((f"budget {budget}", "equal tokens"), (f"bytes of rocketkv {budget}", "equal bytes")):
            others = [cell for press in presses if (cell := found.cell(KVPRESS, group, press, point)) is not None]
            if mine is not None and others:
                asked = min(len(mine.scores), *(len(one.scores) for one in others))
                named = _verdicts(mine, others)
                yield f"- {group}, budget {budget}, {what} (n {asked}): `{CLAIMED[0]}` is {named}."


def _verdicts(mine: Answered, others: Sequence[Answered]) -> str:
    """better than these, not told from those, worse than the rest."""
    words = {"better": "better than", "equal": "not told from", "worse": "worse than"}
    verdicts = {name: [f"`{one.method}`" for one in others if _verdict(mine, one) == name] for name in words}
    return "; ".join(f"{words[name]} {', '.join(found)}" for name, found in verdicts.items() if found)


def _smallest(found: Comparison) -> Iterator[str]:
    """Per group, the methods by the fewest bytes with which they still answer nearly what the whole cache answers."""
    groups = [group for group in found.groups if (full := found.full(group)) is not None and not full.likelihood]
    if not groups:
        return
    yield "## The smallest cache that still answers"
    yield (
        f"MiB of cache for one sequence at the smallest point asked where a method answers {NEARLY:.0%} of the "
        f"questions that its whole cache answers, kvc-trt's policies and kvpress's presses together."
    )
    yield "\n".join(_smallest_line(found, group) for group in groups)


def _smallest_line(found: Comparison, group: Group) -> str:
    fewest: dict[str, int] = {}
    names: list[str] = []
    for cell in (*found.of(OURS, group), *found.of(KVPRESS, group)):
        name = f"`{cell.method}`" + (" of kvpress" if cell.side == KVPRESS else "")
        kept = found.on_answered(cell)
        if name not in names:
            names.append(name)
        if kept is not None and kept.value >= NEARLY:
            fewest[name] = min(cell.stored, fewest.get(name, cell.stored))
    reached = [f"{name} {fewest[name] / _MIB:.1f}" for name in sorted(fewest, key=lambda one: fewest[one])]
    never = [name for name in names if name not in fewest]
    missed = f"; at no point: {', '.join(never)}" if never else ""
    return f"- {group}: {', '.join(reached) or 'none'}{missed}."


def _among_ours(found: Comparison) -> Iterator[str]:
    """RocketKV beside our other policies at the same budget."""
    yield "## RocketKV beside the other policies at equal token budgets"
    lines = []
    for group in found.groups:
        for budget in accuracy_smollm2.BUDGETS:
            mine = found.cell(OURS, group, CLAIMED[0], f"budget {budget}")
            others = [
                one for one in found.of(OURS, group) if one.point == f"budget {budget}" and one.method != CLAIMED[0]
            ]
            if mine is not None and others:
                asked = f"n {len(mine.scores)}"
                lines.append(f"- {group}, budget {budget} ({asked}): `{CLAIMED[0]}` is {_verdicts(mine, others)}.")
    yield "\n".join(lines)


def _group(found: Comparison, group: Group) -> Iterator[str]:
    """All cells of one group: our policies, and kvpress's presses folded away."""
    yield f"## {group}"
    if (full := found.full(group)) is not None:
        yield f"Whole cache: {_value(full)} (n {len(full.scores)}), {full.stored / _MIB:.1f} MiB for one sequence."
    if ours := found.of(OURS, group):
        yield _table(found, "policy", ours)
    if theirs := found.of(KVPRESS, group):
        table = _table(found, "press", theirs)
        yield f"<details><summary>kvpress's presses, {group}</summary>\n\n{table}\n\n</details>"


def _table(found: Comparison, heading: str, cells: Sequence[Answered]) -> str:
    """A row per method and point."""
    likelihood = cells[0].likelihood
    columns = (
        (heading, "at", "stored, MiB", "n", "nats per token", "above the whole cache")
        if likelihood
        else (heading, "at", "stored, MiB", "n", "answered (95 %)", "minus the whole cache", "of what that answers (n)")
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for cell in cells:
        row = [f"`{cell.method}`", cell.point, f"{cell.stored / _MIB:.1f}", str(len(cell.scores)), _value(cell)]
        lost = found.lost(cell)
        if likelihood:
            row.append(_signed(lost, 1, 3))
        else:
            kept = found.on_answered(cell)
            row += [_signed(lost, 100, 1), "n/a" if kept is None else f"{kept} ({kept.samples})"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _value(cell: Answered) -> str:
    if cell.likelihood:
        return f"{cell.mean.value:.3f} ± {cell.mean.standard_error:.3f}"
    low, high = cell.interval
    return f"{100 * cell.mean.value:.1f} % ({100 * low:.0f}-{100 * high:.0f})"


def _signed(one: Mean | None, scale: float, digits: int) -> str:
    if one is None:
        return "n/a"
    return f"{scale * one.value:+.{digits}f} ± {scale * one.standard_error:.{digits}f}"


def _rest(found: Comparison) -> Iterable[str]:
    reasons: Mapping[str, None] = dict.fromkeys(
        f"- `{policy}`{'' if budget is None else f' {budget}'}, {group}: {reason}"
        for group, policy, budget, reason in found.absent
    )
    if reasons:
        yield "<details><summary>Why n/a</summary>\n\n" + "\n".join(reasons) + "\n\n</details>"


if __name__ == "__main__":
    main()
