"""docs/results/accuracy-turns.md and the table of docs/conversations.md: written from the results alone.

    python -m benchmarks.accuracy.turns_page

Nothing here depends on who wins. A difference between two forms is of the same questions, pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy import turns as accuracy_turns
from benchmarks.page import DOCS, Marks, measured_by, reasons, share, table
from kvc_trt.accuracy.cell import Mean, mean, paired_difference
from kvc_trt.accuracy.grid import SECOND_QUESTION, STORED_CONTEXT
from kvc_trt.policies import BASELINE

PAGE = DOCS / "accuracy-turns.md"
SUMMARY = machine.ROOT / "docs" / "conversations.md"
MARKS = Marks.of("accuracy/turns_page.py")
FORMS = {
    "query-aware": "one shot", SECOND_QUESTION: "turn", STORED_CONTEXT: "stored context",
    "query-agnostic": "decode steps",
}  # fmt: skip
"""Modes, and the form in which the question reaches the model."""
LATE = (SECOND_QUESTION, STORED_CONTEXT)
"""Forms that are compared with one shot."""
ENOUGH = 64
"""Questions below which a difference is not judged."""
NOTICEABLE = 2.0
"""Standard errors."""

Result = Mapping[str, Any]
Scores = Mapping[tuple[str, str], Sequence[float]]
"""Scores of all questions, by policy and mode."""


def main() -> None:
    """Write both pages."""
    for path, text in texts(read(store.RESULTS)).items():
        MARKS.replace(path, text)
        print(path)


def read(directory: Path) -> dict[str, Result]:
    """Return the results that are there, by model."""
    found = {name: directory / f"{accuracy_turns.NAME}-{name}.json" for name in accuracy_turns.MODELS}
    return {name: store.read(path) for name, path in found.items() if path.is_file()}


def texts(results: Mapping[str, Result]) -> dict[Path, str]:
    """Return the text between the marks of each page."""
    if not results:
        return dict.fromkeys((PAGE, SUMMARY), "Not measured yet.")
    whole = "\n\n".join(part for name, result in results.items() for part in measured(name, result))
    return {PAGE: whole, SUMMARY: summary(results)}


def measured(name: str, result: Result) -> Iterator[str]:
    """Yield the part of the page on one model."""
    spent, settings, record = result["spent"], result["settings"], result["machine"]
    first = result["cells"][0]
    scores = scores_of(result)
    yield f"## {name}"
    yield (
        f"{measured_by(f'python -m benchmarks.accuracy.turns --models {name}', record)}; "
        f"{spent['processor_seconds']:,} s of processor time.\n"
        f"Task `{first['task']}`, {first['length']:,} tokens, {first['framing']}, weights {settings['weights']}, seed "
        f"{settings['seed']}, greedy, at most {first['max_new_tokens']} tokens per answer. Percent of n questions with "
        "Wilson's 95 % interval; the last columns compare the same questions in two forms."
    )
    heads = ["policy", "budget", *FORMS.values(), *(f"{FORMS[mode]} minus one shot" for mode in LATE)]
    budgets = {cell["policy"]: str(cell["token_budget"]) for cell in result["cells"] if "token_budget" in cell}
    rows = []
    for policy in dict.fromkeys(cell["policy"] for cell in result["cells"]):
        shares = [_share(scores.get((policy, mode))) for mode in FORMS]
        differences = [_difference(scores, policy, mode) for mode in LATE]
        rows.append([f"`{policy}`", budgets.get(policy, "-"), *shares, *differences])
    yield table(heads, rows)
    yield from reasons(f"`{c['policy']}`, {FORMS[c['mode']]}: {c['reason']}" for c in result["cells"] if "reason" in c)


def summary(results: Mapping[str, Result]) -> str:
    """One table of both models: the share answered in one shot, and as a turn."""
    found = {name: scores_of(result) for name, result in results.items()}
    heads = ["policy", *(f"{name}, {form}" for name in found for form in ("one shot", "turn"))]
    modes = ("query-aware", SECOND_QUESTION)
    rows = [
        [f"`{policy}`", *(_short(scores.get((policy, mode))) for scores in found.values() for mode in modes)]
        for policy in dict.fromkeys(policy for scores in found.values() for policy, _ in scores)
    ]
    asked = "; ".join(
        f"{name}: task `{one['cells'][0]['task']}`, {one['cells'][0]['length']:,} tokens, token budget "
        f"{accuracy_turns.MODELS[name].budget}, n = {_asked(found[name])}"
        for name, one in results.items()
    )
    return f"Percent ± one standard error. {asked}.\n\n{table(heads, rows)}"


def scores_of(result: Result) -> dict[tuple[str, str], Sequence[float]]:
    """Return the scores of the cells that have some."""
    return {(cell["policy"], cell["mode"]): cell["scores"] for cell in result["cells"] if cell.get("scores")}


def _asked(scores: Scores) -> str:
    counts = sorted({len(one) for one in scores.values()})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _share(scores: Sequence[float] | None) -> str:
    return "n/a" if scores is None else share(mean(scores), f"; {len(scores)}")


def _short(scores: Sequence[float] | None) -> str:
    return "n/a" if scores is None else str(mean(scores))


def _difference(scores: Scores, policy: str, late: str) -> str:
    one_shot, turn = scores.get((policy, "query-aware")), scores.get((policy, late))
    if not one_shot or not turn:
        return "n/a"
    count = min(len(one_shot), len(turn))
    found = paired_difference(turn[:count], one_shot[:count])
    return f"{100 * found.value:+.1f} ± {100 * found.standard_error:.1f}{_verdict(found, policy)}"


def _verdict(found: Mean, policy: str) -> str:
    if found.samples < ENOUGH:
        return f" (n {found.samples}: not judged)"
    if policy != BASELINE and abs(found.value) >= NOTICEABLE * found.standard_error > 0:
        return ": fewer answers" if found.value < 0 else ": more answers"
    return ""


if __name__ == "__main__":
    main()
