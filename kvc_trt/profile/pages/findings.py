"""The main findings of a profile in sentences, each derived from figures of the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvc_trt import policies
from kvc_trt.backends.registry import backend
from kvc_trt.sizes import readable_size

Result = Mapping[str, Any]

MEMORY_TOLERANCE_PERCENT = 10
RESIDENT_RESOLUTION = 16 << 20
"""Resident memory fluctuates by up to this many bytes (allocator, threads); smaller differences count as equal."""
COMPACTION_SHARE = 0.10
NOISE_PERCENT = 20


def findings(result: Result) -> list[str]:
    """Return sentences about speed, floor, compaction, memory and the quality of the measurement."""
    rows = result["rows"]
    checks = (
        measured_on(result["machine"]),
        _speed(result),
        _floor(result),
        _compaction(rows),
        _decode_memory(result["memory"]["decode"]),
        _memory(result),
        _noise(rows),
        result["left_out"],
    )
    return [sentence for check in checks for sentence in check]


def measured_on(machine: Mapping[str, Any]) -> Iterator[str]:
    """Say where a processor stood in for a GPU, and which operators had no kernels."""
    if what := machine.get("stands_in"):
        yield f"measured on {what}: this is slow, and no figure here is one of a GPU"
    if what := machine.get("without_kernels"):
        yield str(what)


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['context']:,} tokens, batch {row['batch_size']}"


def _speed(result: Result) -> Iterator[str]:
    rows, machine = result["rows"], result["machine"]
    compared = [row for row in rows if row["side"] == "engine" and row["speedup_over_dense"] is not None]
    if not compared:
        return
    best = max(compared, key=lambda row: row["speedup_over_dense"])
    if best["speedup_over_dense"] > 1:
        speedup = f"{best['speedup_over_dense']:.2f}x as fast as dense at {_where(best)}"
        yield f"decode is {speedup}; {_against_ceiling(best)}"
    slower = [row for row in compared if row["speedup_over_dense"] < 1]
    if slower:
        advice = "" if "stands_in" in machine else _advice(result["engine"])
        where = "; ".join(f"{row['speedup_over_dense']:.2f}x at {_where(row)}" for row in slower)
        yield f"slower than dense in {len(slower)} of {len(compared)} rows: {where}{advice}"


def _advice(engine: Mapping[str, Any]) -> str:
    """Advise on a build that is faster; empty unless the policy reads a part of its cache."""
    if not policies.named(engine["policy"]["policy"]).selection.reads_a_part:
        return ""
    measures = backend(engine["backend"]).measures_break_even
    hint = "--dense-until auto" if measures else "a larger --dense-until"
    return f" (build with {hint})"


def _against_ceiling(row: Mapping[str, Any]) -> str:
    ceiling = f"its traffic allows {row['ceiling_speedup']:.2f}x"
    if row["speedup_over_dense"] > row["ceiling_speedup"]:
        return f"{ceiling}, so the dense side ran further below its own floor"
    return ceiling


def _floor(result: Result) -> Iterator[str]:
    engine = [row for row in result["rows"] if row["side"] == "engine"]
    if engine:
        lowest, highest = (pick(engine, key=lambda row: row["percent_of_floor"]) for pick in (min, max))
        low, high = (f"{row['percent_of_floor']:.0f}% ({_where(row)})" for row in (lowest, highest))
        reached = low if lowest is highest else f"{low} to {high}"
        yield f"a step reaches {reached} of the copy-bandwidth floor"
    copy = result["floor"]["copy_bandwidth"]
    cache = copy["last_level_cache_bytes"]
    within = [row for row in engine if cache and row["bytes_read_per_step_modelled"] < cache]
    if within:
        which = "every step" if len(within) == len(engine) else f"{len(within)} of {len(engine)} rows' steps"
        yield (
            f"{which} of the engine would fit the last-level cache ({readable_size(cache)}): the floor from memory "
            "bandwidth can be beaten there, and overhead per operator counts for more"
        )
    if copy["drift_percent"] > NOISE_PERCENT:
        yield f"the copy bandwidth changed by {copy['drift_percent']:.0f}% during the profile: the machine is not quiet"
    if not copy["beyond_cache"]:
        yield "the copy bandwidth was measured on a buffer that the last-level cache can hold: the floor is too low"


def _compaction(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        share, difference = row["compaction_share_of_prefill"], row["prefill_minus_dense_ms"]
        if share is None or row["side"] != "engine":
            continue
        if share > COMPACTION_SHARE:
            yield f"compaction takes {share:.0%} of prefill at {_where(row)} (over {COMPACTION_SHARE:.0%})"
        # Instead of compacting, the twin stores the whole prompt, and both vary from run to run.
        spread = 3 * row["std_ttft_ms"] + COMPACTION_SHARE * row["median_ttft_ms"]
        if difference is not None and abs(difference - row["compaction_ms"]) > spread:
            yield (
                f"compaction at {_where(row)}: {row['compaction_ms']:.1f} ms by its nodes, but the time to the first "
                f"token is {abs(difference):,.1f} ms {'longer' if difference > 0 else 'shorter'} than the dense twin's"
            )


def _decode_memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Compare the memory of the largest row's steps with the twin's, if the difference stands out from noise."""
    engine = [row for row in rows if row["side"] == "engine" and row["peak_share_of_dense"] is not None]
    if not engine:
        return
    top = max(engine, key=lambda row: (row["context"], row["batch_size"]))
    whole = top["peak_bytes"] / top["peak_share_of_dense"] if top["peak_share_of_dense"] else 0.0
    if whole > RESIDENT_RESOLUTION:
        yield (
            f"decode at {_where(top)} needs {readable_size(top['peak_bytes'])} beside the weights, "
            f"{top['peak_share_of_dense']:.0%} of its dense twin's {readable_size(whole)} "
            f"(modelled: {top['state_modelled_share_of_dense']:.0%}); with the weights "
            f"{top['peak_with_weights_share_of_dense']:.0%} "
            f"(modelled: {top['with_weights_modelled_share_of_dense']:.0%})"
        )


def _memory(result: Result) -> Iterator[str]:
    for line in result["memory"]["rows"]:
        difference = line["measured_bytes"] - line["modelled_bytes"]
        resolution = RESIDENT_RESOLUTION if line["kind"] == "prefill" else 0
        apart = abs(line["difference_percent"]) > MEMORY_TOLERANCE_PERCENT and abs(difference) > resolution
        if apart and line["side"] == "engine":
            yield (
                f"memory, {line['kind']} at {_where(line)}: {readable_size(line['measured_bytes'])} measured against "
                f"{readable_size(line['modelled_bytes'])} modelled ({line['difference_percent']:+.0f}%)"
            )


def _noise(rows: list[dict[str, Any]]) -> Iterator[str]:
    noisy = [row for row in rows if row["noise_percent"] > NOISE_PERCENT]
    if noisy:
        worst = max(noisy, key=lambda row: row["noise_percent"])
        yield (
            f"{len(noisy)} of {len(rows)} rows vary by more than {NOISE_PERCENT}% from step to step (most: "
            f"{worst['noise_percent']:.0f}%, {worst['side']} at {_where(worst)}): compare medians, not means"
        )
