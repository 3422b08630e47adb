"""The inputs that graphs pass to a cache: queries, keys and values of a prompt, of one token, or of a turn.

The prefill graph passes a prompt, the decode graph one new token, the extend graph a turn's tokens beside those stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from kvc_trt.methods.base.constants import Constants
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.weights import SINKS
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.schema import CACHE_FORMAT, SOFTMAX, Operator, Tensor, parts_of
from kvc_trt.operators.shapes import count_to, size
from kvc_trt.operators.softmax import SINK_LOGITS, SoftmaxForm
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION, TURN_KEYS, TURN_VALUES
from kvc_trt.operators.turns.join_block import JOIN_BLOCK, JOIN_IN_ORDER
from kvc_trt.operators.turns.keep_positions import KEEP_POSITIONS

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Emitter, Value

Angles: TypeAlias = "Mapping[float | None, tuple[Value, Value]]"
"""Cosine and sine of some positions, by the layers' `Attention.rotary_base`."""


@dataclass(frozen=True)
class PromptBatch:
    """The batch, as every layer of the prefill graph needs it."""

    lengths: Value
    """[B]: prompt lengths."""
    grid: Value
    """INT64 [2]: batch and sequence."""
    angles: Angles
    """Cosine and sine of the positions, [B,S,D/2]."""
    window: Value
    """INT64 [B,W,1]: positions of each row's last W queries, 0 for those before its start."""
    rotary_tables: Callable[[], tuple[Value, Value]]
    """Cosine and sine of every position, FLOAT [L,D/2], in layers without a base of their own."""
    by_length: Mapping[str, Value]
    """`Operator.by_length` of a compaction, INT64 [B] each, by name; empty where all rows are alike."""


def softmax_of(config: ModelConfig) -> SoftmaxForm:
    """Return the softmax settings (cap, sinks) shared by all layers of a model."""
    return SoftmaxForm(config.description.attention_softcap, config.description.attention_sinks)


@dataclass(frozen=True)
class CacheLayer:
    """One cache of one layer while a graph is written."""

    emit: Emitter
    config: ModelConfig
    rule: Constants
    """The policy constants of this cache."""
    layer: int
    """The decoder layer that it belongs to, counted from 0."""
    name: str
    """Suffix of its tensors' names."""

    @property
    def rotates(self) -> bool:
        """True if the layer's queries and keys depend on positions."""
        return self.config.attention(self.layer).rotary

    def named(self, tensors: Sequence[str]) -> list[str]:
        """Return the names of `tensors` in this cache."""
        return [f"{tensor}.{self.name}" for tensor in tensors]

    def call(
        self, operator: Operator, inputs: Mapping[str, Value], outputs: Mapping[str, str], **numbers: int
    ) -> dict[str, Value]:
        """Append a node of an operator; attributes that are not in `numbers` come from the rule."""
        own = self.form_of(operator)
        known = {CACHE_FORMAT.name: self.rule.cache_format.code, SOFTMAX.name: softmax_of(self.config).code}
        if SINK_LOGITS in {one.name for one in own.inputs}:
            inputs = {**inputs, SINK_LOGITS: f"model.layers.{self.layer}.{SINKS}"}
        names = [one.name for one in own.attributes if one.name not in numbers]
        given = {name: known[name] if name in known else getattr(self.rule, name) for name in names}
        return operator.call(self.emit, inputs, outputs, **given, **numbers)

    def form_of(self, operator: Operator) -> Operator:
        """Return the operator with the tensors and attributes that it has in an engine of this rule."""
        own = operator.in_format(self.rule.cache_format)
        own = own.with_lengths() if self.rule.by_length else own
        return own.with_softmax(softmax_of(self.config).code)

    def parts(self, keys: Tensor, values: Tensor) -> list[str]:
        """Return the names of the tensors that hold keys and values in the cache's format."""
        return [part.name for tensor in (keys, values) for part in parts_of(tensor, self.rule.cache_format)]

    def stored(self, operator: Operator, *, bounds: bool) -> dict[str, str]:
        """Name the outputs of a compaction after the cache's tensors; unused page bounds get another name."""
        own = {"cache_lengths": "lengths"} | ({} if bounds else {"bounds": "unused_bounds"})
        outputs = operator.in_format(self.rule.cache_format).outputs
        return {one.name: f"{own.get(one.name, one.name)}.{self.name}" for one in outputs}


