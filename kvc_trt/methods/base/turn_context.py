"""The inputs that the extend graph passes to a cache: stored tokens, and a turn's queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc_trt.methods.base.graph_context import PromptBatch, PromptLayer
from kvc_trt.operators.schema import Operator
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, RAISE_BOUNDS
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION
from kvc_trt.operators.turns.join_block import JOIN_BLOCK, JOIN_IN_ORDER
from kvc_trt.operators.turns.keep_positions import KEEP_POSITIONS

if TYPE_CHECKING:
    from kvc_trt.operators.emitter import Value


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

    keys: Value
    """[B,G,T,D]: the stored tokens, then the new ones."""
    values: Value
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
        found = self.call(
            JOIN_BLOCK, inputs, {one.name: f"joined_{one.name}.{self.name}" for one in JOIN_BLOCK.outputs}
        )
        return Joined(found["k"], found["v"], found["joined_lengths"])

    def join_in_order(self, most: int) -> Ordered:
        """Write stored and new tokens into one table by position; `most` is the largest number of stored ones."""
        stored = self.emit.Min(self.entries, [most])
        inputs = {
            **self.new_entries(), "slot_positions": self.state("slot_positions"), "cache_lengths": stored,
            "lengths": self.batch.lengths,
        }  # fmt: skip
        names = {one.name: f"joined_{one.name}.{self.name}" for one in JOIN_IN_ORDER.outputs}
        found = self.call(JOIN_IN_ORDER, inputs, names)
        tables = found["k"], found["v"], found["joined_lengths"]
        return Ordered(*tables, stored, found["order"], found["ordered_positions"])

    def new_entries(self) -> dict[str, Value]:
        """Return the new keys and values and the caches, by the names of an operator's inputs."""
        return {
            "k_new": self.keys, "v_new": self.values,
            "k_cache": self.state("k_cache"), "v_cache": self.state("v_cache"),
        }  # fmt: skip

    def attend(self, keys: Value, values: Value, stored: Value) -> Value:
        """Attend from the new tokens to `stored` [B] entries and causally to each other; returns [B,H,M,D]."""
        inputs = {"q": self.queries, "k": keys, "v": values, "cache_lengths": stored}
        return self.call(EXTEND_ATTENTION, inputs, {"o": f"attended.{self.name}"})["o"]

    def append(self, *, bounds: bool) -> Value:
        """Append the new tokens, raise the page bounds if there are any, and attend; returns [B,H,M,D]."""
        emit, places = self.emit, {"cache_lengths": self.entries, "lengths": self.batch.lengths}
        names = {f"{tensor}_out": self.updated(tensor) for tensor in ("k_cache", "v_cache")}
        caches = self.call(APPEND_BLOCK, {**self.new_entries(), **places}, names)
        if bounds:
            paged = {"k_new": self.keys, "bounds": self.state("bounds"), **places}
            self.call(RAISE_BOUNDS, paged, {"bounds_out": self.updated("bounds")})
        emit.Add(self.entries, self.batch.lengths, outputs=[f"lengths.{self.name}"])
        return self.attend(caches["k_cache_out"], caches["v_cache_out"], self.entries)

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
        """Write an operator that compacts stored and new tokens, and store what it keeps.

        It is given those of its inputs by name: q_window, q, k, v, prompt_lengths, lengths, window_lengths,
        stored_scores, and `more`. `ordered` has the stored tokens' positions where they are not those of the slots, and
        is the source of the inputs order and stored_lengths.
        """
        known: dict[str, Callable[[], Value]] = {
            "q_window": self.window,
            "q": lambda: self.queries,
            "k": lambda: joined.keys,
            "v": lambda: joined.values,
            "prompt_lengths": lambda: joined.lengths,
            "lengths": lambda: self.batch.lengths,
            "window_lengths": lambda: self.turn.window_lengths,
            "stored_scores": lambda: self.state("scores"),
        }
        if ordered is not None:
            known |= {"order": lambda: ordered.order, "stored_lengths": lambda: ordered.stored}
        given = {one.name: known[one.name]() for one in operator.inputs if one.name in known}
        names = self.compacted(operator, bounds=bounds, indices="slots")
        kept = self.call(operator, {**given, **(more or {})}, names, **numbers)
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
        return {one.name: own.get(one.name, self.updated(one.name)) for one in operator.outputs}
