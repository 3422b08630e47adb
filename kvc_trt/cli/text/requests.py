"""The tables of `profile --requests`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvc_trt.cli.text.printing import section
from kvc_trt.cli.text.profile import findings_text, head, milliseconds
from kvc_trt.sizes import readable_size

_LATENCIES = {
    "ttft": "first token", "tpot": "per output token", "itl": "between two tokens", "e2el": "end to end",
}  # fmt: skip


def requests_text(result: Mapping[str, Any]) -> str:
    """Return the load, throughput, latencies and findings, each an aligned table."""
    info = result["request_info"]
    rate = "all there at once" if info["request_rate"] == "inf" else f"{info['request_rate']} a second"
    load = (
        f"{head(result['engine'], result['machine'])}\n"
        f"load: {info['num_prompts']:,} requests a run, {rate}, {info['max_concurrency']:,} at a time, "
        f"prompts of up to {info['longest_input_len']:,} tokens and answers of up to "
        f"{info['longest_output_len']:,} (together {info['mean_tokens']:,.0f} in the mean), {info['prompts']}"
    )
    sections = (load, _throughput(result), _latency(result), findings_text(result))
    return "\n\n".join(sections)


def _throughput(result: Mapping[str, Any]) -> str:
    names = ("request_throughput", "input_throughput", "output_throughput", "total_token_throughput")
    rows = [
        [
            row["side"],
            row["rows"],
            readable_size(row["row_bytes"]),
            readable_size(row["cache_bytes"]),
            f"{row['duration']:.2f}",
            *(f"{row[name]:,.2f}" for name in names),
            _range(row["spread"]["request_throughput"]),
        ]
        for row in result["rows"]
    ]
    headers = (
        "side", "rows", "one row", "all rows", "seconds", "requests/s", "input tokens/s", "output tokens/s", "tokens/s",
        "requests/s in runs",
    )  # fmt: skip
    return section(f"throughput (measured; {_repeats(result)})", headers, rows, left=(0,))


def _latency(result: Mapping[str, Any]) -> str:
    rows = [
        [row["side"], name, *(milliseconds(row[f"{which}_{kind}_ms"]) for which in ("mean", "p50", "p90", "p99")),
         _range(row["spread"][f"p50_{kind}_ms"])]
        for kind, name in _LATENCIES.items()
        for row in result["rows"]
    ]  # fmt: skip
    headers = ("side", "ms", "mean", "p50", "p90", "p99", "p50 in runs")
    return section(f"latency (measured at the scheduler; {_repeats(result)})", headers, rows, left=(0, 1))


def _repeats(result: Mapping[str, Any]) -> str:
    count = result["request_info"]["repeats"]
    return "one run of each side" if count == 1 else f"medians of {count} runs of each side, in turns"


def _range(bounds: list[float] | None) -> str:
    return "" if bounds is None or bounds[0] == bounds[1] else f"{bounds[0]:,.2f} to {bounds[1]:,.2f}"
