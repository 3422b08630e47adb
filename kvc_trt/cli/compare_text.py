"""Policies side by side, as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.cli.output import table
from kvc_trt.sizes import readable_size

_HEADERS = ("policy", "stored per row", "beside K and V", "of dense", "Table 1", "read per step", "of dense", "Table 1")


def compare_text(comparison: Mapping[str, Any]) -> str:
    """A heading, an aligned table, and the policies that the budget rules out."""
    full, rows = comparison["full_bytes_per_row"], comparison["policies"]
    lengths = f"prompts to {comparison['max_input_len']:,}, answers to {comparison['max_output_len']:,} tokens"
    dense = f"dense {readable_size(full)} per row"
    heading = f"{comparison['model']}, token budget {comparison['token_budget']:,}: {lengths}; {dense}"
    fitting = [_cells(row) for row in rows if "not_applicable" not in row]
    lines = [heading, table(_HEADERS, fitting, right=range(1, len(_HEADERS)))]
    lines += [f"{row['policy']}: not applicable: {row['not_applicable']}" for row in rows if "not_applicable" in row]
    lines += [
        "- stored: allocated for one row at full length; read: keys, values and scores of one step of the longest row",
        "- Table 1: RocketKV's formulas at c = sequence / token budget; it counts auxiliary data in keys, not in pairs",
        "- quest, exact-topk: one list per KV head is counted; query heads that choose apart may read more together",
    ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["policy"],
        readable_size(row["stored_bytes"]),
        readable_size(row["of_these_beside_keys_and_values"]),
        _share(row["stored_share"]),
        _share(row["stored_share_by_formula"]),
        readable_size(row["read_bytes_per_step"]),
        _share(row["read_share"]),
        _share(row["read_share_by_formula"]),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
