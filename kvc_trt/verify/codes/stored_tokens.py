"""The tokens that an engine's caches store during one run: exact keys and values, and the codes that they must have.

An executor exposes the exact keys and values that each graph stores. `StoredTokens` keeps them by logical position,
and compares every cache with the codes that the reference makes of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.operators.attention.stored_rows import CAPACITIES
from kvc_trt.operators.schema import Tensor, part_names
from kvc_trt.verify.codes.parts import CACHES, read_parts, stored_parts, unpacked

if TYPE_CHECKING:
    from kvc_trt.backends.harness import Harness, StoredBlock
    from kvc_trt.graph.state import CacheSite
    from kvc_trt.models.cache_formats import VectorFormat

Array = NDArray[Any]
Int64 = NDArray[np.int64]
_WHOLE = ("k_whole", "v_whole")


class Exposing(Protocol):
    """An executor that exposes inner values of a run."""

    def exposed(self, name: str) -> Array:
        """Return an exposed value of the latest run."""


@dataclass
class CodesFound:
    """The result of comparing stored vectors with those made of the executor's own exact keys and values."""

    vectors: int = 0
    wrong: int = 0
    first: str = ""
    """The place of the first wrong vector, and its error."""
    bounds: int = 0
    """The number of page bounds compared with those of the values that the codes stand for."""
    wrong_bounds: int = 0
    first_bound: str = ""

    def add(self, vectors: int, wrong: int, first: str) -> None:
        """Add the counts of one tensor's vectors."""
        self.vectors, self.wrong = self.vectors + vectors, self.wrong + wrong
        self.first = self.first or first


class StoredTable:
    """Keys or values of one cache, by logical position: exact ones [B,G,L,D], and their parts."""

    def __init__(self, tensor: Tensor, form: VectorFormat) -> None:
        self.tensor, self.form = tensor, form
        self.exact: Array | None = None
        self.parts: list[Array] = []
        self.known: NDArray[np.bool_] | None = None

    def put(self, positions: Int64, exact: Array) -> None:
        """Store the parts of `exact` [B,G,n,D] at `positions` [B,G,n]; those below 0 are padding."""
        self._grow(exact, int(positions.max(initial=0)) + 1)
        assert self.exact is not None
        assert self.known is not None
        row, head, token = np.nonzero(positions >= 0)
        where = row, head, positions[row, head, token]
        self.exact[where], self.known[where] = exact[row, head, token], True
        for table, made in zip(self.parts, stored_parts(exact[row, head, token], self.form), strict=True):
            table[where] = made

    def _grow(self, like: Array, length: int) -> None:
        before = 0 if self.known is None else self.known.shape[2]
        if length <= before and self.known is not None:
            return
        shape = (*like.shape[:2], max(length, 2 * before))
        widths = [(like.dtype, like.shape[3])]
        widths += [(part.dtype, part.shape[-1]) for part in stored_parts(np.zeros((1, like.shape[3])), self.form)]
        tables = [np.zeros((*shape, width), kind) for kind, width in widths]
        known = np.zeros(shape, bool)
        if self.known is not None:
            for new, old in zip((*tables, known), (self.exact, *self.parts, self.known), strict=True):
                new[:, :, :before] = old
        self.exact, *self.parts = tables
        self.known = known

    def at(self, where: Int64) -> list[Array]:
        """Return the parts [B,G,n,.] of the tokens at positions `where` [B,G,n]."""
        return [picked(part, where) for part in self.parts]

    def exact_at(self, where: Int64) -> Array:
        """Return the exact vectors [B,G,n,D] of the tokens at positions `where` [B,G,n]."""
        assert self.exact is not None
        return picked(self.exact, where)

    def knows(self, where: Int64) -> NDArray[np.bool_]:
        """Return a mask [B,G,n] of the positions `where` whose tokens the executor stored."""
        assert self.known is not None
        inside = (where >= 0) & (where < self.known.shape[2])
        known: NDArray[np.bool_] = inside & picked(self.known[..., None], where)[..., 0]
        return known


