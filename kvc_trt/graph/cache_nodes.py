"""Write the work of one layer's caches: store a prompt, take part in a decode step, take a turn.

These nodes are part of an engine's graphs (`decoder.py`), and stand alone for a backend that computes the rest of a
layer itself (`cache_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvc_trt.graph.state import CacheSite, cache_heads, cache_sites
from kvc_trt.methods.base.graph_context import (
    DecodeBatch,
    PromptBatch,
    PromptLayer,
    StepLayer,
    TurnBatch,
    TurnLayer,
    of_token,
    softmax_of,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.linear.tokens import KERNEL
from kvc_trt.operators.shapes import HeadShape, Layout, count_to


@dataclass(frozen=True)
class ProjectedValues:
    """Attention inputs of many tokens per row, by the names of `PromptLayer`."""

    query_rows: Value
    queries: Value
    keys: Value
    values: Value
    plain_keys: Callable[[], Value]
    plain_queries: Callable[[], Value]


def store_prompt(
    emit: Emitter,
    config: ModelConfig,
    batch: PromptBatch,
    made: ProjectedValues,
    sites: Sequence[CacheSite],
    *,
    turns: bool,
) -> None:
    """Write the caches `sites` of a layer after a prompt; with `turns`, also the state that a turn needs."""
    for site in sites:
        rule = site.parameters
        prompt = PromptLayer(emit, config, rule, site.layer, site.name, batch, **vars(made)).of_heads(site.kv_heads)
        rule.eviction.store(prompt, bounds=rule.has_pages)
        if turns:
            rule.eviction.begin_turns(prompt)
        rule.selection.complete(prompt)


def attend_token(
    emit: Emitter,
    config: ModelConfig,
    batch: DecodeBatch,
    made: tuple[Value, Value, Value, Callable[[], tuple[Value, Value]]],
    name: str,
    sites: Sequence[CacheSite],
    lengths: Sequence[Value],
    token: int = 0,
) -> Value:
    """Append one token of each row to the caches of a layer, of which `lengths` [B] are in use, and attend: [B,H,D].

    `made` are query, key and value after the rotary embedding, and a function that writes the first two before it.
    """
    parts = []
    here = batch if token == 0 else replace(batch, positions=emit.Add(batch.positions, token))
    for site, stored in zip(sites, lengths, strict=True):
        attended = of_token(
            f"{name}.attended" if len(sites) == 1 else f"{name}.attended.{site.name}", token, batch.tokens
        )
        rule = site.parameters
        whole = StepLayer(
            emit, config, rule, site.layer, site.name, here, *made, stored, attended, token=token, tokens=batch.tokens
        )
        parts.append(rule.selection.decode(rule.eviction.new_entry(whole.of_heads(site.kv_heads))))
    return _all_heads(emit, config, sites, parts)


def take_turn(
    emit: Emitter,
    config: ModelConfig,
    batch: TurnBatch,
    made: ProjectedValues,
    sites: Sequence[CacheSite],
    stored: Value,
) -> Value:
    """Attend from a turn's tokens to the caches of a layer and to each other, and store them: [B,H,M,D].

    `stored` [caches,B] are the entries before the turn.
    """
    parts = []
    for site in sites:
        rule, entries = site.parameters, emit.Gather(stored, site.cache)
        whole = TurnLayer(emit, config, rule, site.layer, site.name, batch, **vars(made), turn=batch, entries=entries)
        turn = rule.eviction.new_entry(whole.of_heads(site.kv_heads))
        parts.append(rule.eviction.extend(turn, bounds=rule.has_pages))
        if not rule.evicts_on_turns:
            rule.selection.append_turn(turn)
    return _all_heads(emit, config, sites, parts)


def prompt_window(emit: Emitter, parameters: PolicyParameters, lengths: Value) -> Value:
    """Return the positions of each row's last queries, INT64 [B,W,1]; 0 for those before its start."""
    # All queries of a prompt need no list.
    observed = 1 if parameters.eviction.observes_every_query else parameters.window
    offsets = np.arange(observed, dtype=np.int64) - observed
    window = emit.Max(emit.Add(emit.Unsqueeze(lengths, [1]), offsets), 0)
    return str(emit.Unsqueeze(window, [2]))