Layer = TypeVar("Layer", bound="PromptLayer")


@dataclass(frozen=True)
class PromptLayer(CacheLayer):
    """One layer's attention inputs for a whole prompt, or those of the KV heads that one cache serves."""

    batch: PromptBatch
    query_rows: Value
    """[B,S,H*D]"""
    queries: Value
    """[B,H,S,D]"""
    keys: Value
    """[B,G,S,D]"""
    values: Value
    plain_keys: Callable[[], Value]
    """Writes `keys` before the rotary embedding."""
    plain_queries: Callable[[], Value]
    """Writes the queries before the rotary embedding, [B,S,H,D]."""
    heads: tuple[int, ...] | None = None
    """Query heads of the group; None for the whole layer."""

    def of_heads(self: Layer, kv_heads: tuple[int, ...] | None) -> Layer:
        """The part of some KV heads; None: all of it."""
        if kv_heads is None:
            return self
        emit, group_size, plain_keys, plain_queries = (
            self.emit,
            self.config.group_size,
            self.plain_keys,
            self.plain_queries,
        )
        heads = tuple(kv * group_size + head for kv in kv_heads for head in range(group_size))
        keys, values = (emit.Gather(part, list(kv_heads), axis=1) for part in (self.keys, self.values))
        return replace(
            self,
            queries=emit.Gather(self.queries, list(heads), axis=1),
            keys=keys,
            values=values,
            heads=heads,
            plain_keys=lambda: str(emit.Gather(plain_keys(), list(kv_heads), axis=1)),
            plain_queries=lambda: str(emit.Gather(plain_queries(), list(heads), axis=2)),
        )

    def window(self) -> Value:
        """Return the last W queries of each row, [B,H,W,D]."""
        emit = self.emit
        last = by_head(emit, emit.GatherND(self.query_rows, self.batch.window, batch_dims=1), self.config.head_size)
        return last if self.heads is None else str(emit.Gather(last, list(self.heads), axis=1))

    def compact(
        self, operator: Operator, more: Mapping[str, Value] | None = None, *, bounds: bool = False,
        outputs: Mapping[str, str] | None = None, **numbers: int,
    ) -> None:  # fmt: skip
        """Write an operator that compacts the prompt, and store the kept tokens; `outputs` names them if not as the
        cache.

        It is given those of its inputs by name: q_window, q (all queries), k, v, prompt_lengths, and `more`."""
        known: dict[str, Callable[[], Value]] = {
            "q_window": self.window,
            "q": lambda: self.queries,
            "k": lambda: self.keys,
            "v": lambda: self.values,
            "prompt_lengths": lambda: self.batch.lengths,
            **{name: partial(str, value) for name, value in self.batch.by_length.items()},
        }
        given = {one.name: known[one.name]() for one in self.form_of(operator).inputs if one.name in known}
        self.call(operator, {**given, **(more or {})}, outputs or self.stored(operator, bounds=bounds), **numbers)

    def store_tokens(
        self, keys: Value, values: Value, tables: tuple[Tensor, Tensor] = (K_CACHE, V_CACHE),
        named: Callable[[Sequence[str]], list[str]] | None = None, **numbers: int,
    ) -> None:  # fmt: skip
        """Write `tables` that have a format: the first tokens of exact `keys` and `values` [B,G,n,D] of each prompt.

        `named` gives them their names if they are not the cache's."""
        inputs = {"k": keys, "v": values, "prompt_lengths": self.batch.lengths}
        names = (named or self.named)(self.parts(*tables))
        outputs = zip(self.parts(K_CACHE, V_CACHE), names, strict=True)
        self.call(STORE_TOKENS, inputs, dict(outputs), **numbers)


@dataclass(frozen=True)
class DecodeBatch:
    """The batch, as every layer of the decode graph needs it."""

    angles: Angles
    """Cosine and sine of the positions, [T,1,D/2], T = tokens * B."""
    cache_lengths: Value
    """[caches,B]: entries before this step."""
    positions: Value
    """[B]: logical position of each row's first token."""
    slice_until: int
    """The largest number of entries of which dense layers take a slice, as a sparse layer does if a row fits."""
    rotary_tables: Callable[[], tuple[Value, Value]]
    """Cosine and sine of every position, [S,D/2], in layers without a base of their own."""
    tokens: int = 1
    """Tokens of each row, fed one behind the other: all rows' first tokens, then all second ones."""


