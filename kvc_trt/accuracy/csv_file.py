"""Every cell as a line of CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.statistics import interval

COLUMNS = (
    "task", "family", "mode", "query_aware", "length", "policy", "token_budget", "samples", "accuracy",
    "standard_error", "low", "high", "full_accuracy", "evidence", "row_bytes", "executor", "max_new_tokens", "seed",
    "dataset", "reason",
)  # fmt: skip


def csv_bytes(cells: Iterable[Cell]) -> bytes:
    """One line per cell; accuracies are shares, `low` and `high` a 95 % interval. What does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**cell.to_json(), **_interval(cell)} for cell in cells)
    return text.getvalue().encode()


def _interval(cell: Cell) -> dict[str, Any]:
    if not cell.scores:
        return {}
    low, high = interval(cell.mean.value, cell.samples)
    return {"low": round(low, 4), "high": round(high, 4)}
