"""Plan what an engine would store, read and reach, from its resolved parameters alone: nothing is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile import floor
from kvc_trt.profile.floor import ACCELERATORS, Accelerator, StepCost
from kvc_trt.profile.model_size import cache_itemsize, count_parameters, token_cache_bytes, weight_bytes
from kvc_trt.profile.traffic import (
    RowTraffic,
    cache_bytes,
    full_cache_bytes,
    layer_caches,
    row_traffic,
    stored_context_bytes,
)

BATCHES = (1, 8, 32)
ASSUMED_OVERHEADS_US = (5, 10, 20)
"""Assumed microseconds of scoring and selection per layer beyond the dense kernel, for the break-even context."""

ASSUMPTIONS = (
    "floors are modelled: bytes moved over the published bandwidth; good kernels reach 75-90% of them",
    "a row's traffic is that at its longest: max_input_len + max_output_len tokens",
    "the ceiling is the best possible speed-up over an ideal dense step of the same engine",
    "fits: weights and caches within 90% of the memory",
    "largest batch: one layer's keys and values of one full prompt are kept free beside it, for prefill",
    "break-even: the overhead per layer is assumed, not measured, and taken not to grow with the batch",
)


@dataclass(frozen=True)
class _Costs:
    """The costs of both sides that a plan compares."""

    resident_weights: float
    dense: StepCost
    compressed: StepCost
    dense_row: int
    """Bytes of one row's uncompressed cache."""
    compressed_row: int
    """Bytes of one row's compressed cache, page bounds and positions of slots included."""
    prefill_bytes: float
    """One layer's keys and values of the longest prompt, alive while it is compacted."""


def make_plan(model: ModelConfig, parameters: PolicyParameters, weights: str, *, turns: bool = True) -> dict[str, Any]:
    """Return the plan as JSON-compatible data; sizes in bytes, times in milliseconds.

    `weights` is the format of an engine's weights, fp32 to int4; it decides the cache's element size as well. With
    `turns`, the engine is for a backend that takes turns of a conversation, and takes them if its policy does.
    """
    turns = turns and parameters.no_turn is None
    itemsize = cache_itemsize(weights)
    tokens = parameters.max_sequence_len
    traffic = row_traffic(model, parameters, itemsize, parameters.max_input_len, parameters.max_output_len)
    stored = cache_bytes(model, parameters, itemsize, turns=turns)
    costs = _costs(model, parameters, weights, traffic, stored.total)
    return {
        "model": _describe_model(model),
        "policy": {
            **asdict(parameters),
            "max_sequence_len": tokens,
            "dense_limit": parameters.dense_limit,
            "pages": parameters.num_pages() if parameters.has_pages else 0,
        },
        "weights": {
            "format": weights,
            "parameters": count_parameters(model).total,
            "resident_bytes": round(costs.resident_weights),
            "read_bytes_per_step": round(costs.dense.weight_bytes),
        },
        "cache": {
            "format": parameters.kv_cache,
            "bytes_per_element": itemsize,
            "full_bytes_per_row": costs.dense_row,
            "compressed_bytes_per_row": costs.compressed_row,
            "keys_values_bytes_per_row": stored.keys_values,
            "scales_bytes_per_row": stored.scales,
            "page_bounds_bytes_per_row": stored.page_bounds,
            "layers": layer_caches(model, parameters),
            "batches": [
                {
                    "batch": batch,
                    "full_bytes": batch * costs.dense_row,
                    "compressed_bytes": batch * costs.compressed_row,
                }
                for batch in BATCHES
            ],
        },
        "conversation": {
            "takes_turns": turns,
            "positions": tokens,
            "longest_turn": parameters.max_input_len if turns else 0,
            "slot_positions_bytes_per_row": stored.total - cache_bytes(model, parameters, itemsize).total,
        },
        "context": {
            "tokens": parameters.max_input_len,
            "bytes": stored_context_bytes(model, parameters, itemsize, parameters.max_input_len, turns=turns),
            "shared_by_default": parameters.keeps_every_token if turns else parameters.keeps_everything,
            "query_agnostic": parameters.eviction.query_agnostic,
        },
        "traffic": {
            "full_pairs_per_layer": tokens,
            "pairs_per_layer": traffic.pairs,
            "entries_per_layer": traffic.entries,
            "full_bytes_per_row": round(costs.dense.row_bytes),
            "bytes_per_row": round(costs.compressed.row_bytes),
        },
        "speed": [_speed(costs, accelerator, batch) for accelerator in ACCELERATORS for batch in BATCHES],
        "largest_batch": [_largest_batch(costs, accelerator) for accelerator in ACCELERATORS],
        "break_even": _break_even(model, parameters, itemsize, traffic.pairs),
        "assumptions": list(ASSUMPTIONS),
    }


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    return {
        "architecture": model.architecture,
        "layers": model.num_hidden_layers,
        "query_heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
    }


def _costs(
    model: ModelConfig, parameters: PolicyParameters, weights: str, traffic: RowTraffic, compressed_row: int
) -> _Costs:
    itemsize = cache_itemsize(weights)
    size = weight_bytes(model, weights)
    counts = count_parameters(model)
    flops = 2.0 * (counts.linear + counts.lm_head)
    dense_row = full_cache_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache)
    return _Costs(
        resident_weights=size.resident,
        dense=StepCost(size.per_step, dense_row, flops),
        compressed=StepCost(size.per_step, traffic.bytes, flops),
        dense_row=dense_row,
        compressed_row=compressed_row,
        prefill_bytes=parameters.max_input_len * token_cache_bytes(model, itemsize),
    )


def _speed(costs: _Costs, accelerator: Accelerator, batch: int) -> dict[str, Any]:
    def side(cost: StepCost, row_bytes: int) -> dict[str, Any]:
        seconds = floor.floor_seconds(cost, batch, accelerator.bandwidth, accelerator.flops_16bit)
        resident = costs.resident_weights + batch * row_bytes
        return {
            "floor_ms": 1e3 * seconds,
            "floor_tokens_per_s": batch / seconds,
            "fits": floor.fits(accelerator, resident),
        }

    return {
        "accelerator": accelerator.name,
        "batch": batch,
        "full": side(costs.dense, costs.dense_row),
        "compressed": side(costs.compressed, costs.compressed_row),
        "ceiling_speedup": floor.ceiling_speedup(costs.dense, costs.compressed, batch),
    }


def _largest_batch(costs: _Costs, accelerator: Accelerator) -> dict[str, Any]:
    def rows(row_bytes: int) -> int:
        return floor.largest_batch(accelerator, costs.resident_weights, row_bytes, costs.prefill_bytes)

    return {"accelerator": accelerator.name, "full": rows(costs.dense_row), "compressed": rows(costs.compressed_row)}


def _break_even(model: ModelConfig, parameters: PolicyParameters, itemsize: int, pairs: float) -> list[dict[str, Any]]:
    """Return break-even contexts; none for a policy that adds no work to a step: it is never slower than dense here."""
    if not parameters.reads_a_part and not parameters.evicts_while_decoding:
        return []
    token = full_cache_bytes(model, 1, itemsize, parameters.kv_cache) / model.num_hidden_layers
    return [
        {
            "accelerator": accelerator.name,
            "batch": batch,
            "overhead_us_per_layer_assumed": overhead,
            "context_tokens": round(
                floor.break_even_tokens(pairs, overhead * 1e-6, accelerator.bandwidth, token, batch)
            ),
        }
        for accelerator in ACCELERATORS
        for batch in BATCHES
        for overhead in ASSUMED_OVERHEADS_US
    ]