@dataclass(frozen=True)
class StepLayer(CacheLayer):
    """One layer's attention inputs for one token per row, or those of the KV heads that one cache serves."""

    batch: DecodeBatch
    query: Value
    """[B,H,D]"""
    key: Value
    """[B,G,D]"""
    value: Value
    plain: Callable[[], tuple[Value, Value]]
    """Writes query and key before the rotary embedding."""
    lengths: Value
    """[B]: entries of the cache before this step."""
    attended: str
    """The name of the attention result."""
    token: int = 0
    """The index of this token among those of the row that one run feeds."""
    tokens: int = 1
    """The number of tokens of a row that one run feeds."""

    def state(self, tensor: str) -> Value:
        """Return the cache's state tensor of that name, as the previous token left it."""
        if self.token == 0:
            return f"{tensor}.{self.name}"
        return of_token(f"{tensor}_out.{self.name}", self.token - 1, self.tokens)

    def updated(self, tensor: str) -> str:
        """Return the name of the graph's output that holds a state tensor after this token."""
        return of_token(f"{tensor}_out.{self.name}", self.token, self.tokens)

    def of_heads(self, kv_heads: tuple[int, ...] | None) -> StepLayer:
        """The part of some KV heads; None: all of it."""
        if kv_heads is None:
            return self
        emit, group_size, plain = self.emit, self.config.group_size, self.plain
        heads = [kv * group_size + head for kv in kv_heads for head in range(group_size)]

        def plain_part() -> tuple[Value, Value]:
            query, key = plain()
            return emit.Gather(query, heads, axis=1), emit.Gather(key, list(kv_heads), axis=1)

        key, value = (emit.Gather(part, list(kv_heads), axis=1) for part in (self.key, self.value))
        return replace(self, query=emit.Gather(self.query, heads, axis=1), key=key, value=value, plain=plain_part)

    def attend(self, operator: Operator, more: Mapping[str, Value] | None = None, **numbers: int) -> Value:
        """Write an operator that appends and attends.

        It is given those of its inputs by name: query, k_new, v_new, cache_lengths, positions, the cache's state, and
        `more`. Its outputs are the result, the updated state, and `selected`."""
        own = operator.in_format(self.rule.cache_format)
        state = {one.name for one in own.state}
        known = {
            "query": self.query,
            "k_new": self.key,
            "v_new": self.value,
            "cache_lengths": self.lengths,
            "positions": self.batch.positions,
            **{name: self.state(name) for name in state},
        }
        given = {one.name: known[one.name] for one in own.inputs if one.name in known}
        outputs = {f"{name}_out": self.updated(name) for name in state}
        for one in own.outputs:
            outputs.setdefault(one.name, of_token(f"{one.name}.{self.name}", self.token, self.tokens))
        outputs["output"] = self.attended
        self.call(operator, {**given, **(more or {})}, outputs, **numbers)
        return self.attended


_OF_TOKEN = ".token"


def of_token(name: str, token: int, tokens: int) -> str:
    """Name a value of one of the `tokens` of a row that one run feeds; that of the last has the plain name."""
    return name if token == tokens - 1 else f"{name}{_OF_TOKEN}{token}"


def of_any_token(name: str) -> str:
    """Return the name that a value has of the last token, given that of any: `of_token` undone."""
    return name.partition(_OF_TOKEN)[0]


def by_head(emit: Emitter, x: Value, head_size: int) -> Value:
    """Reshape [B,S,heads*D] -> [B,heads,S,D]."""
    return str(emit.Transpose(emit.Reshape(x, [0, 0, -1, head_size]), perm=[0, 2, 1, 3]))


