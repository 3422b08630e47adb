"""The table of docs/openai-fields.md. `python -m tests.serving.protocol.fields_page` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from kvc_trt.serving.protocol.fields import FIELDS, BodyField, Endpoint, Fate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "openai-fields.md"
_HEADINGS = {Fate.WORKS: "Works", Fate.NO_EFFECT: "Has no effect on any answer", Fate.REFUSED: "Refused"}
_COLUMNS = {Fate.WORKS: "meaning", Fate.NO_EFFECT: "why", Fate.REFUSED: "what to do"}


def fields() -> list[BodyField]:
    """Return every field once, in the order of the table."""
    found = {id(field): field for endpoint in Endpoint for field in FIELDS[endpoint].values()}
    return list(found.values())


def endpoints(field: BodyField) -> str:
    if len(field.endpoints) == len(Endpoint):
        return "both"
    return "chat" if Endpoint.CHAT in field.endpoints else "completions"


def words(field: BodyField) -> str:
    passing = " or ".join(f"`{json.dumps(one)}`" for one in field.harmless)
    return field.words + (f" ({passing} passes)" if passing else "")


def tables() -> str:
    parts = []
    for fate, heading in _HEADINGS.items():
        rows = [f"| `{one.name}` | {endpoints(one)} | {words(one)} |" for one in fields() if one.fate is fate]
        parts.append("\n".join([f"## {heading}", "", f"| field | of | {_COLUMNS[fate]} |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """Return the page as it is, with its tables as they should be."""
    before, _, _ = PAGE.read_text().partition(f"## {_HEADINGS[Fate.WORKS]}\n")
    return before + tables()


if __name__ == "__main__":
    PAGE.write_text(page())
