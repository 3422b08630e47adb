"""docs/results/accuracy-smollm2.md: written from the two results alone, between its marks.

    python -m benchmarks.accuracy.smollm2.page

Nothing here depends on who wins: every sentence follows from the figures, and a difference that chance explains is
none (exact sign test over the questions, corrected for how many are made).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from benchmarks import machine
from benchmarks.accuracy.kvpress import answers as accuracy_kvpress
from benchmarks.accuracy.smollm2 import grid as accuracy_smollm2
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered, Comparison, Group, read
from benchmarks.accuracy.smollm2.claims import among_ours, beside_kvpress, signed, smallest
from benchmarks.accuracy.smollm2.figures import against_budget, against_bytes
from benchmarks.accuracy.smollm2.pools import pools
from benchmarks.accuracy.smollm2.stages import CORE, Stage
from kvc_trt.accuracy.cell import Mean, interval
from kvc_trt.accuracy.grid import QuestionGroup
from kvc_trt.atomic_files import write_whole
from kvc_trt.errors import InputError
from kvc_trt.policies import BASELINE

PAGE = machine.ROOT / "docs" / "results" / "accuracy-smollm2.md"
BEGIN = "<!-- measured: begin (benchmarks/accuracy/smollm2/page.py writes this part) -->"
END = "<!-- measured: end -->"
IMAGES = machine.ROOT / "docs" / "images"
PANELS = 3
"""Groups side by side in one figure."""
UNANSWERED = 0.1
"""Share of a group's questions from which on its answers tell something of a policy."""
_MIB = 1 << 20


def main() -> None:
    """Write the figures and the page's measured part."""
    results = machine.RESULTS
    try:
        found = read(results / f"{accuracy_smollm2.NAME}.json", results / f"{accuracy_kvpress.NAME}.json")
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
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
        *pools(found),
        *smallest(found),
        *among_ours(found),
        *beside_kvpress(found),
        *(part for group in found.groups for part in _group(found, group)),
        *_rest(found),
    ]
    return "\n\n".join(parts)


def _images(found: Comparison) -> Iterator[tuple[str, bytes]]:
    drawn = [group for group in found.groups if found.of(OURS, group)]
    for kind, groups in groupby(sorted(drawn, key=_kind), key=_kind):
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
        "Percent of the questions with Wilson's 95 % interval and n, or nats per token ± one standard error. What the "
        "whole cache does not answer tells nothing of a policy."
    )
    lengths = sorted({group.length for group in found.groups})
    lines = [
        "| questions | " + " | ".join(f"{one:,} tokens" for one in lengths) + " |",
        "|---" * (1 + len(lengths)) + "|",
    ]
    for place in dict.fromkeys(group._replace(length=0) for group in found.groups):
        cells = [found.full(place._replace(length=length)) for length in lengths]
        row = ["not asked" if cell is None else _value(cell, len(cell.scores)) for cell in cells]
        lines.append(f"| {place.task}, {place.mode}, {place.framed} | " + " | ".join(row) + " |")
    yield "\n".join(lines)
    if unanswered := list(_unanswered(found)):
        yield (
            f"It answers less than {UNANSWERED:.0%} of these, so policies are not asked them: {'; '.join(unanswered)}."
        )
    equal = [
        f"- {group}: {_equal(ours, theirs)}"
        for group in found.groups
        if (ours := found.full(group)) is not None and (theirs := found.full(group, KVPRESS)) is not None
    ]
    if equal:
        yield (
            "kvc-trt and transformers read the same token ids. On how many questions that both asked with the whole "
            "cache they come to the same score (likelihoods: to within 0.001):\n\n" + "\n".join(equal)
        )
    if missing := _missing(found):
        yield "**Incomplete**: " + "; ".join(missing) + ". Running the command again continues there."


def _unanswered(found: Comparison) -> Iterator[str]:
    """Groups that only the whole cache was asked, in vain."""
    for group in found.groups:
        full = found.full(group)
        if full is not None and not full.likelihood and full.mean.value < UNANSWERED and not found.of(OURS, group):
            yield f"{group} ({100 * full.mean.value:.1f} %, n {len(full.scores)})"


def _equal(ours: Answered, theirs: Answered) -> str:
    pairs = list(zip(ours.scores, theirs.scores, strict=False))
    return f"{sum(abs(a - b) <= 1e-3 for a, b in pairs)} of {len(pairs)}"


def _missing(found: Comparison) -> list[str]:
    """Stages of the core grid with questions that were not asked, of us or of kvpress."""
    missing = []
    for name, stage in CORE.items():
        cells = [cell for group in stage.groups for cell in _cells_of(found, group, stage)]
        asked = sum(min(count, stage.asked) for count in cells)
        if asked < stage.asked * len(cells):
            missing.append(f"`{name}` ({100 * asked // (stage.asked * len(cells))} % of its answers are here)")
    return missing


def _cells_of(found: Comparison, asked: QuestionGroup, stage: Stage) -> Iterator[int]:
    """How many questions each cell of a group has that the stage asks; one with a reason has all."""
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


def _group(found: Comparison, group: Group) -> Iterator[str]:
    """All cells of one group: our policies, and kvpress's presses folded away."""
    if not found.of(OURS, group):
        return
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
        else (
            heading,
            "at",
            "stored, MiB",
            "n",
            "answered (95 %)",
            "minus the whole cache",
            "of what that answers (95 %; n)",
        )
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for cell in cells:
        row = [f"`{cell.method}`", cell.point, f"{cell.stored / _MIB:.1f}", str(len(cell.scores)), _value(cell)]
        lost = found.lost(cell)
        digits, scale = (3, 1) if likelihood else (1, 100)
        row.append("n/a" if lost is None else signed(lost, scale, digits))
        if not likelihood:
            kept = found.on_answered(cell)
            row.append("n/a" if kept is None else _share(kept, f"; {kept.samples}"))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _value(cell: Answered, asked: int | None = None) -> str:
    """The mean and its error, and of how many questions where that stands nowhere else."""
    if cell.likelihood:
        return f"{cell.mean.value:.3f} ± {cell.mean.standard_error:.3f}" + ("" if asked is None else f" ({asked})")
    return _share(cell.mean, "" if asked is None else f"; {asked}")


def _share(answered: Mean, note: str = "") -> str:
    """Percent, and Wilson's interval in brackets with a note behind it."""
    low, high = interval(answered.value, answered.samples)
    return f"{100 * answered.value:.1f} % ({100 * low:.0f}-{100 * high:.0f}{note})"


def _rest(found: Comparison) -> Iterable[str]:
    reasons: Mapping[str, None] = dict.fromkeys(
        f"- `{policy}`{'' if budget is None else f' {budget}'}, {group}: {reason}"
        for group, policy, budget, reason in found.absent
    )
    if reasons:
        yield "<details><summary>Why n/a</summary>\n\n" + "\n".join(reasons) + "\n\n</details>"


if __name__ == "__main__":
    main()
