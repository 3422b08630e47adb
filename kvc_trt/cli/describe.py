"""A policy's numbers in one line, the same wherever a command shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc_trt.policies.parameters import PolicyParameters


def describe_parameters(parameters: PolicyParameters) -> str:
    """Return what is kept of a prompt and what a step reads."""
    parts = [f"prompts to {parameters.max_input_len}, answers to {parameters.max_output_len} tokens"]
    if parameters.evicts_while_decoding:
        parts.append(_describe_evicting(parameters))
    elif parameters.prompt_eviction == "none":
        parts.append(f"the cache keeps everything ({parameters.capacity} slots)")
    else:
        kept = f"{parameters.prompt_budget} prompt tokens kept of each KV head, {parameters.capacity} slots"
        parts.append(f"{kept} (window {parameters.window}, pool kernel {parameters.pool_kernel})")
    if parameters.decode_selection == "dense" or parameters.evicts_while_decoding:
        parts.append("a step reads all of them")
    else:
        found = _describe_selection(parameters)
        parts.append(f"a step reads {parameters.top_k} tokens ({found}; dense up to {parameters.dense_limit} tokens)")
    if parameters.skip_layers:
        parts.append(f"the first {parameters.skip_layers} layers are not compressed")
    return "; ".join(parts)


def _describe_selection(parameters: PolicyParameters) -> str:
    if parameters.decode_selection == "quest":
        return f"whole pages of {parameters.page_size}, each query head its own"
    if parameters.decode_selection == "sparq":
        mean = ", the mean value in place of the others" if parameters.reallocate else ""
        return f"and the current one, scored by {parameters.top_r} of each key's channels{mean}"
    return f"page size {parameters.page_size}, {parameters.top_r} channels"


def _describe_evicting(parameters: PolicyParameters) -> str:
    kept = parameters.capacity - parameters.spare_slots
    last = min(parameters.recent, kept - parameters.sinks)
    by_attention = kept - parameters.sinks - last
    shares = [(parameters.sinks, "first"), (last, "last"), (by_attention, "most attended")]
    tokens = ", ".join(f"{count} {which}" for count, which in shares if count)
    ranked = ", positions counted in the cache" if parameters.positions == "cache" else ""
    return f"{kept} tokens kept of each KV head while it answers ({tokens}), {parameters.capacity} slots{ranked}"
