"""docs/results/accuracy-formats.md, its figure and its CSV file: written from the results alone.

    python -m benchmarks.accuracy.formats.page

Nothing here depends on who wins: every sentence follows from the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.accuracy.formats import answers, divergence
from benchmarks.accuracy.formats.claims import at_equal_bytes, costs, smallest
from benchmarks.accuracy.formats.figure import over_bytes
from benchmarks.accuracy.formats.losses import in_nats
from benchmarks.accuracy.formats.methods import in_format, split
from benchmarks.accuracy.formats.recorded import OPENVINO, Formats, caches, peers, recorded
from benchmarks.accuracy.smollm2.cells import KVPRESS, OURS, Answered
from benchmarks.accuracy.smollm2.stages import SAMPLES
from benchmarks.page import DOCS, IMAGES, Marks, cells, measured_by, paragraph, plot, table
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.policies import BASELINE

PAGE = DOCS / "accuracy-formats.md"
CELLS = DOCS / "accuracy-formats.csv"
IMAGE = IMAGES / "accuracy-formats.png"
MARKS = Marks.of("accuracy/formats/page.py")
MIB = 1 << 20
PLACE = ("task", "mode", "length", "framing")
COLUMNS = (
    "engine", "what", *PLACE, "method", "format", "point", "stored_bytes", "asked", "mean", "low", "high",
    "minus_whole_cache", "minus_same_in_fp32",
)  # fmt: skip
"""Columns of the CSV file. `what` is answers (shares of the questions with Wilson's 95 % interval), nats (a token of a
true continuation) or divergence (nats a token along plain text, from the whole cache in fp32; `length` is the text's).
Differences are means over the same questions or texts."""


def main() -> None:
    """Write the figure, the CSV file and the page's measured part."""
    try:
        found = recorded()
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    write_whole(IMAGE, over_bytes(found))
    write_whole(CELLS, sidecar(found).encode())
    MARKS.replace(PAGE, measured(found))
    print(PAGE)


def measured(found: Formats) -> str:
    """Return the part of the page between the marks."""
    parts = [
        "## Claims", *costs(found), *at_equal_bytes(found), *smallest(found),
        "## Answers over the bytes of one sequence", plot(IMAGE, PAGE),
        "## Every cache",
        paragraph(
            "Points and nats are beside the whole cache in fp32, whose own are in the first row, on the same "
            f"questions; in brackets how many, where they are fewer than {SAMPLES}. Divergence is from that cache too."
        ),
        overview(found),
        "## How it was measured", _head(found),
    ]  # fmt: skip
    return "\n\n".join(parts)


def overview(found: Formats) -> str:
    """Return a row per method, budget and format, and for the peers' at the same budgets; a column per group."""
    groups, lengths = found.groups, found.lengths
    heads = ["cache", "MiB"]
    heads += [f"{group.short}, {'nats' if in_nats(found, group) else 'points'}" for group in groups]
    heads += [f"divergence, {length:,}" for length in lengths]
    rows = []
    for method, budget in caches():
        for form in CACHE_FORMATS:
            at = [found.cell(group, method, form, budget) for group in groups]
            along = budget in (None, divergence.BUDGET)
            nats = [_diverged(found, length, method, form) if along else "-" for length in lengths]
            rows.append([_name(method, budget, form), *_figures(found, at), *nats])
    for side, method, point in _peers(found):
        at = [
            next(
                (one for one in peers(found, group) if (one.side, one.method, one.point) == (side, method, point)), None
            )
            for group in groups
        ]
        rows.append([f"{side} `{method}`, {point}", *_figures(found, at), *["-"] * len(lengths)])
    return table(heads, rows)


def _peers(found: Formats) -> list[tuple[str, str, str]]:
    """Return the points of other engines on the page: presses at our budgets, OpenVINO at all of its points."""
    points = [f"budget {budget}" for budget in answers.BUDGETS]
    cells = [cell for group in found.groups for cell in peers(found, group)]
    shown = sorted(cells, key=lambda cell: ((KVPRESS, OPENVINO).index(cell.side), cell.method, cell.stored))
    return list(
        dict.fromkeys((one.side, one.method, one.point) for one in shown if one.side == OPENVINO or one.point in points)
    )


def _name(method: str, budget: int | None, form: str) -> str:
    return f"`{in_format(method, form)}`" + ("" if budget is None else f" {budget}")


def _figures(found: Formats, at: Sequence[Answered | None]) -> list[str]:
    """Return the largest MiB stored, which differs by the answers' room, and the shares answered."""
    known = [one for one in at if one is not None]
    return [f"{max(one.stored for one in known) / MIB:.1f}" if known else "-", *(_figure(found, one) for one in at)]


def _figure(found: Formats, cell: Answered | None) -> str:
    if cell is None:
        return "-"
    beside = found.beside_whole(cell)
    count = len(cell.scores) if beside is None else beside.samples
    few = f" ({count})" if count < SAMPLES else ""
    if cell is found.answered.full(cell.group):
        return (f"{cell.mean.value:.2f} nats" if cell.likelihood else f"{100 * cell.mean.value:.0f} %") + few
    if beside is None:
        return "-"
    return (f"{beside.value:+.3f}" if cell.likelihood else f"{100 * beside.value:+.0f}") + few


def _diverged(found: Formats, length: int, method: str, form: str) -> str:
    values = found.divergences(length, method, form).from_whole
    return f"{sum(values) / len(values):.4f}" if values else "-"


def sidecar(found: Formats) -> str:
    """Everything that is known as CSV."""
    return cells(COLUMNS, [*_answer_rows(found), *_divergence_rows(found)])


def _answer_rows(found: Formats) -> Iterator[tuple[object, ...]]:
    for group in found.groups:
        whole = found.answered.full(group)
        for cell in [*([whole] if whole else []), *found.answered.of(OURS, group), *peers(found, group)]:
            method, form = split(cell.method) if cell.side == OURS else (cell.method, "")
            form = form or ("u8" if cell.side == OPENVINO else "auto")
            low, high = (None, None) if cell.likelihood else cell.interval
            lost, own = found.answered.lost(cell), found.answered.cell(cell.side, group, method, cell.point)
            count = 0 if own is None else min(len(own.scores), len(cell.scores))
            same = sum(cell.scores[:count]) / count - sum(own.scores[:count]) / count if own and count else None
            yield (
                cell.side, "nats" if cell.likelihood else "answers", *group, method, form, cell.point, cell.stored,
                len(cell.scores), cell.mean.value, low, high, lost and lost.value, same,
            )  # fmt: skip


def _divergence_rows(found: Formats) -> Iterator[tuple[object, ...]]:
    for length, method in found.followed:
        point = BASELINE if method == BASELINE else f"budget {divergence.BUDGET}"
        for form in CACHE_FORMATS:
            one = found.divergences(length, method, form)
            count = len(one.from_whole)
            mean, own = (sum(values) / count for values in (one.from_whole, one.from_own))
            yield (
                OURS, "divergence", "plain text", None, length, None, method, form, point, one.row_bytes, count,
                mean, None, None, mean, own,
            )  # fmt: skip


def _head(found: Formats) -> str:
    ours, spent = found.answered.ours["machine"], found.answered.ours["spent"]
    command = "python -m benchmarks.accuracy.formats.answers"
    said = f"{measured_by(command, ours, found.answered.ours['settings']['weights'])}; {spent['seconds']:,} s."
    said += f" Questions of a group: {_asked(found)}. Seed 0, greedy."
    if found.diverged:
        texts = ", ".join(f"{_texts(found, length)} of {length:,}" for length in found.lengths)
        said += " Divergence: `python -m benchmarks.accuracy.formats.divergence`, commit "
        said += f"{found.diverged['machine']['commit']}; texts: {texts} tokens, of which the last "
        said += f"{divergence.CONTINUED} are followed, token budget {divergence.BUDGET}."
    if found.answered.theirs:
        theirs = found.answered.theirs["machine"]
        said += f" kvpress {theirs['versions']['kvpress']}, commit {theirs['commit']}."
    if found.eviction:
        said += f" OpenVINO GenAI {found.eviction['openvino_genai']}, commit {found.eviction['machine']['commit']}."
    return paragraph(said)


def _asked(found: Formats) -> str:
    counts = {len(cell.scores) for cell in found.answered.cells if cell.side == OURS}
    return str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _texts(found: Formats, length: int) -> int:
    return len(found.divergences(length, BASELINE, "auto").from_whole)


if __name__ == "__main__":
    main()
