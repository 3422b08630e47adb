"""A profile as the bytes of files: CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any


def csv_bytes(result: Mapping[str, Any]) -> bytes:
    """One line per context, batch and side; what was not measured is empty."""
    rows = result["rows"]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
