"""The chunks that a worker sends to Dynamo's frontend: one per token, with the finish reason in the last.

An answer that ends without a reason, or without a chunk at all, reads as a short answer of status 200 outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.proof import document_of
from kvc_trt.runtime import Event, Output

REASONS = {"stop": "stop", "length": "length", "capacity": "length"}
"""Ours to Dynamo's, which has none for a cache that is full."""
LARGEST_LISTS = 16 << 20
"""Bytes of a proof's lists, a third more in base64; Dynamo's messages end at 32 MiB."""
CANCELLED = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}

Chunk = dict[str, Any]


def chunk_of(
    event: Event, prompt_tokens: int, extra: Mapping[str, Any] | None = None, *, reused_tokens: int | None = None
) -> Chunk:
    """Return the chunk of one token; the last one has the reason, what was counted, and `extra` among `engine_data`.

    The last one also has the answer's proof, if there is one; InputError if that is too large for a message.

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
                **_proof_of(event.output),
            }
        }
    return chunk


def _proof_of(output: Output) -> dict[str, Any]:
    proof = output.kv_proof
    if proof is None:
        return {}
    lists = sum(len(one.kept_lists or b"") + sum(map(len, one.read_lists or ())) for one in proof.caches)
    if lists > LARGEST_LISTS:
        raise InputError(
            f"the lists of this answer's proof have {lists >> 20} MiB, and a message holds {LARGEST_LISTS >> 20}: "
            "ask for return_kv_proof digest, or for fewer max_tokens"
        )
    return {"kv_proof": document_of(proof)}


def refusal(status: int, message: str) -> Chunk:
    """Return the answer to a request that is refused, for the gateway, which makes of it a response of that status."""
    found = {"kvc": {"error": {"code": status, "message": message}}}
    return {"token_ids": [], "index": 0, "finish_reason": "stop", "engine_data": found}