def turn_window(emit: Emitter, parameters: PolicyParameters, lengths: Value, block: Value) -> tuple[Value, Value]:
    """Return the places of each row's last queries in a turn of `block` [1] tokens, INT64 [B,W,1], and how many count.

    The latter are the last ones, INT64 [B]."""
    observed = 1 if parameters.eviction.observes_every_query else parameters.window
    width = emit.Min(block, [observed])
    last = emit.Add(emit.Sub(emit.Unsqueeze(lengths, [1]), width), count_to(emit, width))
    return emit.Unsqueeze(emit.Max(last, 0), [2]), emit.Min(lengths, width)


def numbers_of_prompts(emit: Emitter, parameters: PolicyParameters, lengths: Value) -> dict[str, Value]:
    """Return each prompt's budget and pool kernel by its length [B]; nothing if rows are alike."""
    return _looked_up(emit, parameters, parameters.budgets, lengths) if parameters.by_length else {}


def numbers_of_turns(emit: Emitter, parameters: PolicyParameters, positions: Value, lengths: Value) -> dict[str, Value]:
    """Return each conversation's budget and pool kernel after a turn of `lengths` [B] tokens at `positions` [B]."""
    if not parameters.by_length:
        return {}
    return _looked_up(emit, parameters, parameters.budgets_of_turns, emit.Add(positions, lengths))


def _looked_up(
    emit: Emitter, parameters: PolicyParameters, budgets: NDArray[np.int64], tokens: Value
) -> dict[str, Value]:
    """Write the rows' numbers from the table of `budgets` by length, and from the length of long prompts."""
    place = emit.Min(tokens, parameters.max_input_len)
    kernels = parameters.short_pool_kernel, parameters.pool_kernel
    return {
        "prompt_budgets": emit.cast(emit.Gather(budgets.astype(np.int32), place), np.int64),
        "pool_kernels": emit.Where(emit.Less(place, parameters.long_prompt), *kernels),
    }


def layout_of(config: ModelConfig, rule: PolicyParameters, dtype: str) -> Layout:
    """Return the numbers that operator bodies contain; capacity and pages only if all layers share them."""
    alike = rule.layer_budgets is None and rule.layer_windows is None
    capacity, pages = (rule.capacity, rule.stored_pages(dtype)) if alike else (None, None)
    numbers = {
        "pool_kernel": rule.pool_kernel,
        "reallocate": rule.reallocate,
        "budgeted_layers": config.num_hidden_layers - rule.skip_layers,
        "squeeze_share": rule.squeeze_share or 0.0,
        "short_pool_kernel": rule.short_pool_kernel,
    }
    if linear := [one.linear for one in config.description.attention if one.linear is not None]:
        numbers[KERNEL] = linear[0].kernel
    shape, form = _head_shape(config, rule), rule.cache_format
    softmax = softmax_of(config)
    return Layout(shape, capacity, pages, dtype, rule.fp8_bounds, numbers, form, rule.by_length, softmax)


def _head_shape(config: ModelConfig, parameters: PolicyParameters) -> HeadShape:
    """Return the attention shape that all caches of an engine share."""
    heads = {cache_heads(config, site) for site in cache_sites(config, parameters)}
    if heads == {config.num_key_value_heads}:
        return HeadShape(config.num_attention_heads, config.num_key_value_heads, config.head_size)
    if heads == {config.num_attention_heads}:
        return HeadShape(config.num_attention_heads, config.num_attention_heads, config.head_size)
    return HeadShape(None, None, config.head_size)


def _all_heads(emit: Emitter, config: ModelConfig, sites: Sequence[CacheSite], parts: Sequence[Value]) -> Value:
    """Return the attention of a layer's groups with the heads in the model's order; axis 1 are the heads."""
    if len(parts) == 1:
        return parts[0]
    return str(emit.Gather(emit.Concat(*parts, axis=1), _places(config, sites), axis=1))


def _places(config: ModelConfig, sites: Sequence[CacheSite]) -> list[int]:
    """Return the index of each query head of a layer in the concatenated outputs of its groups."""
    kv_heads = np.concatenate([site.kv_heads for site in sites if site.kv_heads is not None])
    heads = (kv_heads[:, None] * config.group_size + np.arange(config.group_size)).ravel()
    places: list[int] = np.argsort(heads).tolist()
    return places