@dataclass
class StoredTokens:
    """All tokens that one batch stores in the caches `sites` of an executor."""

    sites: Sequence[CacheSite]
    blocks: Mapping[str, list[list[StoredBlock]]]
    """The stored form of each token of a pass, by graph."""
    found: CodesFound = field(default_factory=CodesFound)
    tables: dict[int, tuple[StoredTable, StoredTable]] = field(default_factory=dict)
    """The tables of keys and values by cache."""
    _where: dict[int, Int64] = field(default_factory=dict)
    """The logical position [B,G,C] of the token in each slot, by cache; -1 for a free slot."""
    _slots: dict[int, list[int]] = field(default_factory=dict)
    """The number of slots that each row uses, by cache, if rows have capacities."""
    _free: dict[int, Int64] = field(default_factory=dict)
    """The slot [B,G] of the next token, by cache, for those that do not fill slots in order."""

    @classmethod
    def of(cls, target: Harness, sites: Sequence[CacheSite], *graphs: str) -> StoredTokens | None:
        """Return an empty record for the tokens that these graphs of the engine on `target` store.

        None if its caches have no format, or if `target` does not expose the stored vectors."""
        blocks = {graph: target.stored_blocks(graph) for graph in graphs}
        return cls(sites, blocks) if all(blocks.values()) else None

    def names(self) -> set[str]:
        """Return the values that the executor must expose."""
        blocks = [block for of_graph in self.blocks.values() for of_token in of_graph for block in of_token]
        return {name for block in blocks for name in (block.keys, block.values, block.positions) if name is not None}

    def after_prompt(
        self, executor: Exposing, state: Mapping[str, Array], kept: Mapping[int, Array], lengths: Int64
    ) -> None:
        """Compare the vectors that prefill stored; `kept` has the kept positions [B,G,C] of caches that list them."""
        for block in self.blocks["prefill"][0]:
            site = self.sites[block.cache]
            keys, values = executor.exposed(block.keys), executor.exposed(block.values)
            rows, heads, count = keys.shape[:3]
            places = np.arange(count)
            positions = np.where(places < lengths[:, None, None], places, -1)
            if block.positions is not None:
                positions = executor.exposed(block.positions)[:, :, :count]
            positions = np.broadcast_to(positions, (rows, heads, count)).astype(np.int64)
            slots = site.parameters.capacity
            first = np.where(np.arange(slots) < lengths[:, None, None], np.arange(slots), -1)
            where = np.full((rows, heads, slots), -1, np.int64)
            listed = kept.get(site.cache, np.broadcast_to(first, where.shape))[:, :, :slots]
            where[:, :, : listed.shape[2]] = listed
            self._where[site.cache] = where
            if (name := f"{CAPACITIES.name}.{site.name}") in state:
                self._slots[site.cache] = state[name].ravel().tolist()
            if block.positions is None and not site.parameters.keeps_whole:  # dropped tokens are not stored anywhere
                positions, keys, values = where, *(picked(table, where) for table in (keys, values))
            self._put(site, positions, keys, values)
            self._compare(site, state, free=True)
            if site.parameters.keeps_whole:
                self._compare_whole(site, state, lengths)

    def before_step(self, state: Mapping[str, Array]) -> None:
        """Record the free slot of each row and head in the caches whose steps put tokens into any slot."""
        self._free = {
            site.cache: state[name].argmin(axis=2)
            for site in self.sites
            if (name := f"slot_positions.{site.name}") in state and site.parameters.evicts_while_decoding
        }

    def after_step(
        self, executor: Exposing, positions: Int64, lengths: Array, *, graph: str = "decode", token: int = 0
    ) -> None:
        """Record the vectors that a step stored for tokens at `positions` [B]; `lengths` [caches,B] include them."""
        rows = len(positions)
        for block in self.blocks[graph][token]:
            site = self.sites[block.cache]
            keys, values = (executor.exposed(name) for name in (block.keys, block.values))
            keys, values = (table.reshape(rows, -1, 1, table.shape[-1]) for table in (keys, values))
            heads = keys.shape[1]
            self._put(site, np.broadcast_to(positions[:, None, None], (rows, heads, 1)), keys, values)
            where = self._where[site.cache]
            slots = self._slot(site, lengths[site.cache] - 1, heads)
            np.put_along_axis(where, slots[..., None], positions[:, None, None], axis=2)

    def compare(self, state: Mapping[str, Array], positions: Int64) -> None:
        """Compare all caches with the tokens that they hold; the last token of each row is at `positions` [B]."""
        for site in self.sites:
            self._forget_dropped(site, state)
            self._compare(site, state)
            if site.parameters.keeps_whole:
                self._compare_whole(site, state, positions + 1)

    def after_turn(
        self, executor: Exposing, starts: Int64, new: Int64, state: Mapping[str, Array], before: Array
    ) -> None:
        """Compare the caches after a turn of `new` [B] tokens from positions `starts` [B] on.

        `before` [caches,B] are the stored lengths before the turn."""
        rows = len(starts)
        for block in self.blocks["extend"][0]:
            site = self.sites[block.cache]
            keys, values = executor.exposed(block.keys), executor.exposed(block.values)
            heads, count = keys.shape[1:3]
            places = np.arange(count)
            positions = np.where(places < new[:, None], starts[:, None] + places, -1)
            self._put(site, np.broadcast_to(positions[:, None], (rows, heads, count)), keys, values)
            self._where[site.cache] = self._after_turn(executor, site, starts, new, state, before[site.cache])
        self.compare(state, starts + new - 1)

    def _put(self, site: CacheSite, positions: Int64, keys: Array, values: Array) -> None:
        form = site.parameters.cache_format
        if site.cache not in self.tables:
            assert form.keys is not None
            assert form.values is not None
            self.tables[site.cache] = StoredTable(CACHES[0], form.keys), StoredTable(CACHES[1], form.values)
        for table, exact in zip(self.tables[site.cache], (keys, values), strict=True):
            table.put(positions, exact)

    def _slot(self, site: CacheSite, stored: Array, heads: int) -> Int64:
        """Return the slot [B,G] of the next token in a cache that has `stored` [B] entries."""
        if site.cache in self._free:
            return np.asarray(self._free[site.cache], np.int64)
        slots = np.array([self._next_slot(site, row, count) for row, count in enumerate(stored)], np.int64)
        return np.broadcast_to(slots[:, None], (len(slots), heads))

    def _next_slot(self, site: CacheSite, row: int, stored: int) -> int:
        """Return the slot of the next token in one row of a cache that fills slots in order and has `stored` tokens."""
        rule = site.parameters
        slots = self._slots[site.cache][row] if site.cache in self._slots else rule.capacity
        ring = slots - rule.sinks
        turned = rule.drops_before_append and stored >= slots
        return rule.sinks + (stored - rule.sinks) % ring if turned else stored

    def _after_turn(
        self, executor: Exposing, site: CacheSite, starts: Int64, new: Int64, state: Mapping[str, Array],
        before: Array,
    ) -> Int64:  # fmt: skip
        """Return the positions of the tokens that a cache holds after a turn."""
        if (name := f"slot_positions.{site.name}") in state:
            return np.asarray(state[name][: len(starts)], np.int64)
        if site.parameters.keeps_whole:
            return np.asarray(executor.exposed(f"indices.{site.name}"), np.int64)
        where: Int64 = self._where[site.cache].copy()
        for row, (start, count, stored) in enumerate(zip(starts, new, before, strict=True)):
            for token in range(count):
                where[row, :, self._next_slot(site, row, stored + token)] = start + token
        return where

    def _forget_dropped(self, site: CacheSite, state: Mapping[str, Array]) -> None:
        """Record the slots of tokens that a step dropped as free."""
        if (name := f"slot_positions.{site.name}") in state and site.parameters.evicts_while_decoding:
            where = self._where[site.cache]
            where[state[name][: len(where)] < 0] = -1

    def _compare(self, site: CacheSite, state: Mapping[str, Array], *, free: bool = False) -> None:
        where, names = self._where[site.cache], [tensor.name for tensor in CACHES]
        self._compare_tables(site, state, names, where, free=free)
        rule = site.parameters
        if (name := f"channels.{site.name}") in state:
            table = self.tables[site.cache][0]
            codes = np.where(where[..., None] >= 0, unpacked(table.at(where)[0], table.form), 0)
            self._count(site, "channels", where, state[name][: len(where)].swapaxes(2, 3), codes)
        if rule.has_pages:
            form = rule.cache_format.keys
            assert form is not None
            parts = [state[f"{part}.{site.name}"][: len(where)] for part in part_names(CACHES[0], form)]
            lengths = (where[:, 0] >= 0).sum(axis=-1)
            own = state[f"bounds.{site.name}"][: len(where)]
            read = read_parts(parts, form)
            expected = page_bounds(
                read if rule.fp8_bounds else read.astype(own.dtype), lengths, rule.page_size, fp8=rule.fp8_bounds
            )
            used = -(-lengths.max(initial=0) // rule.page_size)
            differ = own[..., :used] != expected[..., :used]
            self.found.bounds += differ.size
            self.found.wrong_bounds += int(differ.sum())
            if differ.any():
                row, head, bound, page = (int(n) for n in np.argwhere(differ)[0])
                kind, channel = ("maximum", bound) if bound < read.shape[3] else ("minimum", bound - read.shape[3])
                place = self._place(site, "bounds", row, head)
                first = f"{place}, page {page}: another {kind} of channel {channel}"
                self.found.first_bound = self.found.first_bound or first

    def _compare_whole(self, site: CacheSite, state: Mapping[str, Array], lengths: Int64) -> None:
        """Compare the cache that keeps every token by position."""
        keys = state[f"{_WHOLE[0]}.{site.name}"]
        places = np.arange(int(lengths.max()))
        positions = np.where(places < lengths[:, None, None], places, -1)
        where = np.broadcast_to(positions, (len(lengths), keys.shape[1], len(places)))
        self._compare_tables(site, state, _WHOLE, where)

    def _compare_tables(
        self, site: CacheSite, state: Mapping[str, Array], names: Collection[str], where: Int64, *, free: bool = False
    ) -> None:
        for name, table in zip(names, self.tables[site.cache], strict=True):
            own = part_names(replace(table.tensor, name=name), table.form)
            wrong = np.zeros(where.shape, bool)
            first = ""
            parts = list(enumerate(zip(own, table.at(where), strict=True)))
            for number, (part, expected) in reversed(parts):  # codes follow from a minimum and a scale
                found = state[f"{part}.{site.name}"][: len(where), :, : where.shape[2]]
                differ = _bits(found) != _bits(np.where(where[..., None] >= 0, expected, 0).astype(found.dtype))
                if not free:
                    differ &= where[..., None] >= 0
                if differ.any() and not first:
                    at = tuple(np.argwhere(differ)[0].tolist())
                    place = self._vector(site, part, where, at)
                    first = f"{place}, {_difference(at, found, expected, table.form, number)}"
                wrong |= differ.any(axis=-1)
            self.found.add(int((where >= 0).sum()), int(wrong.sum()), first)

    def _count(self, site: CacheSite, name: str, where: Int64, found: Array, expected: Array) -> None:
        """Compare codes [B,G,C,D], one for each channel, without scales."""
        differ = (found != expected) & (where[..., None] >= 0)
        first = ""
        if differ.any():
            at = tuple(np.argwhere(differ)[0].tolist())
            first = f"{self._vector(site, name, where, at)}, {_difference(at, found, expected, None, 0)}"
        self.found.add(int((where >= 0).sum()), int(differ.any(axis=-1).sum()), first)

    def _vector(self, site: CacheSite, part: str, where: Int64, at: tuple[int, ...]) -> str:
        """Return the vector of element `at` as text: its place, token and slot."""
        row, head, slot = at[:3]
        token = int(where[row, head, slot])
        holder = f"token {token}" if token >= 0 else "no token"
        return f"{self._place(site, part, row, head)}, {holder} in slot {slot}"

    def _place(self, site: CacheSite, part: str, row: int, head: int) -> str:
        return f"{part} of layer {site.layer}, row {row}, {head_of(site, head)}"


def _difference(at: tuple[int, ...], found: Array, expected: Array, form: VectorFormat | None, number: int) -> str:
    """Return a difference within a vector as text: its channel or group, and both values.

    `number` is that of the part of a vector in the format `form`, 0 its codes."""
    *vector, last = at
    ours, wanted = found[tuple(vector)], expected[tuple(vector)]
    if number == 0 and form is not None:
        ours, wanted = (unpacked(codes, form) for codes in (ours, wanted))
        last = int(np.flatnonzero(ours != wanted)[0])
        return f"channel {last}: code {ours[last]}, expected {wanted[last]}"
    unit = "group" if number else "channel"
    return f"{unit} {last}: {ours[last]}, expected {wanted[last]}"


def head_of(site: CacheSite, head: int) -> str:
    """Return the name of head `head` of a cache, with its number in the layer."""
    if site.parameters.eviction.cache_per_query_head:
        return f"query head {head}"
    return f"KV head {head if site.kv_heads is None else site.kv_heads[head]}"


def picked(table: Array, where: Int64) -> Array:
    """Return the vectors of `table` [B,G,L,.] at `where` [B,G,n], clipped to its length."""
    return np.take_along_axis(table, np.clip(where, 0, table.shape[2] - 1)[..., None], axis=2)


def _bits(table: Array) -> Array:
    """Return float16 values as their bits, so that a NaN equals itself; other tables are returned unchanged."""
    return table.view(np.int16) if table.dtype == np.float16 else table
