"""Write one decoder layer into the prefill, the decode or the extend graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvc_trt.graph.cache_nodes import ProjectedValues, attend_token, store_prompt, take_turn
from kvc_trt.graph.layers import Layers
from kvc_trt.graph.state import CacheSite
from kvc_trt.methods.base.graph_context import DecodeBatch, PromptBatch, TurnBatch, by_head, softmax_of
from kvc_trt.models.rope import query_scale
from kvc_trt.models.weights import ATTENTION_GATE, ATTENTION_RESULT_NORM, FEED_FORWARD_RESULT_NORM
from kvc_trt.operators.attention.prefill_attention import PREFILL_ATTENTION
from kvc_trt.operators.attention.sliding_attention import SLIDING_ATTENTION
from kvc_trt.operators.emitter import Value
from kvc_trt.operators.schema import SOFTMAX


def prefill_layer(
    layers: Layers, batch: PromptBatch, x: Value, sites: Sequence[CacheSite], *, turns: bool
) -> tuple[Value, Value]:
    """Pass the residual stream [T,hidden] through one layer, which writes its caches `sites`.

    With `turns` they also carry the state that a turn needs. Return the stream after the layer, and the one between
    attention and feed-forward.
    """
    emit, config, name = layers.emit, layers.config, f"model.layers.{sites[0].layer}"
    normed = read(layers, x, f"{name}.input_layernorm")
    made = _projected(layers, batch, normed, sites[0].layer)
    inputs = {"q": made.queries, "k": made.keys, "v": made.values, **layers.sinks(sites[0].layer)}
    rule = sites[0].parameters
    code = softmax_of(config).code
    numbers = {SOFTMAX.name: code} if code else {}
    if rule.slides:
        named = {"o": f"attended_over_prompt.{sites[0].name}"}
        attended = SLIDING_ATTENTION.call(emit, inputs, named, window=rule.capacity, **numbers)["o"]
    else:
        attended = PREFILL_ATTENTION.call(emit, inputs, None, **numbers)["o"]
    store_prompt(emit, config, batch, made, sites, turns=turns)
    return _finished(layers, x, normed, attended, sites[0].layer)


def extend_layer(layers: Layers, batch: TurnBatch, x: Value, sites: Sequence[CacheSite], stored: Value) -> Value:
    """Pass a turn's residual stream [T,hidden] through one layer, which reads and writes its caches `sites`.

    `stored` [caches,B] are the entries before the turn.
    """
    emit, config, name = layers.emit, layers.config, f"model.layers.{sites[0].layer}"
    normed = read(layers, x, f"{name}.input_layernorm")
    made = _projected(layers, batch, normed, sites[0].layer)
    layers.sinks(sites[0].layer)  # which the nodes of its caches read
    attended = take_turn(emit, config, batch, made, sites, stored)
    return _finished(layers, x, normed, attended, sites[0].layer)[0]


def read(layers: Layers, x: Value, name: str) -> Value:
    """Return the input of attention or feed-forward: a norm of the residual stream, or the stream itself."""
    return layers.norm(x, name) if layers.config.description.norms.reads_norm else x


def _added(layers: Layers, update: Value, name: str) -> Value:
    """Return the update that attention or feed-forward add to the residual stream, before its scale: their result or
    its norm."""
    return layers.norm(update, name) if layers.config.description.norms.adds_norm else update


def _projected(layers: Layers, batch: PromptBatch, normed: Value, layer: int) -> ProjectedValues:
    """Project normed activations [T,hidden] to queries, keys and values."""
    emit, config = layers.emit, layers.config
    plain_query, query = _rotated(layers, batch, normed, layer, "q")
    plain_key, key = _rotated(layers, batch, normed, layer, "k")
    value = by_row(layers, batch, layers.linear(normed, f"model.layers.{layer}.self_attn.v_proj"))
    queries, keys, values = (by_head(emit, part, config.head_size) for part in (query, key, value))

    def plain_keys() -> Value:
        return by_head(emit, plain_key, config.head_size)

    def plain_queries() -> Value:
        return str(emit.Reshape(plain_query, [0, 0, -1, config.head_size]))

    return ProjectedValues(query, queries, keys, values, plain_keys, plain_queries)


def _finished(layers: Layers, x: Value, normed: Value, attended: Value, layer: int) -> tuple[Value, Value]:
    """Add attention [B,H,S,D] and the feed-forward block to the stream; return it after both, and between them.

    `normed` is the input of attention."""
    emit, config = layers.emit, layers.config
    flat = emit.Reshape(
        emit.Transpose(attended, perm=[0, 2, 1, 3]), [-1, config.num_attention_heads * config.head_size]
    )
    update = _output(layers, normed, flat, layer)
    return with_update(layers, x, normed, update, f"model.layers.{layer}", layers.feed_forward)


def _output(layers: Layers, normed: Value, flat: Value, layer: int) -> Value:
    """Project attention [T,H*D] back [T,hidden], times the gate that reads the input of attention."""
    name = f"model.layers.{layer}"
    if layers.config.attention(layer).gated:
        gate = layers.linear(normed, f"{name}.{ATTENTION_GATE}")
        flat = str(layers.emit.Mul(flat, layers.emit.Sigmoid(gate)))
    return layers.linear(flat, f"{name}.self_attn.o_proj")


def with_update(
    layers: Layers, x: Value, normed: Value, update: Value, name: str, feed_forward: Callable[[Value, str], Value]
) -> tuple[Value, Value]:
    """Add the result of attention or a linear layer [T,hidden], and the feed-forward block, to the residual stream.

    `normed` is the input of the former, `feed_forward` one of the block's two forms. Return the stream after both, and
    between them.
    """
    norms, before = layers.config.description.norms, x
    x = layers.residual(x, _added(layers, update, f"{name}.{ATTENTION_RESULT_NORM}"))
    stream = before if norms.side_by_side else x
    normed = normed if norms.place == "shared" else read(layers, stream, f"{name}.post_attention_layernorm")
    update = feed_forward(normed, name)
    return layers.residual(x, _added(layers, update, f"{name}.{FEED_FORWARD_RESULT_NORM}")), x


def _rotated(layers: Layers, batch: PromptBatch, normed: Value, layer: int, kind: str) -> tuple[Value, Value]:
    """Queries or keys of the whole prompt, [B,S,heads*D], before RoPE and after it."""
    heads = layers.config.num_attention_heads if kind == "q" else layers.config.num_key_value_heads
    attention = f"model.layers.{layer}.self_attn"
    plain = by_row(layers, batch, layers.linear(normed, f"{attention}.{kind}_proj"))
    if layers.config.qk_norm:
        plain = layers.norm_heads(plain, f"{attention}.{kind}_norm.weight")
    if kind == "q":
        plain = layers.scale_queries(plain, layer)
    return plain, layers.rotate(plain, batch.angles, heads, layer)


def by_row(layers: Layers, batch: PromptBatch, x: Value) -> Value:
    """Reshape [T,width] -> [B,S,width]."""
    return str(layers.emit.Reshape(x, layers.emit.Concat(batch.grid, [-1], axis=0)))


def decode_layer(layers: Layers, batch: DecodeBatch, x: Value, sites: Sequence[CacheSite]) -> Value:
    """Pass the residual stream [T,hidden] through one layer, which reads and writes its caches `sites`."""
    emit, config, name = layers.emit, layers.config, f"model.layers.{sites[0].layer}"
    normed = read(layers, x, f"{name}.input_layernorm")
    attended = _attend(layers, batch, normed, name, sites)
    flat = emit.Reshape(attended, [0, config.num_attention_heads * config.head_size])
    update = _output(layers, normed, flat, sites[0].layer)
    return with_update(layers, x, normed, update, name, layers.feed_forward_joined)[0]


def _attend(layers: Layers, batch: DecodeBatch, normed: Value, name: str, sites: Sequence[CacheSite]) -> Value:
    """Return attention of each token over all caches of a layer, [T,H,D], heads in the model's order."""
    emit = layers.emit
    made, plain = _project(layers, batch, normed, sites[0].layer)
    layers.sinks(sites[0].layer)  # which the nodes of its caches read
    lengths = [emit.Gather(batch.cache_lengths, site.cache) for site in sites]
    if batch.tokens == 1:
        return attend_token(emit, layers.config, batch, (*made, plain), name, sites, lengths)
    parts = [emit.Split(part, axis=0, num_outputs=batch.tokens, outputs=batch.tokens) for part in made]
    found: list[Value] = []
    for token, (query, key, value) in enumerate(zip(*parts, strict=True)):
        if token:
            # Each token is a step of its own: it may change the cache only once the one before has read it.
            done = emit.Shape(found[-1], end=1)
            lengths = [emit.Expand(emit.Add(stored, 1), done) for stored in lengths]
            if any(site.parameters.selection.sums for site in sites):  # to which the value is added without a slot
                value = emit.Expand(value, emit.Concat(done, [1, 1], axis=0))
        projected = query, key, value, plain
        found.append(attend_token(emit, layers.config, batch, projected, name, sites, lengths, token))
    return str(emit.Concat(*found, axis=0))


