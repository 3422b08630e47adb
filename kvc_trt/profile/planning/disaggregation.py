"""Prefill and decode on different machines: the bytes sent between them, and the decode replicas per prefill replica.

Sizes follow from the engine. Times are floors by published figures: a prompt's operations over the matrix throughput,
a step's bytes over the memory's bandwidth, a cache's bytes over the network's. A replica is one engine: one GPU, or
the GPUs that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvc_trt.profile.accelerators import HOPPER, Accelerator
from kvc_trt.profile.planning.placement import SIDES, Placement
from kvc_trt.profile.traffic import full_state_bytes, stored_context_bytes

LARGEST_BATCH = 32
"""The largest number of rows of a decode replica; fewer if fewer fit."""
LOGIT_BYTES = 4

ASSUMPTIONS = (
    "bytes are those of the longest prompt, its last logits included; full: keys and values of every token",
    "times are floors, not predictions: operations and bytes over published figures, and the bandwidth given",
    "a prefill replica reads one prompt after the other, and sends one while it reads the next",
    f"a decode replica answers as many rows at once as fit, {LARGEST_BATCH} at most, each with the longest answer",
)


def plan_disaggregation(placement: Placement, bandwidth: float, gpus: Sequence[Accelerator] = HOPPER) -> dict[str, Any]:
    """Return the plan as JSON-compatible data; `bandwidth` is the network's in bytes per second, times are in seconds.

    A replica is one placement. Times are None for GPUs that do not hold the engine.
    """
    model, parameters, itemsize = placement.model, placement.parameters, placement.itemsize
    prompt = parameters.max_input_len
    sent = {
        "full": full_state_bytes(model, prompt, itemsize, parameters.kv_cache) + LOGIT_BYTES * model.vocab_size,
        "compressed": stored_context_bytes(model, parameters, itemsize, prompt, turns=placement.turns),
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
                "accelerator": gpu.name,
                "prefill_seconds": placement.prefill_seconds(gpu, prompt) if placement.holds(gpu) else None,
                **{side: _decode_side(placement, side, gpu, sent[side] / bandwidth) for side in SIDES},
            }
            for gpu in gpus
        ],
        "assumptions": list(ASSUMPTIONS),
    }


def _decode_side(placement: Placement, side: str, gpu: Accelerator, transfer_seconds: float) -> dict[str, Any]:
    """Return the number of decode replicas that one prefill replica feeds; None where not even one row fits."""
    rows = min(LARGEST_BATCH, placement.rows_that_fit(side, gpu))
    if rows == 0:
        return {"rows": 0, "answer_seconds": None, "decode_replicas": None, "limit": None}
    parameters = placement.parameters
    answer_seconds = parameters.max_output_len * placement.step_seconds(side, gpu, rows)
    prefill_seconds = placement.prefill_seconds(gpu, parameters.max_input_len)
    each = max(prefill_seconds, transfer_seconds)
    return {
        "rows": rows,
        "answer_seconds": answer_seconds,
        "decode_replicas": answer_seconds / rows / each,
        "limit": "prefill" if prefill_seconds >= transfer_seconds else "network",
    }