def repeat_heads(emit: Emitter, config: ModelConfig, rows: Value) -> Value:
    """Repeat each head of `rows` [B,G,...] for every query head that shares it."""
    shared = [head // config.group_size for head in range(config.num_attention_heads)]
    return str(emit.Gather(rows, shared, axis=1))


def store_whole(prompt: PromptLayer) -> None:
    """Store the whole prompt in the cache; padding is zero."""
    if prompt.rule.cache_format.keys is not None:
        prompt.store_tokens(prompt.keys, prompt.values)
    else:
        store_rows(prompt, prompt.rule.capacity, prompt.named(("k_cache", "v_cache")))
    prompt.emit.Identity(prompt.batch.lengths, outputs=[f"lengths.{prompt.name}"])


def store_rows(prompt: PromptLayer, capacity: int, names: Sequence[str]) -> None:
    """Write keys and values of the whole prompt into tables of `capacity` slots of these names; padding is zero."""
    emit, lengths = prompt.emit, prompt.batch.lengths
    count = emit.Min(size(emit, prompt.keys, 2), [capacity])
    stored = emit.Less(emit.Unsqueeze(count_to(emit, count), [1]), emit.Reshape(lengths, [-1, 1, 1, 1]))
    # Pad all axes: ONNX Runtime moves a transpose through Pad as if there were no list of axes.
    missing = emit.Concat([0, 0, 0, 0, 0, 0], emit.Sub([capacity], count), [0], axis=0)
    for rows, name in zip((prompt.keys, prompt.values), names, strict=True):
        zero = emit.CastLike(np.float32(0), rows)
        kept = emit.Where(stored, emit.Slice(rows, [0], count, [2]), zero)
        emit.Pad(kept, missing, zero, outputs=[name])


@dataclass(frozen=True)
class TurnBatch(PromptBatch):
    """The batch, as every layer of the extend graph needs it; `lengths` [B] counts each row's new tokens."""

    positions: Value
    """[B]: logical position of each row's first new token."""
    window_lengths: Value
    """[B]: how many of the rows of `PromptLayer.window` are queries of the turn: the last ones."""


@dataclass(frozen=True)
class Joined:
    """Stored and new tokens of one cache."""

    tables: Mapping[str, Value]
    """Keys and values [B,G,T,D], the stored tokens and then the new ones, by the names of an operator's inputs."""
    lengths: Value
    """[B]: stored and new tokens."""


@dataclass(frozen=True)
class Ordered(Joined):
    """Stored and new tokens of a cache whose slots are in any order, by position."""

    stored: Value
    """[B]: stored tokens."""
    order: Value
    """INT32 [B,G,C]: the slot of each stored entry."""
    positions: Value
    """INT32 [B,G,C]: their positions."""


@dataclass(frozen=True, kw_only=True)
class TurnLayer(PromptLayer):
    """One layer's attention inputs for a turn's new tokens, or those of the KV heads that one cache serves."""

    turn: TurnBatch
    """The `batch`."""
    entries: Value
    """[B]: entries of the cache before the turn."""

    def state(self, tensor: str) -> Value:
        """Return the cache's state tensor of that name, as it is before the turn."""
        return f"{tensor}.{self.name}"

    def updated(self, tensor: str) -> str:
        """Return the name of the graph's output that holds a state tensor after the turn."""
        return f"{tensor}_out.{self.name}"

    def join(self, stored: Value) -> Joined:
        """Write stored and new tokens into one table; `stored` [B] are the first slots that hold tokens."""
        inputs = {**self.new_entries(), "cache_lengths": stored, "lengths": self.batch.lengths}
        found = self.call(JOIN_BLOCK, inputs, self._joined(JOIN_BLOCK))
        return Joined(self._tables(found), found["joined_lengths"])

    def join_in_order(self, most: int | Value) -> Ordered:
        """Write stored and new tokens into one table by position; at most `most` (a value: [B]) are stored."""
        stored = self.emit.Min(self.entries, [most] if isinstance(most, int) else most)
        inputs = {
            **self.new_entries(), "slot_positions": self.state("slot_positions"), "cache_lengths": stored,
            "lengths": self.batch.lengths,
        }  # fmt: skip
        found = self.call(JOIN_IN_ORDER, inputs, self._joined(JOIN_IN_ORDER))
        order = found["order"], found["ordered_positions"]
        return Ordered(self._tables(found), found["joined_lengths"], stored, *order)

    def _joined(self, operator: Operator) -> dict[str, str]:
        """Name the outputs of a join."""
        outputs = operator.in_format(self.rule.cache_format).outputs
        return {one.name: f"joined_{one.name}.{self.name}" for one in outputs}

    def _tables(self, found: Mapping[str, Value]) -> dict[str, Value]:
        """Return keys and values, in all their parts, among the outputs of a join."""
        return {name: found[name] for name in self.parts(TURN_KEYS, TURN_VALUES)}

    def new_entries(self, keys: Tensor = K_CACHE, values: Tensor = V_CACHE) -> dict[str, Value]:
        """Return the new keys and values, and the tables in the state, by the names of an operator's inputs."""
        caches = zip(self.parts(K_CACHE, V_CACHE), self.parts(keys, values), strict=True)
        return {"k_new": self.keys, "v_new": self.values, **{name: self.state(state) for name, state in caches}}

    def attend(self, tables: Mapping[str, Value], stored: Value) -> Value:
        """Attend from the new tokens to `stored` [B] entries and causally to each other; returns [B,H,M,D].

        `tables` are keys and values, stored and new, by the names of an operator's inputs."""
        inputs = {"q": self.queries, **tables, "cache_lengths": stored}
        return self.call(EXTEND_ATTENTION, inputs, {"o": f"attended.{self.name}"})["o"]

    def append(self, *, bounds: bool) -> Value:
        """Append the new tokens, raise the page bounds if there are any, and attend; returns [B,H,M,D]."""
        emit, places = self.emit, {"cache_lengths": self.entries, "lengths": self.batch.lengths}
        tables = self.append_to(K_CACHE, V_CACHE, self.entries)
        if bounds:
            paged = {"k_new": self.keys, "bounds": self.state("bounds"), **places}
            self.call(RAISE_BOUNDS, paged, {"bounds_out": self.updated("bounds")})
        emit.Add(self.entries, self.batch.lengths, outputs=[f"lengths.{self.name}"])
        return self.attend(tables, self.entries)

    def append_to(self, keys: Tensor, values: Tensor, stored: Value) -> dict[str, Value]:
        """Append the new tokens to tables of the state that hold `stored` [B] ones; returns the tables to attend to."""
        inputs = {**self.new_entries(keys, values), "cache_lengths": stored, "lengths": self.batch.lengths}
        outputs = self.parts(updated(K_CACHE), updated(V_CACHE))
        names = dict(zip(outputs, map(self.updated, self.parts(keys, values)), strict=True))
        found = self.call(APPEND_BLOCK, inputs, names)
        return dict(zip(self.parts(TURN_KEYS, TURN_VALUES), (found[name] for name in outputs), strict=True))

    def compact_turn(
        self,
        operator: Operator,
        joined: Joined,
        more: Mapping[str, Value] | None = None,
        *,
        ordered: Ordered | None = None,
        bounds: bool = False,
        **numbers: int,
    ) -> None:
        """Write an operator that compacts stored and new tokens, and store the kept ones.

        It is given those of its inputs by name: q_window, q, k, v, prompt_lengths, lengths, window_lengths,
        stored_scores, and `more`. `ordered` has the stored tokens' positions where they are not those of the slots, and
        is the source of the inputs order and stored_lengths.
        """
        known: dict[str, Callable[[], Value]] = {
            "q_window": self.window,
            "q": lambda: self.queries,
            "prompt_lengths": lambda: joined.lengths,
            "lengths": lambda: self.batch.lengths,
            "window_lengths": lambda: self.turn.window_lengths,
            "stored_scores": lambda: self.state("scores"),
            **{name: partial(str, value) for name, value in self.batch.by_length.items()},
        }
        if ordered is not None:
            known |= {"order": lambda: ordered.order, "stored_lengths": lambda: ordered.stored}
        given = {one.name: known[one.name]() for one in self.form_of(operator).inputs if one.name in known}
        names = self.compacted(operator, bounds=bounds, indices="slots")
        kept = self.call(operator, {**given, **joined.tables, **(more or {})}, names, **numbers)
        inputs = {
            "slot_positions": self.state("slot_positions") if ordered is None else ordered.positions,
            "cache_lengths": self.entries if ordered is None else ordered.stored,
            "positions": self.turn.positions,
            "indices": kept["indices"],
        }
        found = self.call(KEEP_POSITIONS, inputs, {"slot_positions_out": f"indices.{self.name}"})
        self.emit.Identity(found["slot_positions_out"], outputs=[self.updated("slot_positions")])

    def compacted(self, operator: Operator, *, bounds: bool, indices: str) -> dict[str, str]:
        """Name the outputs of a compaction after the cache's tensors after the turn; `indices` names its list."""
        own = {"cache_lengths": f"lengths.{self.name}", "indices": f"{indices}.{self.name}"}
        own |= {name: f"{name}_of_turn.{self.name}" for name in ("slot_positions", *(() if bounds else ("bounds",)))}
        outputs = operator.in_format(self.rule.cache_format).outputs
        return {one.name: own.get(one.name, self.updated(one.name)) for one in outputs}
