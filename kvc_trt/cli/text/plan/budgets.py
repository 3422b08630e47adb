"""Text of a comparison of policies at one budget, and of the budgets that fit a memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvc_trt.cli.text.printing import section
from kvc_trt.policies import BASELINE
from kvc_trt.sizes import readable_size
from kvc_trt.tables import text_table

COMPARED = ("policy", "stored per row", "beside K and V", "of dense", "Table 1", "read per step", "of dense", "Table 1")


def assumed_weights(format_: str) -> str:
    """Say that nothing states the format of the weights."""
    why = "config.json states no dtype, and there are no tensors to look at"
    return f"{format_} weights are assumed: {why} (--weights names another)"


def compare_text(comparison: Mapping[str, Any]) -> str:
    """Return a heading, an aligned table, and the policies that the budget rules out."""
    full, usual = comparison["full_bytes_per_row"], comparison["kv_cache"]
    rows = [*comparison["policies"], *comparison["whole_caches"]]
    lengths = f"prompts to {comparison['max_input_len']:,}, answers to {comparison['max_output_len']:,} tokens"
    dense = f"dense {readable_size(full)} per row (kv-cache {usual})"
    heading = f"{comparison['model']}, token budget {comparison['token_budget']:,}: {lengths}; {dense}"
    fitting = [_cells(row, usual) for row in rows if "not_applicable" not in row]
    if comparison["recommended"] is not None:
        heading += f"\nthe budget is that of {comparison['recommended']}, which is recommended for this model"
    lines = [heading, text_table(COMPARED, fitting, right=range(1, len(COMPARED)))]
    lines += [f"{row['policy']}: not applicable: {row['not_applicable']}" for row in rows if "not_applicable" in row]
    lines += [
        "- stored: allocated for one row at full length; read: keys, values and scores of one step of the longest row",
        "- Table 1: RocketKV's formulas at c = sequence / token budget; it counts auxiliary data in keys, not in pairs",
        "- quest, exact-topk: one list per KV head is counted; query heads that choose apart may read more together",
    ]
    if comparison["weights_assumed"]:
        lines.append(f"- {assumed_weights(comparison['weights'])}")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], usual: str) -> list[str]:
    return [
        row["policy"] if row["kv_cache"] == usual else f"{row['policy']} in {row['kv_cache']}",
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


def limit_text(found: Mapping[str, Any]) -> str:
    """Return a table for a memory or for each GPU, then the policies whose smallest engine takes more."""
    lengths = f"prompts to {found['max_input_len']:,}, answers to {found['max_output_len']:,} tokens"
    rows = f"{found['rows']:,} row{'s' * (found['rows'] > 1)}"
    heading = f"{found['model']}: the largest token budget of each policy and cache format; {lengths}"
    if found["ranks"] > 1:
        rows += f" on each of {found['ranks']} GPUs"
    tables = [_table(table, rows) for table in found["tables"]]
    notes = [
        "- per row: allocated for one row at full length; rows: as many as fit; everything is counted, positions too",
        f"- step: floor of one step of {rows} at full length, weights in {found['weights']}, modelled; -: does not fit",
    ]
    if found["weights_assumed"]:
        notes.append(f"- {assumed_weights(found['weights'])}")
    return "\n\n".join([heading, *tables, "\n".join(notes)])


def _table(table: Mapping[str, Any], rows: str) -> str:
    fitting, left_out = _told_apart([entry for entry in table["budgets"] if "bytes_per_row" in entry])
    memory = readable_size(table["memory_bytes"])
    given = f"{memory} for" if table["gpu"] is None else f"{table['gpu']}: {memory} for weights and"
    heading = f"{given} the caches of {rows}"
    gpus = list(fitting[0]["step_floor_ms"]) if fitting else []
    headers = ["policy", "kv-cache", "token budget", "per row", "rows", *(f"step, ms: {gpu}" for gpu in gpus), ""]
    lines = [section(heading, headers, map(_budget, fitting), range(2, len(headers) - 1))] if fitting else [heading]
    if left_out:
        lines.append(
            f"{left_out} other{'s' * (left_out > 1)} would hold the whole sequence and compress nothing "
            "(--policy NAME shows those of one policy)"
        )
    return "\n".join([*lines, *_unfitting(table["budgets"])])


def _told_apart(fitting: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the entries to choose from, and how many say no more than the whole cache does.

    With one policy alone, all are shown.
    """
    if len({entry["policy"] for entry in fitting}) < 2:
        return list(fitting), 0
    shown = [entry for entry in fitting if entry["compresses"] or entry["policy"] == BASELINE]
    return shown, len(fitting) - len(shown)


def _budget(entry: Mapping[str, Any]) -> list[str]:
    steps = ["-" if floor is None else f"{floor:.2f}" for floor in entry["step_floor_ms"].values()]
    return [
        entry["policy"],
        entry["kv_cache"],
        "-" if entry["token_budget"] is None else f"{entry['token_budget']:,}",
        readable_size(entry["bytes_per_row"]),
        f"{entry['rows']:,}",
        *steps,
        "" if entry["compresses"] else "reads everything",
    ]


def _unfitting(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each policy that does not fit, with the bytes of its smallest engine by format, or why it has
    none."""
    short: dict[str, list[str]] = {}
    for entry in entries:
        if "least_needed_bytes" in entry:
            needed = f"{entry['kv_cache']} {readable_size(entry['least_needed_bytes'])}"
            short.setdefault(entry["policy"], []).append(needed)
    for policy, least in short.items():
        yield f"{policy}: does not fit; at least {', '.join(least)}"
    reasons: dict[str, str] = {}
    for entry in entries:
        if "not_applicable" in entry:
            reasons.setdefault(entry["policy"], entry["not_applicable"])
    for policy, reason in reasons.items():
        yield f"{policy}: not applicable: {reason}"
