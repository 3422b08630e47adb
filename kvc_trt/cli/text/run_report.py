"""The summary line that `run` prints under its answers, and its report of --json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.graph.state import ITEM_SIZE
from kvc_trt.profile.traffic import full_state_bytes
from kvc_trt.proof import document_of
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.api.side import Side
    from kvc_trt.runtime import Output


def report(outputs: list[Output], side: Side, load_seconds: float) -> dict[str, object]:
    """Return the object that --json prints."""
    timings = side.session.timings
    return {
        "outputs": [
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": list(output.token_ids),
                "text": output.text,
                "finish_reason": output.finish_reason,
                "reused_tokens": output.reused_tokens,
                "cache": cache_of(output, side),
                **logprobs_of(output),
                **({} if output.kv_proof is None else {"kv_proof": document_of(output.kv_proof)}),
            }
            for output in outputs
        ],
        "timings": {
            "load_seconds": load_seconds,
            "prefill_seconds": timings.prefill_seconds,
            "decode_seconds": timings.decode_seconds,
            "decode_runs": timings.decode_runs,
            "prompt_tokens": timings.prompt_tokens,
            "turn_seconds": timings.turn_seconds,
            "turn_tokens": timings.turn_tokens,
            "new_tokens": sum(len(output.token_ids) for output in outputs),
            "decode_tokens_per_second": timings.decode_tokens_per_second(),
            "draft_runs": timings.draft_runs,
            "drafted_tokens": timings.drafted_tokens,
            "accepted_tokens": timings.accepted_tokens,
        },
    }


def summary(outputs: list[Output], side: Side) -> str:
    """Summarise in one line: tokens in and out, the cache's contents, and the time."""
    timings = side.session.timings
    reasons = ", ".join(dict.fromkeys(output.finish_reason for output in outputs))
    speed = timings.decode_tokens_per_second()
    reused = sum(output.reused_tokens for output in outputs)
    accepted = f"{timings.accepted_tokens} of {timings.drafted_tokens} drafted tokens accepted"
    return " | ".join(
        [
            *([f"{reused} tokens of a stored context"] if reused else []),
            f"{sum(len(output.prompt_token_ids) for output in outputs)} prompt tokens",
            f"{sum(len(output.token_ids) for output in outputs)} new ({reasons})",
            held(outputs, side),
            f"prefill {timings.prefill_seconds + timings.turn_seconds:.2f} s",
            "no decode run" if speed is None else f"{speed:.1f} tokens/s",
            *([accepted] if timings.draft_runs else []),
        ]
    )


def held(outputs: list[Output], side: Side) -> str:
    """Say how many tokens the caches hold, and in how many bytes."""
    stored = [length for output in outputs for length in output.physical_lengths]
    physical = str(min(stored)) if min(stored) == max(stored) else f"{min(stored)}-{max(stored)}"
    logical = max(output.logical_length for output in outputs)
    taken = sum(stored_bytes(side, output) for output in outputs)
    full = sum(full_bytes(side, output) for output in outputs)
    of_full = f" of {readable_size(full)}" if taken < full else ""
    return f"cache {physical} of {logical} tokens per layer, {readable_size(taken)}{of_full}"


def cache_of(output: Output, side: Side) -> dict[str, object]:
    """Return the part of --json about a row's caches."""
    return {
        "logical": output.logical_length,
        "physical": list(output.physical_lengths),
        "bytes": stored_bytes(side, output),
        "full_bytes": full_bytes(side, output),
    }


def logprobs_of(output: Output) -> dict[str, object]:
    """Return the part of --json about the log-probabilities of an answer's tokens: empty unless they were asked for."""
    if output.logprobs is None:
        return {}
    tokens = [
        {
            "token_id": token,
            "logprob": found.logprob,
            "top_logprobs": [{"token_id": one, "logprob": logprob} for one, logprob in found.top],
        }
        for token, found in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return {"logprobs": tokens}


def stored_bytes(side: Side, output: Output) -> int:
    """Return the bytes of a row's state that hold its tokens: of its caches those in use, of linear layers all.

    Buffers are larger: they have room for the longest prompt and its answer.
    """
    capacities = side.session.executor.limits.capacities
    used = [stored / capacity for stored, capacity in zip(output.physical_lengths, capacities, strict=True)]
    shares = ((tensor, 1.0 if tensor.cache is None else used[tensor.cache]) for tensor in side.state)
    return round(sum(tensor.bytes_per_row() * share for tensor, share in shares))


def full_bytes(side: Side, output: Output) -> int:
    """Return the bytes of the same row if every token were kept in every layer."""
    itemsize = ITEM_SIZE[side.model.dtype]
    return full_state_bytes(side.model, output.logical_length, itemsize, side.parameters.kv_cache)
