"""The parts that result pages share: machine and versions, tables, notes, plots, cells as CSV, and where they stand.

A page has text by hand around a measured part between two marks, or is written whole. Everything that is measured
follows from result files alone, so that a test can say whether a page is that of its results.
"""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from kvc_trt.accuracy.cell import Mean, interval
from kvc_trt.files.atomic import write_whole

DOCS = machine.ROOT / "docs" / "results"
IMAGES = machine.ROOT / "docs" / "images"
WIDTH = 120


class Marks(NamedTuple):
    """Two lines of a page; a benchmark writes the text between them."""

    begin: str
    end: str

    @classmethod
    def of(cls, writer: str) -> Marks:
        """Return the marks of a file in benchmarks/."""
        return cls(f"<!-- measured: begin (benchmarks/{writer} writes this part) -->", "<!-- measured: end -->")

    def inside(self, path: Path) -> str:
        """Return the page's measured part. SystemExit where it has no marks."""
        return self._split(path)[1].strip()

    def replace(self, path: Path, text: str) -> None:
        """Write the page with another measured part. SystemExit where it has no marks."""
        before, _, after = self._split(path)
        write_whole(path, f"{before}{self.begin}\n\n{text}\n\n{self.end}{after}".encode())

    def _split(self, path: Path) -> tuple[str, str, str]:
        before, _, rest = path.read_text(encoding="utf-8").partition(self.begin)
        inside, mark, after = rest.partition(self.end)
        if not mark:
            raise SystemExit(f"error: {path} has no marks {self.begin} ... {self.end}")
        return before, inside, after


def measured_by(command: str, record: Mapping[str, Any], *more: str) -> str:
    """Return the command, the commits, the versions and the machine of a result, as a sentence."""
    own = record["versions"]
    parts = [
        f"`{command}`", f"commit {record['commit']}", f"kvc-trt {own['kvc_trt']}", f"ONNX Runtime {own['onnxruntime']}",
        record["device"], *more,
    ]  # fmt: skip
    return ", ".join(parts)


def versions(record: Mapping[str, Any], others: Mapping[str, str]) -> str:
    """Return the versions of kvc-trt, ONNX Runtime and the others, in alphabetical order."""
    found = {name: record["versions"][name] for name in ("kvc_trt", "onnxruntime")} | dict(others)
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(found.items())) + "."


def written_by(command: str) -> str:
    """Return the remark at the head of a page that a command writes whole."""
    return f"<!-- written by `{command}`; change that, not this page -->"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def folded(summary: str, text: str) -> str:
    """Return a folded section with its summary."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def reasons(found: Iterable[str]) -> list[str]:
    """Return the reasons why cells have no figures, each once, as a folded section; nothing without reasons."""
    lines = dict.fromkeys(f"- {one}" for one in found)
    return [folded("Why n/a", "\n".join(lines))] if lines else []


def plot(path: Path, page: Path) -> str:
    """Return a picture in the page."""
    return f"![{path.stem}]({os.path.relpath(path, page.parent)})"


def bullet(text: str) -> str:
    """Return an entry of a list, in lines that are not too long."""
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def paragraph(text: str) -> str:
    """Return a paragraph in lines that are not too long."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def cells(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV: fractions with four digits behind the point, nothing for None."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([_number(value) for value in row] for row in rows)
    return written.getvalue()


def _number(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else value


def together(figures: Sequence[str]) -> str:
    """Figures of one cell, such as one per budget; one alone where all are missing or the same."""
    return figures[0] if len(set(figures)) == 1 else " / ".join(figures)


def span(figures: Iterable[str]) -> str:
    """Return the first and the last of some figures, which are sorted; one alone where all are alike."""
    found = list(figures)
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def share(answered: Mean, note: str = "", digits: int = 1) -> str:
    """Percent, with Wilson's 95 % interval and a note in brackets."""
    low, high = interval(answered.value, answered.samples)
    return f"{100 * answered.value:.{digits}f} % ({100 * low:.0f}-{100 * high:.0f}{note})"


def signed(one: Mean, scale: float, digits: int) -> str:
    """Return a mean difference and its standard error, which says nothing where all differences are alike."""
    value = f"{scale * one.value:+.{digits}f}"
    error = f"± {scale * one.standard_error:.{digits}f}" if one.standard_error > 0 else "on each"
    return f"{value} {error}"
