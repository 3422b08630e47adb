"""Plan an engine's memory, traffic and speed from its resolved parameters, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from kvc_trt import policies
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.rope import rotary_choice
from kvc_trt.profile.accelerators import HOPPER, Accelerator
from kvc_trt.profile.floor import break_even_tokens, ceiling_speedup
from kvc_trt.profile.model_size import count_parameters, weight_bytes
from kvc_trt.profile.planning.placement import SIDES, Placement
from kvc_trt.profile.traffic import (
    cache_bytes,
    full_cache_bytes,
    full_state_bytes,
    full_step_bytes,
    layer_caches,
    linear_bytes,
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
    "first token: the longest prompt's operations over 16-bit throughput, or the weights over bandwidth if longer",
    "break-even: the overhead per layer is assumed, not measured, and taken not to grow with the batch",
)


def make_plan(
    placement: Placement, gpus: Sequence[Accelerator] = HOPPER, divided: Sequence[str | None] = ()
) -> dict[str, Any]:
    """Return the plan as JSON-compatible data; sizes in bytes, times in milliseconds.

    Caches and traffic are a row's on all GPUs that share the engine; speed is that of one GPU. `divided` has one entry
    for each of `gpus`: the options that divide the engine among several such GPUs if one does not hold it, or None.
    """
    model, parameters = placement.model, placement.parameters
    holders = [gpu for gpu in gpus if placement.holds(gpu)]
    traffic = _traffic(placement)
    return {
        "model": _describe_model(model),
        "rotary": rotary_choice(model, parameters.max_sequence_len),
        "policy": _policy(parameters),
        "weights": _weights(placement),
        "cache": _cache(placement),
        "conversation": _conversation(placement),
        "context": _context(placement),
        "traffic": traffic,
        "compresses": placement.compresses,
        "ranks": placement.ranks,
        "gpus": [_gpu(placement, gpu, use) for gpu, use in zip_longest(gpus, divided)],
        "speed": [speed for gpu in holders for batch in BATCHES if (speed := _speed(placement, gpu, batch))],
        "break_even": _break_even(placement, traffic["pairs_per_layer"], holders),
        "assumptions": list(ASSUMPTIONS),
    }


def _policy(parameters: PolicyParameters) -> dict[str, Any]:
    divides = policies.method(parameters).divides
    return {
        **{name: value for name, value in asdict(parameters).items() if name != "split" or divides},
        "layer_windows": None if parameters.layer_windows is None else list(parameters.layer_windows),
        "linear_layers": None if parameters.linear_layers is None else list(parameters.linear_layers),
        "max_sequence_len": parameters.max_sequence_len,
        "dense_limit": parameters.dense_limit,
        "pages": parameters.num_pages() if parameters.has_pages else 0,
    }


def _weights(placement: Placement) -> dict[str, Any]:
    count, size = count_parameters(placement.model), weight_bytes(placement.model, placement.weights)
    return {
        "format": placement.weights,
        "parameters": count.total,
        "active_parameters": count.active,
        "resident_bytes": round(size.resident),
        "read_bytes_per_step": round(size.per_step),
    }


def _cache(placement: Placement) -> dict[str, Any]:
    """Return the bytes of a row's caches; the state of linear layers is part of those of page bounds and the like."""
    model, parameters, itemsize = placement.model, placement.parameters, placement.itemsize
    full_row = full_state_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache)
    stored = cache_bytes(model, parameters, itemsize, turns=placement.turns)
    return {
        "format": parameters.kv_cache,
        "bytes_per_element": itemsize,
        "full_bytes_per_row": full_row,
        "compressed_bytes_per_row": stored.total,
        "used_bytes_per_row": cache_bytes(model, parameters.in_the_mean, itemsize, turns=placement.turns).total,
        "keys_values_bytes_per_row": stored.keys_values,
        "scales_bytes_per_row": stored.scales,
        "page_bounds_bytes_per_row": stored.page_bounds,
        "linear_state_bytes_per_row": linear_bytes(model, itemsize),
        "layers": layer_caches(model, parameters),
        "batches": [
            {"batch": batch, "full_bytes": batch * full_row, "compressed_bytes": batch * stored.total}
            for batch in BATCHES
        ],
    }


