"""Isolated runs of operators: their inputs, their results, and the expected ones.

Verification makes the cases and judges the findings. A kind turns a case into the inputs of each of its operators and
into the reference's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.rankings.attended_entries import WeighedEntries
from kvc_trt.methods.rankings.ranking import PromptRanking, Prompts
from kvc_trt.operators.cached_vectors import CachedVectors
from kvc_trt.operators.dimensions import stored_pages
from kvc_trt.operators.fp8_bounds import EMPTY, codes_of
from kvc_trt.operators.shapes import LOWEST
from kvc_trt.operators.softmax import SINK_LOGITS
from kvc_trt.reference.softmax import PLAIN, Softmax

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
Float = NDArray[np.floating]
Int64 = NDArray[np.int64]


def sinks_of(case: CacheCase) -> dict[str, Array]:
    """Return the sinks of a case's softmax by the name of the operators' input, in the type of its keys."""
    if case.softmax.sinks is None:
        return {}
    return {SINK_LOGITS: case.softmax.sinks.numpy().astype(case.exact_keys.dtype)}


class StoredVectors(Protocol):
    """The vectors that a cache in a format gives back of exact ones."""

    def store(self, exact: Array) -> Array:
        """Return what a cache gives back of vectors [..., D] once it has stored them."""

    def hold(self, exact: Array) -> Array:
        """Return vectors like `exact` that a cache can hold; zeros stay zeros."""


@dataclass(frozen=True)
class PromptCase:
    """A batch of prompts: q_window [B,H,W,D], k and v [B,G,S,D], prompt_lengths [B]."""

    name: str
    ties: bool
    """True if scores tie exactly; then a higher index in place of a lower one breaks the tie rule."""
    q_window: Float
    k: Float
    v: Float
    prompt_lengths: Int64
    kept_k: Float | None = None
    """The values that a cache gives back of `k`, if its format changes that; the same for `kept_v`."""
    kept_v: Float | None = None
    softmax: Softmax = PLAIN

    @property
    def exact_keys(self) -> Float:
        """The keys that are stored, before a cache changes them."""
        return self.k

    def in_caches(self, keys: StoredVectors, values: StoredVectors) -> PromptCase:
        """Return the case over caches with a format."""
        return replace(self, kept_k=keys.store(self.k), kept_v=values.store(self.v))

    def kept(self, indices: Array) -> tuple[Array, Array]:
        """Return the keys and values at `indices` [B,G,C] as a cache reads them back, with zeros where one is -1."""
        tables = ((self.k, self.kept_k), (self.v, self.kept_v))
        keys, values = (gathered(exact if kept is None else kept, indices) for exact, kept in tables)
        return keys, values

    def inputs(self) -> dict[str, Array]:
        """The inputs that all compactions share."""
        own = {"q_window": self.q_window, "k": self.k, "v": self.v, "prompt_lengths": self.prompt_lengths}
        return own | sinks_of(self)

    def row(self, number: int) -> PromptCase:
        """Return one prompt of the batch."""
        one = slice(number, number + 1)
        kept_k, kept_v = (None if table is None else table[one] for table in (self.kept_k, self.kept_v))
        return replace(
            self, q_window=self.q_window[one], k=self.k[one], v=self.v[one], prompt_lengths=self.prompt_lengths[one],
            kept_k=kept_k, kept_v=kept_v,
        )  # fmt: skip


@dataclass(frozen=True)
class StepCase:
    """One step: query [B,H,D], k_new and v_new [B,G,D], caches [B,G,C,D]; cache_lengths before the append."""

    name: str
    ties: bool
    query: Float
    k_new: Float
    v_new: Float
    k_cache: Float
    v_cache: Float
    cache_lengths: Int64
    softmax: Softmax = PLAIN

    @property
    def exact_keys(self) -> Float:
        """The keys that are stored, before a cache changes them."""
        return self.k_new

    def in_caches(self, keys: StoredVectors, values: StoredVectors) -> StepCase:
        """Return the case over caches with a format."""
        return _in_caches(self, keys, values)

    def inputs(self) -> dict[str, Array]:
        """The inputs that all steps share."""
        names = ("query", "k_new", "v_new", "k_cache", "v_cache", "cache_lengths")
        return {name: getattr(self, name) for name in names} | sinks_of(self)

    def appended(self) -> tuple[Array, Array, Array]:
        """Return keys, values and lengths after the append."""
        keys, values = self.k_cache.copy(), self.v_cache.copy()
        rows = np.arange(len(self.cache_lengths))
        keys[rows, :, self.cache_lengths], values[rows, :, self.cache_lengths] = self.k_new, self.v_new
        return keys, values, self.cache_lengths + 1


@dataclass(frozen=True)
class TurnCase:
    """One turn: q [B,H,M,D], k_new and v_new [B,G,M,D], caches [B,G,C,D]; cache_lengths before the turn."""

    name: str
    ties: bool
    q: Float
    k_new: Float
    v_new: Float
    k_cache: Float
    v_cache: Float
    cache_lengths: Int64
    lengths: Int64
    """New tokens of each row, [B]."""
    softmax: Softmax = PLAIN

    @property
    def exact_keys(self) -> Float:
        """The keys that are stored, before a cache changes them."""
        return self.k_new

    def in_caches(self, keys: StoredVectors, values: StoredVectors) -> TurnCase:
        """Return the case over caches with a format."""
        return _in_caches(self, keys, values)

    def inputs(self) -> dict[str, Array]:
        """The inputs that the operators of a turn share."""
        names = ("q", "k_new", "v_new", "k_cache", "v_cache", "cache_lengths", "lengths")
        return {name: getattr(self, name) for name in names}

    def joined(self, window: int) -> PromptCase:
        """Return stored and new tokens as prompts, with zeros past their ends, and the turn's last queries."""
        batch, heads, slots, size = self.k_cache.shape
        count = self.lengths + self.cache_lengths
        keys, values = (np.zeros((batch, heads, slots + self.q.shape[2], size), self.k_cache.dtype) for _ in range(2))
        q_window = np.zeros((*self.q.shape[:2], min(window, self.q.shape[2]), size), self.q.dtype)
        for row, (stored, new) in enumerate(zip(self.cache_lengths, self.lengths, strict=True)):
            for table, cache, block in ((keys, self.k_cache, self.k_new), (values, self.v_cache, self.v_new)):
                table[row, :, :stored], table[row, :, stored : stored + new] = (
                    cache[row, :, :stored],
                    block[row, :, :new],
                )
            last = min(q_window.shape[2], new)
            q_window[row, :, q_window.shape[2] - last :] = self.q[row, :, new - last : new]
        return PromptCase(self.name, self.ties, q_window, keys, values, count, softmax=self.softmax)