def _project(
    layers: Layers, batch: DecodeBatch, normed: Value, layer: int
) -> tuple[tuple[Value, Value, Value], Callable[[], tuple[Value, Value]]]:
    """Project T tokens to query [T,H,D], key and value [T,G,D]; query and key are rotated together.

    Also return a function that writes query and key before rotation.
    """
    emit, config, attention = layers.emit, layers.config, f"model.layers.{layer}.self_attn"
    heads, kv_heads, head_size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    joined = layers.linear_joined(normed, [f"{attention}.{kind}_proj" for kind in "qkv"])
    rows = emit.Reshape(joined, [0, 1, (heads + 2 * kv_heads) * head_size])
    if config.qk_norm or query_scale(config, layer) is not None:
        widths = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
        query, key, value = emit.Split(rows, widths, axis=2, outputs=3)
        if config.qk_norm:
            query, key = (
                layers.norm_heads(part, f"{attention}.{kind}_norm.weight") for part, kind in ((query, "q"), (key, "k"))
            )
        to_rotate = emit.Concat(layers.scale_queries(query, layer), key, axis=2)
    else:
        to_rotate, value = emit.Split(rows, [(heads + kv_heads) * head_size, kv_heads * head_size], axis=2, outputs=2)

    def split(both: Value) -> tuple[Value, Value]:
        by_head = emit.Reshape(both, [0, heads + kv_heads, head_size])
        query, key = emit.Split(by_head, [heads, kv_heads], axis=1, outputs=2)
        return query, key

    query, key = split(layers.rotate(to_rotate, batch.angles, heads + kv_heads, layer))
    return (query, key, str(emit.Reshape(value, [0, kv_heads, head_size]))), lambda: split(to_rotate)
