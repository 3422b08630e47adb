"""The measured part of docs/tools.md: written from the result alone.

python -m benchmarks.accuracy.tool_calls_page
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.accuracy import tool_calls
from benchmarks.page import Marks, measured_by, paragraph, reasons, share, table
from kvc_trt.accuracy.cell import mean, paired_difference

PAGE = machine.ROOT / "docs" / "tools.md"
MARKS = Marks.of("accuracy/tool_calls_page.py")


def main() -> None:
    """Write the page's measured part."""
    MARKS.replace(PAGE, text(read(store.RESULTS)))
    print(PAGE)


def read(directory: Path) -> Mapping[str, Any]:
    """Return the result of `tool_calls`."""
    return store.read(directory / f"{tool_calls.NAME}.json")


def text(result: Mapping[str, Any]) -> str:
    """Return the text between the marks of the page."""
    cells, record, spent = result["cells"], result["machine"], result["spent"]
    asked = [cell for cell in cells if cell.get("scores")]
    whole = asked[0]
    head = paragraph(
        f"{measured_by('python -m benchmarks.accuracy.tool_calls', record)}; {spent['processor_seconds']:,} s of "
        f"processor time. {tool_calls.MODEL}, task `{whole['task']}`, {whole['length']} tokens, {whole['framing']}, "
        f"{whole['mode']}, weights {result['settings']['weights']}, greedy, at most {whole['max_new_tokens']} tokens "
        "per answer. Percent of n questions with Wilson's 95 % interval; lost against gained: calls that the whole "
        "cache, as it is, gets right and this one wrong, and the reverse."
    )
    rows = []
    for cell in asked:
        scores, same = cell["scores"], whole["scores"][: len(cell["scores"])]
        lost, gained = (sum(a > b for a, b in zip(*pair, strict=True)) for pair in ((same, scores), (scores, same)))
        difference = paired_difference(scores, same)
        change = "" if cell is whole else f"{100 * difference.value:+.1f} ± {100 * difference.standard_error:.1f}"
        budget = str(cell.get("token_budget", "-"))
        right = share(mean(scores), f"; {len(scores)}")
        rows.append([f"`{cell['policy']}`", budget, right, "" if cell is whole else f"{lost} : {gained}", change])
    heads = ["cache", "budget", "right calls", "lost : gained", "difference"]
    more = reasons(f"`{cell['policy']}`: {cell['reason']}" for cell in cells if "reason" in cell)
    return "\n\n".join([head, table(heads, rows), *more])


if __name__ == "__main__":
    main()
