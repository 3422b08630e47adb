"""Peak memory of decode, bytes and time of a step under policies of one token budget, beside the whole cache.

    python -m benchmarks.studies.two_stages.steps   # benchmarks/results/two_stages_steps.json; minutes

What `kvc-trt profile` measures of engines with native operators: they and their dense twin take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvc_trt
from benchmarks import machine, store
from benchmarks.idle import Others
from benchmarks.page import paragraph, table
from benchmarks.studies.study import MODEL

NAME, COMMAND = "two_stages_steps", "python -m benchmarks.studies.two_stages.steps"
POLICIES = ("rocketkv", "hybrid", "rocketkv-v1", "sparq", "quest-matched")
BUDGET, CONTEXT, ANSWER, STEPS = 256, 8000, 64, 20
MIB = 1 << 20


def measured(policy: str, directory: Path) -> dict[str, Any]:
    """Build an engine of a policy, profile its steps, and return the figures of a step beside its dense twin's."""
    others = Others()
    with kvc_trt.build(
        MODEL, policy=policy, token_budget=BUDGET, max_input_len=CONTEXT, max_output_len=ANSWER, max_batch_size=1,
        output=directory / policy, verify=False,
    ) as engine:  # fmt: skip
        found = engine.profile(contexts=[CONTEXT], batches=[1], steps=STEPS, prefill_seconds=0)
    own, dense = found["rows"]
    peak = found["memory"]["decode"][0]
    return {
        "policy": policy,
        "others_share": others.share(),
        "peak": {name: value for name, value in peak.items() if "peak" in name or "modelled" in name},
        **{side: {name: row[name] for name in ROW} for side, row in (("engine", own), ("dense", dense))},
    }


ROW = ("cache_bytes_read_per_step_modelled", "median_itl_ms", "min_itl_ms", "noise_percent", "samples")
"""Fields of a step."""


def section() -> str:
    """Write the part of the page."""
    found = store.recorded(NAME, COMMAND)
    rows = [row_of(one) for one in found["policies"]]
    dense = found["policies"][0]["dense"]
    busiest = max(one["others_share"] for one in found["policies"])
    heads = ("policy", "peak of a step, MiB", "of the whole cache's, %", "with weights, %", "modelled, %",
             "cache bytes read by a step, MiB", "of the whole cache's, %", "ms of a step, median (least)",
             "of the whole cache's, %")  # fmt: skip
    return "\n\n".join([
        "## Peak memory, bytes and time of a step",
        paragraph(
            f"Engines of budget {BUDGET} with {CONTEXT:,} tokens cached, batch 1, as `kvc-trt profile` measures them "
            "beside their dense twins ([what each figure is](../../profile.md)): the peak while decoding above rest, "
            "measured, of the whole cache's without and with weights; caches and bounds as modelled; bytes of the "
            "cache that a step reads, modelled, beside its time, measured. The whole cache's step reads "
            f"{dense['cache_bytes_read_per_step_modelled'] / MIB:.0f} MiB. The paper has 30 to 31 % less peak memory, "
            "weights included, and up to 3 times the speed on a GPU (section 4.3, figure 5)."
        ),
        table(heads, rows),
        paragraph(
            f"Other programs used up to {100 * busiest:.0f} % of the processors meanwhile, so times, medians of "
            f"{STEPS} steps, are rough; both sides took turns. `{COMMAND}`, commit {found['machine']['commit']}."
        ),
    ])  # fmt: skip


def row_of(one: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    own, dense, peak = one["engine"], one["dense"], one["peak"]
    read, time = "cache_bytes_read_per_step_modelled", "median_itl_ms"
    return [
        f"`{one['policy']}`", f"{peak['peak_bytes'] / MIB:.0f}", _percent(peak["peak_share_of_dense"]),
        _percent(peak["peak_with_weights_share_of_dense"]), _percent(peak["state_modelled_share_of_dense"]),
        f"{own[read] / MIB:.1f}", _percent(own[read] / dense[read]),
        f"{own[time]:.0f} ({own['min_itl_ms']:.0f})", _percent(own[time] / dense[time]),
    ]  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    record = machine.record()
    found = []
    for policy in POLICIES:
        with tempfile.TemporaryDirectory() as directory:
            found.append(measured(policy, Path(directory)))
        store.write_result(NAME, {"machine": record, "model": MODEL, "policies": found})


if __name__ == "__main__":
    main()
