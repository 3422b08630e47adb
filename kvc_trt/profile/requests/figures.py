"""The figures of runs under the names of `vllm bench serve`, and their medians and ranges over repeats."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvc_trt.profile.statistics import Summary, summarise

if TYPE_CHECKING:
    from kvc_trt.profile.requests.client import Run

KINDS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, per output token of a request after its first, between two tokens, and end to end."""
IDENTITY = ("side", "repeat")
"""The fields that say which run it is."""
COUNTS = ("completed", "total_input_tokens", "total_output_tokens")


def figures(run: Run) -> dict[str, Any]:
    """Return the figures of one run: rates per second, latencies in milliseconds.

    `tpot` is the mean of one request's gaps, (end to end - first token) / (tokens - 1), as there; answers of one token
    have none.
    """
    inputs = sum(one.input_len for one in run.answered)
    outputs = sum(len(one.tokens) for one in run.answered)
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for one in run.answered:
        samples["ttft"].append(one.tokens[0] - one.arrived)
        samples["e2el"].append(one.tokens[-1] - one.arrived)
        samples["itl"] += [later - earlier for earlier, later in itertools.pairwise(one.tokens)]
        if len(one.tokens) > 1:
            samples["tpot"].append((one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1))
    found: dict[str, float | None] = {
        "duration": run.seconds,
        "completed": len(run.answered),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(run.answered) / run.seconds,
        "input_throughput": inputs / run.seconds,
        "output_throughput": outputs / run.seconds,
        "total_token_throughput": (inputs + outputs) / run.seconds,
    }
    for kind in KINDS:
        found |= _latencies(kind, samples[kind])
    return found


def _latencies(kind: str, samples: Sequence[float]) -> Mapping[str, float | None]:
    if samples:
        return summarise(samples).milliseconds(kind)
    return dict.fromkeys(Summary(0, *(0.0,) * 8).milliseconds(kind))


def over_repeats(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the runs of one side, and under `spread` its least and largest value.

    Requests are the same in all runs, so counts are no medians."""
    found: dict[str, Any] = {name: runs[0][name] for name in COUNTS}
    spread: dict[str, Any] = {}
    for name in (name for name in runs[0] if name not in (*COUNTS, *IDENTITY)):
        values = [run[name] for run in runs if run[name] is not None]
        found[name] = statistics.median(values) if values else None
        spread[name] = [min(values), max(values)] if values else None
    return found | {"spread": spread}
