"""The second part of a policy: a kind of decode selection, which chooses the tokens that a step reads and those that it
drops.

As with a kind of prompt eviction (`prompt_eviction.py`), a method's file defines a subclass and one object of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.discovery import objects
from kvc_trt.operators.schema import BOUND, CACHE, Operator, Tensor
from kvc_trt.operators.tensors import K_CACHE
from kvc_trt.reference.softmax import PLAIN, Softmax

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvc_trt.methods.base.graph_context import PromptLayer, StepLayer, TurnLayer
    from kvc_trt.methods.base.isolated_runs import Array, Found, RunnableAlone, StepCase, StepRun
    from kvc_trt.methods.rankings.ranking import StepRanking
    from kvc_trt.operators.cached_vectors import CachedVectors
    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.reference import LayerCache, Selection

Rule = TypeVar("Rule", bound=Constants)
Rebuild: TypeAlias = "Callable[[CachedVectors, Array, Constants, np.dtype[Any]], Array]"
"""Makes a state tensor [B,...] of a type from keys [B,G,C,D], of which `lengths` [B] slots are in use, and the
constants."""


class DecodeSelection(ABC):
    """A way to choose which cached tokens a step reads and which it drops."""

    name: str
    """The name that `PolicyParameters.decode_selection` records."""
    operators: tuple[Operator, ...] = ()
    """The operators that a step may call, the usual one first; their state inputs define the cache's state."""
    evicts_while_decoding = False
    """True if a step drops one token for each that it appends, so that caches never fill up."""
    drops_before_append = False
    """True if a step drops the oldest token that is not a sink before it stores the new one."""
    spare_slots = 0
    """The number of slots beyond the budget."""
    reads_a_part = False
    """True if a step reads only some entries of a cache that keeps them all, once a row exceeds the budget."""
    reads_beside = 0
    """The number of tokens that such a step reads in addition to `top_k`."""
    sums: tuple[str, ...] = ()
    """State to which a step adds, so that undoing one needs a copy from before."""
    any_softmax = False
    """True if it chooses rightly where logits of attention are capped or have sinks; otherwise such models are refused.
    """
    oracle = False
    """True if it reads everything to find the best tokens; then only the reference runs it."""

    @abstractmethod
    def select(self, query: torch.Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Reference: run one step [B,H,D] over a cache that holds the current token."""

    def decode(self, step: StepLayer) -> Value:
        """Graph: append one token, attend, and write the aliased outputs of the cache's state; returns [B,heads,D]."""
        return step.attend(self.operators[0])

    def complete(self, prompt: PromptLayer) -> None:  # noqa: B027 (most caches carry nothing else)
        """Graph: after a prompt, write the cache's state beside keys, values and page bounds."""

    def append_turn(self, turn: TurnLayer) -> None:  # noqa: B027 (most caches carry nothing else)
        """Graph: after a turn, write the cache's state beside keys, values and page bounds.

        Called where the turn's tokens were appended; a compaction writes all of its cache itself."""

    @property
    def no_drafts(self) -> str | None:
        """The reason why the tokens of a draft cannot be checked in one pass; None if they can."""
        if self.evicts_while_decoding:
            return "a step drops a token for each that it stores, and what a rejected draft dropped would be lost"
        return None

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that the cache carries in addition to keys and values."""
        held = self.operators[0].state if self.operators else ()
        return tuple(tensor for tensor in held if tensor.name not in ("k_cache", "v_cache"))

    @property
    def pages(self) -> bool:
        """True if it scores pages by bounds of their keys, which the cache then carries."""
        return any(tensor.name == "bounds" for tensor in self.state)

    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Return the K+V pairs per head read to choose among `entries` tokens; a head-sized vector is half a pair."""
        return 0.0

    def numbers_to_choose(self, rule: Constants, entries: int, head_size: int) -> int:
        """Return the bytes of scales and minima read per head to choose among `entries` tokens in a format."""
        return 0

    def recent_of(self, rule: Constants, budget: int) -> int:
        """Return `recent` for a layer with its own budget of `budget` tokens."""
        return rule.recent

    @property
    def by_row(self) -> DecodeSelection | None:
        """The same selection for caches whose rows have budgets of their own (`by_row.py`); None if there is none."""
        return None

    def recents(self, emit: Emitter, rule: Constants, budgets: Value) -> Value:
        """Graph: return `recent_of` the budgets INT64 [B] of rows; only for a selection that drops tokens."""
        raise NotImplementedError(f"decode selection {self.name} has no budgets by row")

    def at_budget(self, rule: Rule, budget: int) -> Rule:
        """Return the rule of a cache, or of one row, that stores `budget` tokens where steps drop some."""
        return replace(
            rule, token_budget=budget, prompt_budget=min(budget, rule.max_input_len), squeeze_share=None,
            capacity=budget + self.spare_slots, recent=self.recent_of(rule, budget),
        )  # fmt: skip

    def describe(self, rule: Constants) -> str:
        """Describe how a step chooses, following "a step reads N tokens"; only for kinds that read a part."""
        return ""

    def ranking(self, rule: Constants) -> StepRanking | None:
        """Return the ranking of cached tokens, which proves near-ties; None: only lists on equal inputs are judged."""
        return None

    def output_of(
        self, attended: torch.Tensor, query: torch.Tensor, cache: LayerCache, selected: torch.Tensor, rule: Constants,
        scored_by: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Reference: return the output of a step that reads `selected`, given the exact attention to it [B,H,D].

        `scored_by` is the result of the ranking's `scored_by` for an executor's choice; None for the reference's
        own."""
        return attended

    @property
    def rebuilt(self) -> Mapping[str, Rebuild]:
        """Return, by name, the functions that make state from the stored keys alone, bit for bit.

        A stored context leaves this state out; everything else that a cache carries is part of it."""
        from kvc_trt.methods.base.isolated_runs import stored_page_bounds

        def bounds(keys: CachedVectors, lengths: Array, rule: Constants, dtype: np.dtype[Any]) -> Array:
            return stored_page_bounds(keys, lengths, rule.page_size, dtype)

        return {"bounds": bounds} if self.pages else {}

    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make the cache's state beside keys and values [B,G,C,D] with `lengths` [B] slots in use."""
        import numpy as np

        from kvc_trt.operators.cached_vectors import CachedVectors

        types = {"bounds": np.dtype(np.int8)} if rule.fp8_bounds else {}
        stored = CachedVectors((keys,))
        return {name: make(stored, lengths, rule, types.get(name, keys.dtype)) for name, make in self.rebuilt.items()}

    def take_back(
        self, state: Mapping[str, Array], saved: Mapping[str, Array], before: int, steps: range, rule: Constants
    ) -> None:
        """Undo the steps that stored the slots `steps` of one row, in place: the state is then as if they had not been.

        `state` are the row's tensors [G,...] by name, `saved` copies of `sums` from when there were `before` entries.
        Keys and values past a row's end do not count, so only state derived from them changes: here, bounds of pages.
        """
        if self.pages:
            from kvc_trt.methods.base.isolated_runs import rebuild_bounds
            from kvc_trt.operators.cached_vectors import cached_vectors

            keys = cached_vectors(state, K_CACHE, rule.cache_format)
            rebuild_bounds(keys, state["bounds"], steps, rule.page_size)

    def layer_cache(
        self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, rule: Constants,
        softmax: Softmax = PLAIN,
    ) -> LayerCache:  # fmt: skip
        """Reference: return the cache that `select` reads, made from keys and values [B,G,C,D] and lengths [B]."""
        cache = reference.LayerCache(keys, values, lengths, softmax=softmax)
        if self.pages:
            extremes = reference.page_bounds(keys, lengths, rule.page_size, fp8=rule.fp8_bounds)
            cache.page_min, cache.page_max = extremes
        return cache

    def runs(self) -> Mapping[str, StepRun]:
        """Return the isolated run of each of its operators on a step, by the operator's name."""
        return {operator.name: self.run_alone for operator in self.operators}

    def run_alone(self, operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
        """Run its first operator. State of the cache's type must match exactly, other state up to rounding."""
        import torch

        from kvc_trt.methods.base.isolated_runs import Found, ReadByStep, float32

        schema, (keys, values, lengths) = self.operators[0], case.appended()
        carried = self.state_of(case.k_cache, case.v_cache, case.cache_lengths, rule)
        before = {one.name: carried[one.name] for one in schema.state if one.name in carried}
        after = {"k_cache": keys, "v_cache": values, **self.state_of(keys, values, lengths, rule)}
        results = operator.run(**case.inputs(), **before)
        found = {one.name: result for one, result in zip(schema.outputs, results, strict=True)}
        state = [(one.element, (found[one.name], after[one.alias])) for one in schema.outputs if one.alias]
        moved, computed = (
            [pair for element, pair in state if (element in (CACHE, BOUND)) is copied] for copied in (True, False)
        )
        if "selected" in found:
            read = ReadByStep(case.query, keys, values, lengths, found["output"], found["selected"], case.softmax)
            return Found(read=(read,), moved=moved, computed=computed)
        cache = self.layer_cache(float32(keys), float32(values), torch.from_numpy(lengths), rule, case.softmax)
        expected = self.select(float32(case.query), cache, rule).output.numpy()
        return Found(moved=moved, computed=[(found["output"], expected), *computed])


def decode_selection(name: str) -> DecodeSelection:
    """Return the kind of that name; InputError for one that no file of this package defines."""
    found = objects(DecodeSelection).get(name)  # type: ignore[type-abstract]
    if found is None:
        raise InputError(f"unknown decode selection {name!r}", hint="kvc-trt policies lists them")
    return found
