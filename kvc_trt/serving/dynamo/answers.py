"""What a worker sends back to Dynamo's frontend: one chunk per token, and the reason at the end.

An answer that ends without a reason, or without a chunk at all, reads as a short answer of status 200 outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from kvc_trt.runtime import Event

REASONS = {"stop": "stop", "length": "length", "capacity": "length"}
"""Ours to Dynamo's, which has none for a cache that is full."""
CANCELLED = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}

Chunk = dict[str, Any]


def chunk_of(
    event: Event, prompt_tokens: int, extra: Mapping[str, Any] | None = None, *, reused_tokens: int | None = None
) -> Chunk:
    """Return the chunk of one token; the last one has the reason, what was counted, and `extra` among `engine_data`.

    `prompt_tokens` are those that the request came with, start tokens included. `reused_tokens`, of which none were
    computed for this request, is the output's own where it is None.
    """
    chunk: Chunk = {"token_ids": [event.token_id], "index": 0}
    if event.logprobs is not None:
        best = enumerate(event.logprobs.top, start=1)
        chunk["log_probs"] = [event.logprobs.logprob]
        chunk["top_logprobs"] = [
            [{"rank": rank, "token_id": token, "token": None, "logprob": logprob} for rank, (token, logprob) in best]
        ]
    if event.output is not None:
        answered = len(event.output.token_ids)
        chunk["finish_reason"] = REASONS[event.output.finish_reason]
        chunk["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answered,
            "total_tokens": prompt_tokens + answered,
            "prompt_tokens_details": {
                "cached_tokens": event.output.reused_tokens if reused_tokens is None else reused_tokens
            },
        }
        chunk["engine_data"] = {
            "kvc": {
                "logical_tokens": event.output.logical_length,
                "kept_tokens_per_cache": round(mean(event.output.physical_lengths), 1),
                **(extra or {}),
            }
        }
    return chunk


def refusal(status: int, message: str) -> Chunk:
    """Return the answer to a request that is refused, for the gateway, which makes of it a response of that status."""
    found = {"kvc": {"error": {"code": status, "message": message}}}
    return {"token_ids": [], "index": 0, "finish_reason": "stop", "engine_data": found}
