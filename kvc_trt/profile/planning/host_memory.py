"""The memory of an engine that runs from the host's: weights and their copies, rows, and what conversations add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.profile.model_size import cache_itemsize, token_cache_bytes, weight_bytes
from kvc_trt.profile.traffic import cache_bytes, stored_context_bytes


def host_memory(
    model: ModelConfig, parameters: PolicyParameters, weights: str, *, copies: Sequence[str], rows: int, turns: bool
) -> dict[str, Any]:
    """Return it as plain data, sizes in bytes. `copies` names what packs the weights for itself.

    A copy is of the matrices that a step reads. A conversation keeps its row between its turns, so rows count both.
    """
    turns = turns and parameters.no_turn is None
    itemsize, size = cache_itemsize(weights), weight_bytes(model, weights)
    row = cache_bytes(model, parameters, itemsize, turns=turns).total
    lines = [
        ("weights, mapped from their file", size.resident),
        *((f"weights packed for {who}", size.per_step) for who in copies),
        (f"caches of {rows} rows", rows * row),
        ("one layer of the longest prompt or turn", parameters.max_input_len * token_cache_bytes(model, itemsize)),
    ]
    return {
        "rows": rows,
        "lines": [{"kind": kind, "bytes": round(bytes_)} for kind, bytes_ in lines],
        "total_bytes": round(sum(bytes_ for _, bytes_ in lines)),
        "bytes_per_further_row": row,
        "bytes_per_prefix": stored_context_bytes(model, parameters, itemsize, parameters.max_input_len, turns=turns),
    }
