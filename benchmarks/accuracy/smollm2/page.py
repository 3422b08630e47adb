"""docs/results/accuracy-smollm2.md, its plots and its CSV files: written from the two results alone.

    python -m benchmarks.accuracy.smollm2.page

Nothing here depends on who wins: every sentence follows from the figures, and a difference that chance explains is
none (exact sign test over the questions, corrected for how many are made).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import store
from benchmarks.accuracy.kvpress import answers as kvpress
from benchmarks.accuracy.smollm2 import grid, tables
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, read
from benchmarks.accuracy.smollm2.claims import beside_others, by_group
from benchmarks.accuracy.smollm2.figures import against_bytes
from benchmarks.accuracy.smollm2.pools import pools
from benchmarks.accuracy.smollm2.stages import BUDGETS, CORE, ROCKETKV, Stage
from benchmarks.page import DOCS, IMAGES, Marks, bullet, measured_by, paragraph, plot, span
from kvc_trt.accuracy.grid import CHAT, QuestionGroup
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.policies import BASELINE

PAGE = DOCS / "accuracy-smollm2.md"
CELLS, COMPARISONS = DOCS / "accuracy-smollm2.csv", DOCS / "accuracy-smollm2-comparisons.csv"
MARKS = Marks.of("accuracy/smollm2/page.py")
UNANSWERED = 10
"""Percent of a group's questions from which on its answers tell something of a policy."""


def main() -> None:
    """Write the plots, the CSV files and the page's measured part."""
    found = recorded()
    for group in plotted(found):
        write_whole(image(group), against_bytes(found, group))
    for path, text in sidecars(found).items():
        write_whole(path, text.encode())
    MARKS.replace(PAGE, measured(found))
    print(PAGE)


def recorded() -> Comparison:
    """Return the results that are committed."""
    try:
        return read(store.recorded_path(grid.NAME), store.recorded_path(kvpress.NAME))
    except InputError as error:
        raise SystemExit(f"error: {error}") from error


def sidecars(found: Comparison) -> Mapping[Path, str]:
    """Return the CSV files beside the page, with their text."""
    return {CELLS: tables.cells(found), COMPARISONS: tables.comparisons(found)}


def plotted(found: Comparison) -> list[Group]:
    """Return the groups that a plot shows: those that policies were asked through the chat template."""
    return [group for group in found.groups if group.framing == CHAT and found.of(OURS, group)]


def image(group: Group) -> Path:
    """Return the path of a group's plot."""
    return IMAGES / f"accuracy-smollm2-{group.task}-{group.length}-{group.mode}.png"


def measured(found: Comparison) -> str:
    """Return the part of the page between the marks."""
    lists = [*by_group(found), *pools(found), *_alone(found), *_agreement(found), *_missing(found)]
    budgets = ", ".join(map(str, BUDGETS))
    parts = [
        "## Claims",
        *beside_others(found),
        f"**The whole cache's answers that `{ROCKETKV}` keeps** at {budgets}, and the MiB from which each method keeps "
        "most:\n" + "\n".join(lists),
        "## Answers at the bytes that are stored",
        "\n".join(plot(image(group), PAGE) for group in plotted(found)),
        f"## Every method at budgets {budgets}; one figure where all are alike",
        tables.overview(found),
        "## How it was measured",
        _head(found),
    ]
    return "\n\n".join(parts)


def _head(found: Comparison) -> str:
    ours, theirs = found.ours["machine"], found.theirs.get("machine")
    settings, spent = found.ours["settings"], found.ours["spent"]
    time = f"{spent['processor_seconds']:,} s of processor time"
    said = f"{measured_by('make bench-accuracy-smollm2', ours, settings['weights'])}; {time}. "
    said += f"Seed {settings['seed']}, greedy."
    if theirs is not None:
        versions = theirs["versions"]
        said += (
            f" kvpress {versions['kvpress']}, transformers {versions['transformers']}, torch {versions['torch']}, "
            f"commit {theirs['commit']}; {found.theirs['seconds']:,} s of wall time."
        )
    return paragraph(said)


def _alone(found: Comparison) -> Iterator[str]:
    """Yield the whole cache's answers in groups that no policy was asked."""
    full = [one for group in found.groups if not found.of(OURS, group) and (one := found.full(group)) is not None]
    shares = [(100 * one.mean.value, one.group.short) for one in full if not one.likelihood]
    little = [name for share, name in shares if share < UNANSWERED]
    others = sorted(share for share, _ in shares if share >= UNANSWERED)
    said = []
    if little:
        said.append(
            f"The whole cache answers less than {UNANSWERED} % of these, so policies are not asked them: "
            f"{'; '.join(little)}."
        )
    if others:
        answered = span(f"{one:.0f}" for one in others)
        said.append(f"Of the other groups that no policy was asked ({len(others)}), it answers {answered} %.")
    if said:
        yield bullet(" ".join(said))


def _agreement(found: Comparison) -> Iterator[str]:
    """Yield the number of questions on which both engines agree with the whole cache."""
    both = [
        _equal(ours, theirs)
        for group in found.groups
        if (ours := found.full(group)) is not None and (theirs := found.full(group, KVPRESS)) is not None
    ]
    if both:
        same, asked = (sum(counts) for counts in zip(*both, strict=True))
        yield bullet(
            f"With the whole cache, kvc-trt and transformers score {same} of {asked} questions alike (likelihoods: to "
            "0.001)."
        )


def _equal(ours: Answered, theirs: Answered) -> tuple[int, int]:
    pairs = list(zip(ours.scores, theirs.scores, strict=False))
    return sum(abs(a - b) <= 1e-3 for a, b in pairs), len(pairs)


def _missing(found: Comparison) -> Iterator[str]:
    """Stages of the core grid with questions that were not asked, of us or of kvpress."""
    missing = []
    for name, stage in CORE.items():
        cells = [cell for group in stage.groups for cell in _cells_of(found, group, stage)]
        asked = sum(min(count, stage.asked) for count in cells)
        if asked < stage.asked * len(cells):
            missing.append(f"`{name}` ({100 * asked // (stage.asked * len(cells))} % of its answers are here)")
    if missing:
        yield bullet(f"**Incomplete**: {'; '.join(missing)}. Running the command again continues there.")


def _cells_of(found: Comparison, asked: QuestionGroup, stage: Stage) -> Iterator[int]:
    """Yield the number of questions in each cell of a group that the stage asks; a cell with a reason has all."""
    group = Group(asked.task, asked.mode, asked.length, asked.framing)
    absent = {(policy, budget) for one, policy, budget, _ in found.absent if one == group}
    for variant in stage.variants:
        point = BASELINE if variant.token_budget is None else f"budget {variant.token_budget}"
        cell = found.cell(OURS, group, variant.policy, point)
        if (variant.policy, variant.token_budget) not in absent:
            yield 0 if cell is None else len(cell.scores)
    if stage.beside_kvpress:
        full = found.full(group, KVPRESS)
        yield 0 if full is None else len(full.scores)


if __name__ == "__main__":
    main()