Extending = TypeVar("Extending", StepCase, TurnCase)


def _in_caches(case: Extending, keys: StoredVectors, values: StoredVectors) -> Extending:
    """Return a case whose caches hold what they can, and whose new tokens are those that the caches give back."""
    held = replace(case, k_cache=keys.hold(case.k_cache), v_cache=values.hold(case.v_cache))
    return replace(held, k_new=keys.store(case.k_new), v_new=values.store(case.v_new))


class RunnableAlone(Protocol):
    """One operator with an engine's constants."""

    def run(self, **inputs: Array) -> list[Array]:
        """Return the outputs in the operator's order; the inputs are not changed."""


class ReadByStep(NamedTuple):
    """The tokens that a step read, to be judged by the rule's selection; the cache holds the current token."""

    query: Array
    keys: Array
    values: Array
    lengths: Array
    output: Array
    selected: Array
    softmax: Softmax = PLAIN


class KeptOfPrompt(NamedTuple):
    """Prompt positions [B,G,C] that were kept, to be judged on equal inputs by their ranking."""

    prompts: Prompts
    expected: Array
    """The reference's positions, [B,G,C]."""
    indices: Array
    ranking: PromptRanking


class ExactList(NamedTuple):
    """Lists of one row [G,k] that must equal one of the expected ones exactly, unless underflow explains them."""

    row: int
    found: Array
    expected: tuple[Array, ...]
    ranked: WeighedEntries | None = None
    """The entries, where softmax weights rank them, which underflow may lose; None for other rankings."""


