"""Measured rows under the field names that users of trtllm-bench and vLLM know, one per context, batch and side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.floor import StepCost, ceiling_speedup, floor_seconds
from kvc_trt.profile.model_size import cache_itemsize, weight_bytes
from kvc_trt.profile.statistics import summarise
from kvc_trt.profile.sweep import Row, Side
from kvc_trt.profile.traffic import row_traffic


@dataclass(frozen=True)
class Formats:
    """What bytes are counted by, on both sides."""

    weights: str
    """The format in which a step reads the weights."""
    engine: str
    """The format that the engine was built with; its caches have the type of that format's activations."""


def measurement_rows(
    rows: Iterable[Row], model: ModelConfig, formats: Formats, bandwidth: float
) -> list[dict[str, Any]]:
    """Flat rows: what CSV holds and what the sections of the JSON are cut from; `bandwidth` in bytes per second."""
    return [line for row in rows for line in _pair(row, model, formats, bandwidth)]


def _pair(row: Row, model: ModelConfig, formats: Formats, bandwidth: float) -> list[dict[str, Any]]:
    engine_cost = _cost(row.engine, model, formats, row.context)
    engine = _fields(row, row.engine, engine_cost, bandwidth)
    if row.dense is None:
        return [engine]
    dense_cost = _cost(row.dense, model, formats, row.context)
    dense = _fields(row, row.dense, dense_cost, bandwidth)
    engine["speedup_over_dense"] = dense["median_itl_ms"] / engine["median_itl_ms"]
    engine["ceiling_speedup"] = ceiling_speedup(dense_cost, engine_cost, row.batch)
    dense["speedup_over_dense"] = dense["ceiling_speedup"] = 1.0
    if row.engine.prefill is not None and row.dense.prefill is not None:
        engine["prefill_minus_dense_ms"] = engine["median_ttft_ms"] - dense["median_ttft_ms"]
    return [engine, dense]


def _fields(row: Row, side: Side, cost: StepCost, bandwidth: float) -> dict[str, Any]:
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
        "weight_bytes_read_per_step_modelled": round(cost.weight_bytes),
        "cache_bytes_read_per_step_modelled": round(row.batch * cost.row_bytes),
        "bytes_read_per_step_modelled": round(cost.bytes(row.batch)),
        "floor_ms": 1e3 * floor,
        "percent_of_floor": 100 * floor / step.median,
        "ceiling_speedup": None,
    }


def _prefill_fields(row: Row, side: Side) -> dict[str, Any]:
    """Time to first token, and its split: compaction is its measured share of a profiled prefill, prefill the rest."""
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


def _cost(side: Side, model: ModelConfig, formats: Formats, context: int) -> StepCost:
    """Bytes of the step in the middle of the answer: the prompt and half of max_output_len are cached."""
    half = side.parameters.max_output_len // 2
    traffic = row_traffic(model, side.parameters, cache_itemsize(formats.engine), context, half)
    return StepCost(weight_bytes(model, formats.weights).per_step, traffic.bytes)


def memory_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Memory by kind for every context, batch and side."""
    return [
        {"context": row.context, "batch_size": row.batch, "side": side.name, **line.as_json()}
        for row in rows
        for side in (row.engine, row.dense)
        if side is not None
        for line in side.memory
    ]
