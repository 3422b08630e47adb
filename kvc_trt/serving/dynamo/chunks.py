"""The chunks that a worker sends to Dynamo's frontend: one per token, with the finish reason in the last.

The frontend shows an answer without a finish reason, or without any chunk, to clients as a short answer of status 200.
"""

from __future__ import annotations

from typing import Any

from kvc_trt.errors import InputError
from kvc_trt.runtime import Event, Output
from kvc_trt.serving.dynamo.wire import OUR_DATA, OURS, document_of_event, document_of_refusal
from kvc_trt.serving.errors import ServingError
from kvc_trt.serving.protocol.choices import REASONS, kept_by

LARGEST_LISTS = 16 << 20
"""The largest size of a proof's lists in bytes; base64 adds a third, and Dynamo's messages are limited to 32 MiB."""
CANCELLED = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}

Chunk = dict[str, Any]


def chunk_of(event: Event, *, for_gateway: bool = False) -> Chunk:
    """Return the chunk of one token; the last one of an answer has the finish reason and the usage.

    With `for_gateway` it holds the token's document for our gateway (`wire.py`). Otherwise the `engine_data` of the
    last chunk has the counts of kept tokens and the answer's proof. InputError if the proof is too large for a message.
    """
    chunk: Chunk = {"token_ids": [event.token_id], "index": 0}
    if event.output is not None:
        _check_proof(event.output)
        chunk["finish_reason"] = REASONS[event.output.finish_reason]
    if for_gateway:
        chunk[OUR_DATA] = {OURS: document_of_event(event)}
        return chunk
    if event.logprobs is not None:
        best = enumerate(event.logprobs.top, start=1)
        chunk["log_probs"] = [event.logprobs.logprob]
        chunk["top_logprobs"] = [
            [{"rank": rank, "token_id": token, "token": None, "logprob": logprob} for rank, (token, logprob) in best]
        ]
    if event.output is not None:
        read, answered = len(event.output.prompt_token_ids), len(event.output.token_ids)
        chunk["completion_usage"] = {
            "prompt_tokens": read,
            "completion_tokens": answered,
            "total_tokens": read + answered,
            "prompt_tokens_details": {"cached_tokens": event.output.reused_tokens},
        }
        chunk[OUR_DATA] = {OURS: kept_by(event.output)}
    return chunk


def _check_proof(output: Output) -> None:
    if output.kv_proof is None:
        return
    lists = sum(len(one.kept_lists or b"") + sum(map(len, one.read_lists or ())) for one in output.kv_proof.caches)
    if lists > LARGEST_LISTS:
        raise InputError(
            f"the lists of this answer's proof have {lists >> 20} MiB, and a message holds {LARGEST_LISTS >> 20}: "
            "ask for return_kv_proof digest, or for fewer max_tokens"
        )


def refusal(error: ServingError) -> Chunk:
    """Return the chunk that tells our gateway of a refusal; an exception would lose a part of the reason on the way."""
    return {"token_ids": [], "index": 0, "finish_reason": "stop", OUR_DATA: {OURS: document_of_refusal(error)}}
