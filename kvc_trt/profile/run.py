"""Run a profile: measure, compare with the floor, and state the findings.

Rows have the field names that users of trtllm-bench and vLLM know, one per context, batch and side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.benchmark import Benchmark, CopyBandwidth
from kvc_trt.backends.opening import benchmark_for
from kvc_trt.engine.program import engine_program
from kvc_trt.machine import machine_record, peak_resident_bytes
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.decode_memory import share
from kvc_trt.profile.engine_weights import engine_weight_bytes
from kvc_trt.profile.floor import StepCost, ceiling_speedup, floor_seconds
from kvc_trt.profile.model_size import WeightBytes, cache_itemsize
from kvc_trt.profile.pages.findings import findings
from kvc_trt.profile.request import ProfileRequest
from kvc_trt.profile.statistics import summarise
from kvc_trt.profile.sweep import SweepRow, SweepSide, run_sweep
from kvc_trt.profile.traffic import row_traffic

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.progress import Progress

SCHEMA_VERSION = 1


def profile_engine(engine: EngineDirectory, request: ProfileRequest, progress: Progress) -> dict[str, Any]:
    """Measure an engine and its dense twin; return the result as JSON-compatible data.

    Times in milliseconds, sizes in bytes, rates in tokens per second; fields that could not be measured are null.
    """
    benchmark = benchmark_for(engine, request.options)
    before = _copy_bandwidth(benchmark, progress)
    sweep = run_sweep(engine, request, progress, benchmark)
    after = _copy_bandwidth(benchmark, progress)
    bandwidth = max(before, after, key=lambda found: found.median)
    program = engine_program(engine)
    weights = engine_weight_bytes(program, benchmark.weight_format(program))
    costs = StepCosts(engine.model, weights, cache_itemsize(program.weight_format))
    rows = measurement_rows(sweep.rows, costs, bandwidth.median)
    memory = memory_rows(sweep.rows)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine": engine_record(engine),
        "machine": {**machine_record(), **benchmark.describe()},
        "request_info": _request_info(request),
        "performance": [_pick(row, _PERFORMANCE) for row in rows],
        "streaming_metrics": [_pick(row, _STREAMING, suffix="_ms") for row in rows],
        "memory": {
            "rows": memory,
            "decode": decode_memory_rows(sweep.rows),
            "peak_resident_bytes_of_the_whole_profile": peak_resident_bytes(),
        },
        "floor": {"copy_bandwidth": _bandwidth(before, after), "rows": [_pick(row, _FLOOR) for row in rows]},
        "operators": [line for side in sweep.operators for line in side.as_json()],
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


def engine_record(engine: EngineDirectory) -> dict[str, Any]:
    """Return the description of the engine in a result."""
    return {
        "directory": engine.path.name,
        "model": engine.build.model,
        "architecture": engine.model.architecture,
        "backend": engine.backend,
        "weights": engine_program(engine).weight_format,
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


def _copy_bandwidth(benchmark: Benchmark, progress: Progress) -> CopyBandwidth:
    with progress.task("measuring the copy bandwidth", None):
        return benchmark.copy_bandwidth()


def _bandwidth(before: CopyBandwidth, after: CopyBandwidth) -> dict[str, Any]:
    """Combine two measurements around the sweep; the faster one sets the floor, since other work only slows a copy."""
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


@dataclass(frozen=True)
class StepCosts:
    """The model, weights and element size from which the bytes of a step are computed."""

    model: ModelConfig
    weights: WeightBytes
    cache_itemsize: int
    """The bytes of one cached element."""

    def of(self, side: SweepSide, context: int) -> StepCost:
        """Return the cost of a step in the middle of the answer, with prompt and half of max_output_len cached."""
        half = side.parameters.max_output_len // 2
        traffic = row_traffic(self.model, side.parameters, self.cache_itemsize, context, half)
        return self.weights.step(traffic.bytes)


def measurement_rows(rows: Iterable[SweepRow], costs: StepCosts, bandwidth: float) -> list[dict[str, Any]]:
    """Return flat rows for the CSV file and the sections of the JSON; `bandwidth` in bytes per second."""
    return [line for row in rows for line in _pair(row, costs, bandwidth)]


def _pair(row: SweepRow, costs: StepCosts, bandwidth: float) -> list[dict[str, Any]]:
    engine_cost = costs.of(row.engine, row.context)
    engine = _fields(row, row.engine, engine_cost, bandwidth)
    if row.dense is None:
        return [engine]
    dense_cost = costs.of(row.dense, row.context)
    dense = _fields(row, row.dense, dense_cost, bandwidth)
    engine["speedup_over_dense"] = dense["median_itl_ms"] / engine["median_itl_ms"]
    engine["ceiling_speedup"] = ceiling_speedup(dense_cost, engine_cost, row.batch)
    dense["speedup_over_dense"] = dense["ceiling_speedup"] = 1.0
    if row.engine.prefill is not None and row.dense.prefill is not None:
        engine["prefill_minus_dense_ms"] = engine["median_ttft_ms"] - dense["median_ttft_ms"]
    return [engine, dense]


def _fields(row: SweepRow, side: SweepSide, cost: StepCost, bandwidth: float) -> dict[str, Any]:
    step = side.decode.steps
    floor = floor_seconds(cost, row.batch, bandwidth)
    return {
        "context": row.context,
        "batch_size": row.batch,
        "side": side.name,
        **_prefill_fields(row, side),
        **side.decode.blocks.milliseconds("tpot"),
        **step.milliseconds("itl"),
        "min_itl_ms": 1e3 * step.minimum,
        "samples": step.samples,
        "noise_percent": step.noise_percent,
        "system_output_throughput_tok_s": row.batch / step.median,
        "output_throughput_per_user_tok_s": 1 / step.median,
        "speedup_over_dense": None,
        "weight_bytes_read_per_step_modelled": round(cost.weights_read(row.batch)),
        "cache_bytes_read_per_step_modelled": round(row.batch * cost.row_bytes),
        "bytes_read_per_step_modelled": round(cost.bytes(row.batch)),
        "floor_ms": 1e3 * floor,
        "percent_of_floor": 100 * floor / step.median,
        "ceiling_speedup": None,
    }


def _prefill_fields(row: SweepRow, side: SweepSide) -> dict[str, Any]:
    """Return time to first token, split into compaction (its share of a profiled prefill) and the rest."""
    names = summarise([0.0]).milliseconds("ttft")
    if side.prefill is None:
        missing = ("ttft_samples", "compaction_share_of_prefill", "prefill_ms", "compaction_ms")
        return dict.fromkeys((*names, *missing, "prefill_minus_dense_ms"))
    seconds = side.prefill.seconds
    compaction = row.compaction if side is row.engine else None
    share = compaction.share if compaction is not None else 0.0
    return {
        **seconds.milliseconds("ttft"),
        "ttft_samples": seconds.samples,
        "compaction_share_of_prefill": share,
        "prefill_ms": 1e3 * seconds.median * (1 - share),
        "compaction_ms": 1e3 * seconds.median * share,
        "prefill_minus_dense_ms": None,
    }


def memory_rows(rows: Iterable[SweepRow]) -> list[dict[str, Any]]:
    """Return memory by kind for every context, batch and side."""
    return [
        {"context": row.context, "batch_size": row.batch, "side": side.name, **line.as_json()}
        for row in rows
        for side in (row.engine, row.dense)
        if side is not None
        for line in side.memory
    ]


def decode_memory_rows(rows: Iterable[SweepRow]) -> list[dict[str, Any]]:
    """Return the peak memory of decode steps for every context, batch and side, and its shares of the dense twin's.

    Modelled bytes are those of weights, and of caches with their bounds and other state. A step's own work is in the
    measured bytes alone.
    """
    found = []
    for row in rows:
        dense = None if row.dense is None else _decode_bytes(row.dense)
        for side in (row.engine, row.dense):
            if side is None:
                continue
            own = _decode_bytes(side)
            shares = {
                name.replace("bytes", "share_of_dense"): None if dense is None else share(own[name], dense[name])
                for name in own
            }
            identity = {"context": row.context, "batch_size": row.batch, "side": side.name}
            found.append({**identity, **own, **shares, "measured": side.peak.how})
    return found


def _decode_bytes(side: SweepSide) -> dict[str, int]:
    (weights,) = (line for line in side.memory if line.kind == "weights")
    state = [line for line in side.memory if line.kind not in ("weights", "prefill")]
    modelled, measured = round(sum(one.modelled for one in state)), side.peak.bytes
    return {
        "weights_bytes": round(weights.measured),
        "state_modelled_bytes": modelled,
        "with_weights_modelled_bytes": round(weights.modelled) + modelled,
        "state_allocated_bytes": round(sum(one.measured for one in state)),
        "peak_bytes": measured,
        "peak_with_weights_bytes": round(weights.measured) + measured,
    }