def _conversation(placement: Placement) -> dict[str, Any]:
    model, parameters, itemsize = placement.model, placement.parameters, placement.itemsize
    alone, with_turns = (cache_bytes(model, parameters, itemsize, turns=turns) for turns in (False, placement.turns))
    return {
        "takes_turns": placement.turns,
        "positions": parameters.max_sequence_len,
        "longest_turn": parameters.max_input_len if placement.turns else 0,
        "slot_positions_bytes_per_row": with_turns.total - alone.total,
    }


def _context(placement: Placement) -> dict[str, Any]:
    parameters, longest = placement.parameters, placement.parameters.max_input_len
    return {
        "tokens": longest,
        "bytes": stored_context_bytes(placement.model, parameters, placement.itemsize, longest, turns=placement.turns),
        "shared_by_default": parameters.keeps_every_token if placement.turns else parameters.keeps_everything,
        "query_agnostic": parameters.eviction.query_agnostic,
    }


def _traffic(placement: Placement) -> dict[str, Any]:
    model, parameters, itemsize = placement.model, placement.parameters, placement.itemsize
    found = row_traffic(model, parameters.in_the_mean, itemsize, parameters.max_input_len, parameters.max_output_len)
    longest, one = (
        full_cache_bytes(model, tokens, itemsize, parameters.kv_cache) for tokens in (parameters.max_sequence_len, 1)
    )
    return {
        "full_pairs_per_layer": round(longest / one),
        "pairs_per_layer": found.pairs,
        "entries_per_layer": found.entries,
        "full_bytes_per_row": full_step_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache),
        "bytes_per_row": round(found.bytes),
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


def _gpu(placement: Placement, gpu: Accelerator, use: str | None) -> dict[str, Any]:
    holds = placement.holds(gpu)
    return {
        "name": gpu.name,
        "bandwidth": gpu.bandwidth,
        "flops_16bit": gpu.flops_16bit,
        "flops_fp8": gpu.flops_fp8,
        "memory_bytes": round(gpu.memory),
        "source": gpu.source,
        "usable_bytes": gpu.usable,
        "weight_bytes": round(placement.size.resident),
        "one_row_bytes": round(placement.sides["compressed"].memory(1)),
        "holds_the_engine": holds,
        "use": None if holds else use,
        "largest_batch": {side: placement.rows_that_fit(side, gpu) for side in SIDES},
        "first_token_floor_ms": 1e3 * placement.prefill_seconds(gpu, placement.parameters.max_input_len)
        if holds
        else None,
    }


def _speed(placement: Placement, gpu: Accelerator, batch: int) -> dict[str, Any] | None:
    """Return the floors of both sides for a batch; None if it fits on neither side."""

    def side(name: str) -> dict[str, Any]:
        if not placement.fits(name, gpu, batch):
            return {"fits": False, "floor_ms": None, "floor_tokens_per_s": None}
        seconds = placement.step_seconds(name, gpu, batch)
        return {"fits": True, "floor_ms": 1e3 * seconds, "floor_tokens_per_s": batch / seconds}

    found = {name: side(name) for name in SIDES}
    if not any(one["fits"] for one in found.values()):
        return None
    full, compressed = (placement.sides[name].step for name in SIDES)
    return {
        "accelerator": gpu.name,
        "batch": batch,
        **found,
        "ceiling_speedup": ceiling_speedup(full, compressed, batch),
    }


def _cached_layers(model: ModelConfig) -> int:
    return model.num_hidden_layers - len(model.linear_layers)


def _break_even(placement: Placement, pairs: float, gpus: Sequence[Accelerator]) -> list[dict[str, Any]]:
    """Return the contexts from which the policy is faster than dense; none for a policy that adds no work to a step."""
    local, parameters = placement.local, placement.parameters
    if not parameters.reads_a_part and not parameters.evicts_while_decoding:
        return []
    token = full_cache_bytes(local, 1, placement.itemsize, parameters.kv_cache) / _cached_layers(local)
    return [
        {
            "accelerator": gpu.name,
            "batch": batch,
            "overhead_us_per_layer_assumed": overhead,
            "context_tokens": round(break_even_tokens(pairs, overhead * 1e-6, gpu.bandwidth, token, batch)),
        }
        for gpu in gpus
        for batch in BATCHES
        for overhead in ASSUMED_OVERHEADS_US
    ]
