"""The tables of `profile`, and the parts that `profile --requests` has too."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from kvc_trt.cli.text.printing import section
from kvc_trt.errors import escaped
from kvc_trt.machine import place
from kvc_trt.sizes import readable_size
from kvc_trt.tables import terminal_columns

WIDTH = 120
"""Findings wrap here, on a wider terminal too."""
SHARE = "share_of_dense"
"""In the names of figures, in place of `bytes`."""
Result = Mapping[str, Any]


def profile_text(result: Result) -> str:
    """Return head, decode, first token, memory and findings, each an aligned table."""
    sections = (
        _bandwidth(result), _decode(result), _decode_memory(result), _first_token(result), _memory(result),
        findings_text(result),
    )  # fmt: skip
    return "\n\n".join(section for section in sections if section)


def head(engine: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Name the engine and the machine."""
    policy = engine["policy"]
    lines = (
        f"{engine['directory']}: {engine['model']}, policy {policy['policy']}, token budget "
        f"{policy['token_budget']:,}, weights {engine['weights']}, backend {engine['backend']}",
        f"machine: {place(machine)}",
    )
    return "\n".join(map(escaped, lines))


def _bandwidth(result: Result) -> str:
    copy = result["floor"]["copy_bandwidth"]
    return (
        f"{head(result['engine'], result['machine'])}\n"
        f"copy bandwidth (measured, read and written): {copy['median_gb_s']:.1f} GB/s +- {copy['std_gb_s']:.1f} "
        f"over {copy['samples']} copies of {readable_size(copy['buffer_bytes'])}"
    )


def _decode(result: Result) -> str:
    rows = [
        [
            f"{row['context']:,}",
            row["batch_size"],
            row["side"],
            *(f"{row[f'{kind}_itl_ms']:.3f}" for kind in ("p50", "p90", "p99")),
            f"{row['system_output_throughput_tok_s']:,.1f}",
            readable_size(row["bytes_read_per_step_modelled"]),
            f"{row['floor_ms']:.3f}",
            f"{row['percent_of_floor']:.0f}%",
            _times(row["speedup_over_dense"]),
            _times(row["ceiling_speedup"]),
            f"{row['samples']} +-{row['noise_percent']:.0f}%",
        ]
        for row in result["rows"]
    ]
    headers = (
        "context", "batch", "side", "ms p50", "p90", "p99", "tokens/s", "read/step", "floor ms", "of floor", "speed-up",
        "ceiling", "samples",
    )  # fmt: skip
    heading = "decode, one step (measured; cache filled synthetically; read/step, floor and ceiling modelled)"
    return section(heading, headers, rows, left=(2,))


def _decode_memory(result: Result) -> str:
    """Return the peak of decode steps beside the bytes of a step and its time, and their shares of the twin's."""
    rows = []
    for step, peak in zip(result["rows"], result["memory"]["decode"], strict=True):
        whole = step["side"] == "dense"
        figures = ("state_modelled_bytes", "peak_bytes", "peak_with_weights_bytes")
        sizes = [
            cell
            for name in figures
            for cell in (readable_size(peak[name]), "" if whole else _percent(peak[name.replace("bytes", SHARE)]))
        ]
        traffic = readable_size(step["cache_bytes_read_per_step_modelled"])
        milliseconds_of_step = f"{step['median_itl_ms']:.3f}"
        rows.append([f"{step['context']:,}", step["batch_size"], step["side"], *sizes, traffic, milliseconds_of_step])
    headers = (
        "context", "batch", "side", "modelled", "of dense", "peak", "of dense", "with weights", "of dense",
        "cache read/step", "ms p50",
    )  # fmt: skip
    if not rows:
        return ""
    text = section(
        "memory of decode: peak of steps (measured) and caches with bounds (modelled)", headers, rows, left=(2,)
    )
    weights = next(line["measured"] for line in result["memory"]["rows"] if line["kind"] == "weights")
    return f"{text}\npeak measured as {result['memory']['decode'][0]['measured']}; weights: {weights}"


def _first_token(result: Result) -> str:
    measured = [row for row in result["rows"] if row["median_ttft_ms"] is not None]
    if not measured:
        return ""
    rows = [
        [
            f"{row['context']:,}",
            row["batch_size"],
            row["side"],
            milliseconds(row["median_ttft_ms"]),
            milliseconds(row["std_ttft_ms"]),
            milliseconds(row["prefill_ms"]),
            milliseconds(row["compaction_ms"]),
            f"{row['compaction_share_of_prefill']:.1%}",
            "" if row["prefill_minus_dense_ms"] is None else f"{row['prefill_minus_dense_ms']:+,.1f}",
        ]
        for row in measured
    ]
    headers = (
        "context", "batch", "side", "first token ms", "std", "prefill ms", "compaction ms", "share", "minus dense ms"
    )  # fmt: skip
    samples = measured[0]["ttft_samples"]
    heading = (
        f"time to first token (measured, median of {samples}; compaction: its nodes' share in the executor's profile)"
    )
    return section(heading, headers, rows, left=(2,))


def _memory(result: Result) -> str:
    """Return the memory of the largest row; the others are in the JSON."""
    lines = result["memory"]["rows"]
    if not lines:
        return ""
    top = max((line["context"], line["batch_size"]) for line in lines)
    chosen = [line for line in lines if (line["context"], line["batch_size"]) == top]
    rows = [
        [
            line["side"],
            line["kind"],
            readable_size(line["modelled_bytes"]),
            readable_size(line["measured_bytes"]),
            f"{line['difference_percent']:+.1f}%",
            line["measured"],
        ]
        for line in chosen
    ]
    peak = readable_size(result["memory"]["peak_resident_bytes_of_the_whole_profile"])
    heading = f"memory at {top[0]:,} tokens, batch {top[1]}"
    text = section(heading, ("side", "kind", "modelled", "measured", "apart", "measured as"), rows, left=(0, 1, 5))
    return f"{text}\npeak resident memory of this process, engine and twin together: {peak}"


def findings_text(result: Result) -> str:
    """Return the findings, one sentence each."""
    return "\n".join(["findings", *(_bullet(finding) for finding in result["findings"])])


def _bullet(sentence: str) -> str:
    return textwrap.fill(
        sentence, min(WIDTH, terminal_columns()), initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def milliseconds(found: float | None) -> str:
    """Write a time to a tenth; nothing where there is none."""
    return "" if found is None else f"{found:,.1f}"