@dataclass(frozen=True)
class Found:
    """The findings of an isolated run: choices by the way in which they are judged, and pairs (found, expected)."""

    lists: Sequence[ExactList] = ()
    kept: Sequence[KeptOfPrompt] = ()
    read: Sequence[ReadByStep] = ()
    moved: Sequence[tuple[Array, Array]] = ()
    """Pairs that must be bit-identical."""
    computed: Sequence[tuple[Array, Array]] = ()
    """Pairs that must be equal up to rounding."""

    def __add__(self, other: Found) -> Found:
        return Found(
            (*self.lists, *other.lists),
            (*self.kept, *other.kept),
            (*self.read, *other.read),
            (*self.moved, *other.moved),
            (*self.computed, *other.computed),
        )


CacheCase: TypeAlias = "PromptCase | StepCase | TurnCase"
PromptRun: TypeAlias = Callable[[RunnableAlone, PromptCase, Constants], Found]
StepRun: TypeAlias = Callable[[RunnableAlone, StepCase, Constants], Found]
TurnRun: TypeAlias = Callable[[RunnableAlone, TurnCase, Constants], Found]


def page_bounds(keys: Array, lengths: Array, page_size: int, *, fp8: bool) -> Array:
    """Return an executor's page bounds [B,G,2D,P]: maxima of K and of -K over `lengths` [B] slots of `keys` [B,G,C,D].

    Empty pages have the lowest finite value. With `fp8`, the codes of the bounds, INT8."""
    batch, heads, slots, size = keys.shape
    pages = stored_pages(slots, page_size, keys.dtype.itemsize, fp8)
    used = (np.arange(slots) < np.asarray(lengths)[:, None])[:, None, :, None]
    lowest = np.array(LOWEST[str(keys.dtype)], keys.dtype)
    signed = np.full((batch, heads, pages * page_size, 2 * size), lowest, keys.dtype)
    signed[:, :, :slots, :size] = np.where(used, keys, lowest)
    signed[:, :, :slots, size:] = np.where(used, -keys, lowest)
    maxima: Array = signed.reshape(batch, heads, pages, page_size, 2 * size).max(axis=3)
    return np.ascontiguousarray((codes_of(maxima) if fp8 else maxima).swapaxes(2, 3))


def stored_page_bounds(keys: CachedVectors, lengths: Array, page_size: int, dtype: np.dtype[Any]) -> Array:
    """Return `page_bounds` of keys [B,G,C,D] as they are read, in the bounds' own type; int8 stands for fp8."""
    values = keys.values()
    if dtype == np.int8:
        return page_bounds(values, lengths, page_size, fp8=True)
    bounds = page_bounds(values.astype(dtype, copy=False), lengths, page_size, fp8=False)
    if keys.format is not None:
        bounds[bounds == 0] = 0  # never -0, which codes would often give
    return bounds


def rebuild_bounds(keys: CachedVectors, bounds: Array, dropped: range, page_size: int) -> None:
    """Make the bounds [G,2D,P] of one row anew, in place, after the last slots `dropped` of its `keys` [G,C,D]."""
    first, end = dropped.start // page_size, -(-dropped.stop // page_size)
    bounds[:, :, first:end] = EMPTY if bounds.dtype == np.int8 else LOWEST[str(bounds.dtype)]
    start = first * page_size
    if start < dropped.start:
        stored = keys.map(lambda part: part[None, :, start : dropped.start])
        lengths = np.array([dropped.start - start])
        bounds[:, :, first] = stored_page_bounds(stored, lengths, page_size, bounds.dtype)[0, :, :, 0]


def float32(array: Array) -> Tensor:
    """Convert an array to a float32 tensor for the reference."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def gathered(source: Array, indices: Array) -> Array:
    """Gather rows of `source` [B,G,S,D] at `indices` [B,G,C], with zeros where an index is -1."""
    picked = np.take_along_axis(source, np.clip(indices, 0, source.shape[2] - 1)[..., None].astype(np.int64), axis=2)
    return np.where(indices[..., None] >= 0, picked, 0).astype(source.dtype)
