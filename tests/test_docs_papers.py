"""The counts in docs/papers.md are those of its tables."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/papers.md"
VERDICTS = ("faithful", "deviates", "small scale", "missing")


def test_counts_of_each_section_equal_its_rows() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == 3
    for section in sections:
        rows = re.findall(r"^\| (?!item |-)[^|]+ \| ([^|]+) \| [^|]+ \|$", section, flags=re.MULTILINE)
        assert set(rows) <= set(VERDICTS)
        counts = ", ".join(f"{rows.count(verdict)} {verdict}" for verdict in VERDICTS)
        assert f"\n{len(rows)} items: {counts}.\n" in section
