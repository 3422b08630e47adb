"""Prefill and decode on different machines: what travels between them, and how many of one the other keeps busy.

Sizes follow from the engine. Times are floors, of published figures: a prompt's operations over the matrix throughput,
a step's bytes over the memory's bandwidth, a cache's bytes over the network's. A replica here is one accelerator.
"""

from __future__ import annotations

from typing import Any

from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile import floor
from kvc_trt.profile.floor import ACCELERATORS, Accelerator, StepCost
from kvc_trt.profile.model_size import cache_itemsize, count_parameters, prefill_operations, weight_bytes
from kvc_trt.profile.traffic import cache_bytes, full_cache_bytes, row_traffic, stored_context_bytes

LARGEST_BATCH = 32
"""Rows of a decode replica, or as many as fit."""
LOGIT_BYTES = 4

ASSUMPTIONS = (
    "bytes are those of the longest prompt, its last logits included; full: keys and values of every token",
    "times are floors, not predictions: operations and bytes over published figures, and the bandwidth given",
    "a prefill replica reads one prompt after the other, and sends one while it reads the next",
    f"a decode replica answers as many rows at once as fit, {LARGEST_BATCH} at most, each with the longest answer",
)


def plan_disaggregation(
    model: ModelConfig, parameters: PolicyParameters, weights: str, bandwidth: float, *, turns: bool
) -> dict[str, Any]:
    """Return the plan as JSON-compatible data; `bandwidth` of the network in bytes per second, times in seconds.

    `turns` as in `make_plan`: contexts of an engine that takes turns hold the places of its slots.
    """
    itemsize = cache_itemsize(weights)
    turns = turns and parameters.no_turn is None
    prompt = parameters.max_input_len
    sent = {
        "full": full_cache_bytes(model, prompt, itemsize, parameters.kv_cache) + LOGIT_BYTES * model.vocab_size,
        "compressed": stored_context_bytes(model, parameters, itemsize, prompt, turns=turns),
    }
    size, counts = weight_bytes(model, weights), count_parameters(model)
    flops = 2.0 * (counts.linear + counts.lm_head)
    traffic = row_traffic(model, parameters, itemsize, prompt, parameters.max_output_len)
    longest = full_cache_bytes(model, parameters.max_sequence_len, itemsize, parameters.kv_cache)
    sides = {
        "full": (StepCost(size.per_step, longest, flops), longest),
        "compressed": (
            StepCost(size.per_step, traffic.bytes, flops),
            cache_bytes(model, parameters, itemsize, turns=turns).total,
        ),
    }
    return {
        "bandwidth": bandwidth,
        "prompt_tokens": prompt,
        "answer_tokens": parameters.max_output_len,
        **{
            name: {"bytes": count, "transfer_seconds": count / bandwidth, "handoffs_per_second": bandwidth / count}
            for name, count in sent.items()
        },
        "replicas": [
            {
                "accelerator": accelerator.name,
                "prefill_seconds": prefill_operations(model, prompt) / accelerator.flops_16bit,
                **{
                    name: _decode_side(
                        accelerator, *sides[name], size.resident, prefill_operations(model, prompt),
                        sent[name] / bandwidth, parameters.max_output_len,
                    )
                    for name in sent
                },
            }
            for accelerator in ACCELERATORS
        ],
        "assumptions": list(ASSUMPTIONS),
    }  # fmt: skip


def _decode_side(
    accelerator: Accelerator,
    step: StepCost,
    row_bytes: int,
    resident_weights: float,
    operations: float,
    transfer_seconds: float,
    answer_tokens: int,
) -> dict[str, Any]:
    """Return how many decode replicas one prefill replica feeds; None where not even one row fits."""
    rows = min(LARGEST_BATCH, floor.largest_batch(accelerator, resident_weights, row_bytes))
    if rows == 0:
        return {"rows": 0, "answer_seconds": None, "decode_replicas": None, "limit": None}
    answer_seconds = answer_tokens * floor.floor_seconds(step, rows, accelerator.bandwidth, accelerator.flops_16bit)
    prefill_seconds = operations / accelerator.flops_16bit
    each = max(prefill_seconds, transfer_seconds)
    return {
        "rows": rows,
        "answer_seconds": answer_seconds,
        "decode_replicas": answer_seconds / rows / each,
        "limit": "prefill" if prefill_seconds >= transfer_seconds else "network",
    }
