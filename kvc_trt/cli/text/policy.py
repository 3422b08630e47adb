"""A policy's numbers in one line, the same wherever a command shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.models.cache_formats import AUTO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvc_trt.methods.base.parameters import PolicyParameters


def describe_parameters(parameters: PolicyParameters) -> str:
    """Describe the tokens kept of a prompt and those that a step reads."""
    parts = [
        f"prompts to {parameters.max_input_len:,}, answers to {parameters.max_output_len:,} tokens",
        *_retrieval(parameters),
        _kept(parameters),
        _read(parameters),
    ]
    if parameters.kv_cache != AUTO:
        parts.append(f"the cache is in {parameters.kv_cache}")
    if parameters.skip_layers:
        parts.append(f"the first {parameters.skip_layers} layers are not compressed")
    if parameters.layer_windows is not None and not all(parameters.layer_windows):
        parts.append(sliding_layers(parameters.layer_windows))
    if parameters.linear_layers is not None:
        parts.append(linear_layers(parameters.linear_layers))
    return "; ".join(parts)


def sliding_layers(windows: Sequence[int]) -> str:
    """Say which layers keep the model's own windows."""
    sizes = sorted(set(filter(None, windows)))
    span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"{sum(map(bool, windows))} of {len(windows)} layers slide and keep their window of {span} tokens exactly"


def linear_layers(layers: Sequence[int]) -> str:
    """Say how many layers are linear."""
    return f"{len(layers)} layers are linear, with a state of constant size"


def compresses_nothing(parameters: PolicyParameters) -> str | None:
    """Return a line that says so where the policy would compress, and no sequence is long enough; None elsewhere."""
    drops = parameters.eviction.evicts or parameters.evicts_while_decoding
    longest = parameters.max_sequence_len
    dropping = drops and parameters.capacity < longest
    reading_less = parameters.reads_a_part and parameters.dense_limit < longest
    if dropping or reading_less or not (drops or parameters.reads_a_part):
        return None
    return nothing_compressed(parameters.token_budget, longest)


def nothing_compressed(token_budget: int, longest: int) -> str:
    """Return the sentence of a budget with which a step reads everything of the longest sequence."""
    return (
        f"nothing is compressed: with a token budget of {token_budget:,}, a step of the longest sequence, {longest:,} "
        "tokens, reads everything"
    )


def _retrieval(parameters: PolicyParameters) -> list[str]:
    if parameters.retrieval_heads is None:
        return []
    heads = [keeps for layer in parameters.retrieval_heads[parameters.skip_layers :] for keeps in layer]
    return [f"{sum(heads)} of {len(heads)} KV heads keep everything ({parameters.max_sequence_len:,} slots)"]


def _kept(parameters: PolicyParameters) -> str:
    if parameters.layer_windows is not None and all(parameters.layer_windows):
        return sliding_layers(parameters.layer_windows)
    if parameters.evicts_while_decoding:
        return _kept_while_decoding(parameters)
    if not parameters.eviction.evicts:
        return f"the cache keeps everything ({parameters.capacity:,} slots)"
    head = "query head" if parameters.eviction.cache_per_query_head else "KV head"
    kept = f"{_prompt_tokens(parameters)} of each {head}, {_slots(parameters)} slots"
    return f"{kept} ({parameters.eviction.describe(parameters)})"


def _prompt_tokens(parameters: PolicyParameters) -> str:
    """Tokens of a prompt that layers keep, where they differ from which to which number."""
    if parameters.squeeze_share is not None:
        most = parameters.most_kept
        least = parameters.eviction.least(parameters)
        return f"{least:,} to {most:,} prompt tokens ({parameters.prompt_budget:,} on average) kept by layer"
    if parameters.prompt_share:
        share = f"the window and {100 * parameters.prompt_share:g}% of the others"
        return f"up to {parameters.prompt_budget:,} prompt tokens kept, {share},"
    if parameters.by_length:
        return f"up to {parameters.prompt_budget:,} prompt tokens kept, by the prompt's length,"
    if parameters.layer_budgets is None:
        return f"{parameters.prompt_budget:,} prompt tokens kept"
    return f"{_span(parameters, 0)} prompt tokens kept by layer"


def _slots(parameters: PolicyParameters) -> str:
    return _span(parameters, parameters.max_output_len) if parameters.layer_budgets else f"{parameters.capacity:,}"


def _kept_while_decoding(parameters: PolicyParameters) -> str:
    kept = parameters.capacity - parameters.spare_slots
    if parameters.layer_budgets is None:
        tokens, slots, by_layer = f"{kept:,}", f"{parameters.capacity:,}", ""
    else:
        tokens, slots, by_layer = _span(parameters, 0), _span(parameters, parameters.spare_slots), " by layer"
    counted = ", positions counted in the cache" if parameters.positions == "cache" else ""
    shares, head = _shares(parameters, kept), "KV head" if parameters.retrieval_heads is None else "other KV head"
    return f"{tokens} tokens kept{by_layer} of each {head} while it answers ({shares}), {slots} slots{counted}"


def _shares(parameters: PolicyParameters, kept: int) -> str:
    """Which tokens these are: counted, or where layers differ only named."""
    last = min(parameters.recent, kept - parameters.sinks)
    most_attended = kept - parameters.sinks - last
    shares = [(parameters.sinks, "first"), (last, "last"), (most_attended, "most attended")]
    if parameters.layer_budgets is None:
        return ", ".join(f"{count:,} {which}" for count, which in shares if count)
    first = [f"{parameters.sinks:,} first"] if parameters.sinks else []
    return ", ".join([*first, *(which for count, which in shares[1:] if count)])


def _span(parameters: PolicyParameters, more: int) -> str:
    """Write the range from the smallest layer budget to the largest, each plus `more` slots."""
    assert parameters.layer_budgets is not None
    budgets = parameters.layer_budgets[parameters.skip_layers :] or (parameters.prompt_budget,)
    low, high = min(budgets) + more, max(budgets) + more
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _read(parameters: PolicyParameters) -> str:
    if not parameters.reads_a_part:
        return "a step reads all of them"
    how = f"{parameters.selection.describe(parameters)}; dense up to {parameters.dense_limit:,} tokens"
    return f"a step reads {parameters.top_k:,} tokens ({how})"
