"""Build the graphs of an engine.

    weights = GraphWeights("engine/weights.safetensors")
    onnx.save(build_prefill(config, parameters, weights=weights, turns=True), "engine/prefill.onnx")
    onnx.save(build_decode(config, parameters, weights=weights), "engine/decode.onnx")
    onnx.save(build_extend(config, parameters, weights=weights), "engine/extend.onnx")
    onnx.save(build_draft(config, parameters, weights=weights, tokens=5), "engine/draft.onnx")

A graph holds a few hundred bytes per tensor; the data stay in the weight file, which must be in the same directory.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper

from kvc_trt.errors import InputError
from kvc_trt.graph import squeeze
from kvc_trt.graph.assembly import assembled, check, int64, state_values
from kvc_trt.graph.cache_nodes import numbers_of_prompts, numbers_of_turns, prompt_window, turn_window
from kvc_trt.graph.decoder import decode_layer, extend_layer, prefill_layer
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.linear_layers import decode_linear_layer, extend_linear_layer, prefill_linear_layer
from kvc_trt.graph.state import by_layer, cache_sites
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.methods.base.graph_context import DecodeBatch, PromptBatch, TurnBatch
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.operators.emitter import Emitter, Value
from kvc_trt.operators.shapes import count_to


def build_prefill(
    config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights, turns: bool = False
) -> ModelProto:
    """Build the prefill graph, which reads prompts and returns the first logits and the compressed caches.

    input_ids INT64 [batch,sequence], right padded to a multiple of PROMPT_BLOCK; prompt_lengths INT64 [batch] ->
    logits FLOAT [batch,vocab] of each row's last token, cache_lengths INT64 [caches,batch], and every state tensor of
    `state_tensors`, ready to be bound to the decode graph; with `turns`, to the extend graph too.
    """
    check(config, parameters, weights)
    emit = Emitter()
    layers = Layers(emit, config, weights)
    prompt, positions = _prompt(layers, parameters)
    x = layers.embed(emit.Reshape("input_ids", [-1]), positions)
    sites = cache_sites(config, parameters)
    squeezed = [site for site in sites if site.parameters.squeeze_share is not None]
    cosines = []
    for layer, of_layer in by_layer(config, sites):
        with emit.scope(f"layers.{layer}"):
            if not of_layer:
                x = prefill_linear_layer(layers, prompt, x, layer)
                continue
            before = x
            x, attended = prefill_layer(layers, prompt, x, of_layer, turns=turns)
            if of_layer[0] in squeezed:
                cosines.append(squeeze.cosine(emit, prompt, before, attended))
    if squeezed:
        squeeze.trim_layers(layers, parameters, prompt, squeezed, cosines)
    by_row = emit.Reshape(x, emit.Concat(prompt.grid, [-1], axis=0))
    last = emit.GatherND(by_row, emit.Unsqueeze(emit.Sub("prompt_lengths", 1), [1]), batch_dims=1)
    emit.Identity(layers.head(last), outputs=["logits"])
    rows = [emit.Unsqueeze(f"lengths.{site.name}", [0]) for site in sites]
    emit.Concat(*rows, axis=0, outputs=["cache_lengths"])
    inputs = [int64("input_ids", ["batch", "sequence"]), int64("prompt_lengths", ["batch"])]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", config.vocab_size]),
        int64("cache_lengths", [len(sites), "batch"]),
        *state_values(config, parameters, weights, turns=turns),
    ]
    return assembled("prefill", layers, parameters, inputs, outputs)


def build_decode(
    config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights, slice_until: int | None = None
) -> ModelProto:
    """Build the decode graph, which reads one token per row, updates the state tensors in place and returns logits.

    token, positions INT64 [batch] (logical), cache_lengths INT64 [caches,batch] (stored entries before this step) and
    the state tensors -> logits FLOAT [batch,vocab] and each state tensor's `aliased_output`. An executor binds one
    buffer as input and as output. `slice_until` is the length up to which dense layers attend to a slice instead of
    reading the cache in place; a dense twin passes its engine's, and then both agree bit for bit.
    """
    check(config, parameters, weights)
    emit = Emitter()
    layers = Layers(emit, config, weights)
    limit = parameters.slice_limit if slice_until is None else slice_until
    angles = layers.rotary(emit.Unsqueeze("positions", [1]))
    batch = DecodeBatch(angles, "cache_lengths", "positions", limit, layers.rotary_tables)
    x = layers.embed("token", "positions")
    sites = cache_sites(config, parameters)
    for layer, of_layer in by_layer(config, sites):
        with emit.scope(f"layers.{layer}"):
            x = decode_layer(layers, batch, x, of_layer) if of_layer else decode_linear_layer(layers, x, layer)
    emit.Identity(layers.head(x), outputs=["logits"])
    inputs = [
        int64("token", ["batch"]),
        int64("positions", ["batch"]),
        int64("cache_lengths", [len(sites), "batch"]),
        *state_values(config, parameters, weights),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", config.vocab_size]),
        *state_values(config, parameters, weights, after=1),
    ]
    return assembled("decode", layers, parameters, inputs, outputs)


def build_draft(config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights, tokens: int) -> ModelProto:
    """Build the draft graph: `tokens` decode steps in one pass, for tokens that are known beforehand.

    token INT64 [tokens,batch]; positions INT64 [batch] (of each row's first token), cache_lengths INT64 [caches,batch]
    and the state tensors as of a decode graph -> logits FLOAT [tokens,batch,vocab], and each state tensor after each of
    the tokens (`StateTensor.outputs`). An executor binds one buffer as input and as all outputs. All rows feed all
    tokens; tokens fed too many are taken back. InputError for a policy whose steps cannot be taken back.
    """
    check(config, parameters, weights)
    if parameters.no_drafts is not None:
        raise InputError(f"policy {parameters.policy} checks no drafts: {parameters.no_drafts}")
    emit = Emitter()
    layers = Layers(emit, config, weights)
    places = emit.Add("positions", np.arange(tokens, dtype=np.int64)[:, None])
    angles = layers.rotary(emit.Reshape(places, [-1, 1]))
    batch = DecodeBatch(
        angles, "cache_lengths", "positions", parameters.slice_limit, layers.rotary_tables, tokens=tokens
    )
    x = layers.embed(emit.Reshape("token", [-1]), places)
    sites = cache_sites(config, parameters)
    for layer, of_layer in by_layer(config, sites):
        with emit.scope(f"layers.{layer}"):
            x = decode_layer(layers, batch, x, of_layer)
    emit.Reshape(layers.head(x), emit.Concat(emit.Shape("token"), [-1], axis=0), outputs=["logits"])
    inputs = [
        int64("token", [tokens, "batch"]),
        int64("positions", ["batch"]),
        int64("cache_lengths", [len(sites), "batch"]),
        *state_values(config, parameters, weights),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [tokens, "batch", config.vocab_size]),
        *state_values(config, parameters, weights, after=tokens),
    ]
    return assembled("draft", layers, parameters, inputs, outputs)


def build_extend(
    config: ModelConfig, parameters: PolicyParameters, *, weights: GraphWeights, all_logits: bool = False
) -> ModelProto:
    """Build the extend graph, which reads many tokens per row at once (a turn) and updates the state tensors.

    input_ids INT64 [batch,block], right padded; lengths INT64 [batch] new tokens; positions INT64 [batch] (logical, of
    the first new token); cache_lengths INT64 [caches,batch] and the state tensors of `state_tensors(turns=True)` ->
    logits FLOAT [batch,vocab] of each row's last token, or with `all_logits` [batch,block,vocab];
    cache_lengths_out, and each state tensor's `aliased_output`. An executor may bind one buffer as input and as output.
    InputError for a policy without turns.
    """
    check(config, parameters, weights)
    if parameters.no_turn is not None:
        raise InputError(f"policy {parameters.policy} takes no turns: {parameters.no_turn}")
    emit = Emitter()
    layers = Layers(emit, config, weights)
    turn, places = _turn(layers, parameters)
    x = layers.embed(emit.Reshape("input_ids", [-1]), places)
    sites = cache_sites(config, parameters)
    for layer, of_layer in by_layer(config, sites):
        with emit.scope(f"layers.{layer}"):
            if of_layer:
                x = extend_layer(layers, turn, x, of_layer, "cache_lengths")
            else:
                x = extend_linear_layer(layers, turn, x, layer)
    block: list[int | str] = ["batch", "block"]
    by_token = emit.Concat(turn.grid, [-1], axis=0)
    if all_logits:
        emit.Reshape(layers.head(x), by_token, outputs=["logits"])
    else:
        place = emit.Unsqueeze(emit.Sub("lengths", 1), [1])
        last = emit.GatherND(emit.Reshape(x, by_token), place, batch_dims=1)
        emit.Identity(layers.head(last), outputs=["logits"])
    rows = [emit.Unsqueeze(f"lengths.{site.name}", [0]) for site in sites]
    emit.Concat(*rows, axis=0, outputs=["cache_lengths_out"])
    inputs = [
        int64("input_ids", block),
        int64("lengths", ["batch"]),
        int64("positions", ["batch"]),
        int64("cache_lengths", [len(sites), "batch"]),
        *state_values(config, parameters, weights, turns=True),
    ]
    shape: list[int | str] = [*(block if all_logits else ["batch"]), config.vocab_size]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape),
        int64("cache_lengths_out", [len(sites), "batch"]),
        *state_values(config, parameters, weights, turns=True, after=1),
    ]
    return assembled("extend", layers, parameters, inputs, outputs)


def _prompt(layers: Layers, parameters: PolicyParameters) -> tuple[PromptBatch, Value]:
    """Return the values of the prompts that all layers share, and the position of each token, INT64 [B,S]."""
    emit = layers.emit
    grid = emit.Shape("input_ids")
    # Padding may extend past the rotary tables; its results are never used.
    counted = emit.Min(count_to(emit, emit.Shape("input_ids", start=1)), parameters.max_sequence_len - 1)
    window = prompt_window(emit, parameters, "prompt_lengths")
    positions = emit.Expand(counted, grid)
    angles = layers.rotary(positions)
    numbers = numbers_of_prompts(emit, parameters, "prompt_lengths")
    return PromptBatch("prompt_lengths", grid, angles, window, layers.rotary_tables, numbers), positions


def _turn(layers: Layers, parameters: PolicyParameters) -> tuple[TurnBatch, Value]:
    """Return the values of the turns that all layers share, and the position of each token, INT64 [B,M]."""
    emit = layers.emit
    grid, length = emit.Shape("input_ids"), emit.Shape("input_ids", start=1)
    # Padding may extend past the rotary tables; its results are never used.
    counted = emit.Add(emit.Unsqueeze("positions", [1]), count_to(emit, length))
    places = emit.Min(counted, parameters.max_sequence_len - 1)
    angles = layers.rotary(places)
    window, counting = turn_window(emit, parameters, "lengths", length)
    numbers = numbers_of_turns(emit, parameters, "positions", "lengths")
    return TurnBatch("lengths", grid, angles, window, layers.rotary_tables, numbers, "positions", counting), places
