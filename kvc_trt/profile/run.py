"""`profile` from beginning to end: measure, set beside the floor, find what deserves a word."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvc_trt.machine import machine_record
from kvc_trt.profile.bench import Bench, bench_for
from kvc_trt.profile.copy_bandwidth import CopyBandwidth
from kvc_trt.profile.findings import findings
from kvc_trt.profile.memory import peak_resident_bytes, weight_format
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.profile.rows import Formats, measurement_rows, memory_rows
from kvc_trt.profile.sweep import run_sweep

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.progress import Progress

SCHEMA_VERSION = 1


def profile_engine(engine: Engine, request: ProfileRequest, progress: Progress) -> dict[str, Any]:
    """Measure an engine beside its dense twin; returns the result as a JSON-able mapping.

    Times in milliseconds, sizes in bytes, rates in tokens per second; fields that could not be measured are null.
    """
    from kvc_trt.engine.program import engine_program

    bench = bench_for(engine, request.threads)
    before = _copy_bandwidth(bench, progress)
    sweep = run_sweep(engine, request, progress, bench)
    after = _copy_bandwidth(bench, progress)
    bandwidth = max(before, after, key=lambda found: found.median)
    formats = Formats(bench.weight_format(engine_program(engine)), weight_format(engine.weights_path))
    rows = measurement_rows(sweep.rows, engine.model, formats, bandwidth.median)
    memory = memory_rows(sweep.rows)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine": _describe(engine),
        "machine": {**machine_record(), **bench.describe()},
        "request_info": _request_info(request),
        "performance": [_pick(row, _PERFORMANCE) for row in rows],
        "streaming_metrics": [_pick(row, _STREAMING, suffix="_ms") for row in rows],
        "memory": {"rows": memory, "peak_resident_bytes_of_the_whole_profile": peak_resident_bytes()},
        "floor": {"copy_bandwidth": _bandwidth(before, after), "rows": [_pick(row, _FLOOR) for row in rows]},
        "rows": rows,
        "left_out": sweep.left_out,
    }
    result["findings"] = findings(result)
    return result


_IDENTITY = ("context", "batch_size", "side")
_PERFORMANCE = (
    "system_output_throughput_tok_s",
    "output_throughput_per_user_tok_s",
    "speedup_over_dense",
    "samples",
    "noise_percent",
)
_STREAMING = ("ttft_samples", "compaction_share_of_prefill")
_FLOOR = (
    "weight_bytes_read_per_step_modelled",
    "cache_bytes_read_per_step_modelled",
    "bytes_read_per_step_modelled",
    "floor_ms",
    "percent_of_floor",
    "ceiling_speedup",
)


def _pick(row: dict[str, Any], names: tuple[str, ...], suffix: str | None = None) -> dict[str, Any]:
    wanted = (*_IDENTITY, *names)
    timings = [name for name in row if suffix and name.endswith(suffix) and name not in _FLOOR]
    return {name: row[name] for name in (*wanted, *timings)}


def _describe(engine: Engine) -> dict[str, Any]:
    return {
        "directory": engine.path.name,
        "model": engine.build.model,
        "architecture": engine.model.architecture,
        "backend": engine.backend,
        "weights": weight_format(engine.weights_path),
        "policy": dataclasses.asdict(engine.parameters),
        "max_input_len": engine.parameters.max_input_len,
        "max_seq_len": engine.parameters.max_sequence_len,
    }


def _request_info(request: ProfileRequest) -> dict[str, Any]:
    return {
        "contexts": list(request.contexts),
        "batch_sizes": list(request.batches),
        "steps": request.steps,
        "prefills": request.prefills,
        "prompts": "random token ids, seed 0",
        "decode_cache": "filled synthetically",
        "dense": "twin of the engine (same weights, policy full) with caches for the row's context",
    }


def _copy_bandwidth(bench: Bench, progress: Progress) -> CopyBandwidth:
    with progress.task("measuring the copy bandwidth", None):
        return bench.copy_bandwidth()


def _bandwidth(before: CopyBandwidth, after: CopyBandwidth) -> dict[str, Any]:
    """Measured twice, around the sweep; the faster one makes the floor, as other work only ever slows a copy down."""
    slower, faster = sorted((before, after), key=lambda found: found.median)
    return {
        "median_gb_s": faster.median / 1e9,
        "std_gb_s": faster.spread / 1e9,
        "drift_percent": 100 * (1 - slower.median / faster.median),
        "samples": faster.samples,
        "buffer_bytes": faster.buffer_bytes,
        "threads": faster.threads,
        "last_level_cache_bytes": faster.last_level_cache_bytes,
        "beyond_cache": faster.beyond_cache,
        "counts": "bytes read and written",
    }
