"""The first part of a policy: a kind of prompt eviction, which chooses the tokens that stay of a prompt and of a turn.

A method's file defines its new kinds: subclasses of this class or of `DecodeSelection`, and one object of each.
Everything else (reference, graphs, plan, verification, backends) asks the object; nothing outside this package knows
its name.

The graph pieces of a kind import `onnx` and its reference imports `torch`, inside the functions that need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import decode_selection
from kvc_trt.methods.base.discovery import objects
from kvc_trt.operators.schema import Operator, Tensor

if TYPE_CHECKING:
    import torch

    from kvc_trt.methods.base.graph_context import CacheLayer, PromptLayer, StepLayer, TurnLayer
    from kvc_trt.methods.base.isolated_runs import (
        Array,
        Found,
        PromptCase,
        PromptRun,
        RunnableAlone,
        TurnRun,
    )
    from kvc_trt.methods.rankings.attended_entries import WeighedEntries
    from kvc_trt.methods.rankings.ranking import PromptRanking
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn
    from kvc_trt.reference.model.rules import PromptQueries

Entry = TypeVar("Entry", "StepLayer", "TurnLayer")


class PromptEviction(ABC):
    """A way to choose which tokens of a prompt are kept."""

    name: str
    """The name that `PolicyParameters.prompt_eviction` records."""
    operators: tuple[Operator, ...] | None = ()
    """The operators that do all of its work, the usual one first; None if its graph needs other nodes too."""
    evicts = True
    cache_per_query_head = False
    """True if each query head has its own cache, so that a group's keys and values are repeated."""
    query_agnostic = False
    """True if the choice does not depend on the question of a prompt; then later questions can share a prefix."""
    observes_every_query = False
    """True if all queries of a prompt decide, not only those of the window."""
    turn: str | None = None
    """The tokens that a turn of a conversation evicts, in one sentence for the user; None if there are no turns."""
    turn_state: tuple[Tensor, ...] = ()
    """The state that the cache carries from a prompt to a turn and from turn to turn; no step reads it."""
    keeps_whole = False
    """True if every token is kept beside the cache that a step reads, so that turns can choose from all."""
    slides = False
    """True if it keeps the window of a layer that the model lets slide: no policy chooses it."""
    any_softmax = False
    """True if it chooses rightly where logits of attention are capped or have sinks; otherwise such models are refused.
    """
    trims = False
    """True if `store` can leave more than the budget, ranked, for `trim` to cut once the budget is known."""

    def observe(self, queries: PromptQueries, prompt_lengths: torch.Tensor, rule: Constants) -> Any:
        """Reference: return the queries that `compact` observes, by default the last ones."""
        return queries.window

    def operators_of(self, rule: Constants) -> tuple[Operator, ...] | None:
        """Return the operators that do all of its work in a cache of this rule, by default `operators`."""
        return self.operators

    @abstractmethod
    def compact(
        self, observed: Any, keys: torch.Tensor, values: torch.Tensor, prompt_lengths: torch.Tensor, rule: Constants
    ) -> Compacted:
        """Reference: compact a prompt's keys and values [B,G,S,D]; `observed` is usually the last queries [B,H,W,D]."""

    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Graph: write k_cache, v_cache and lengths [B] of the cache after a prompt.

        Also its page bounds if `bounds`, and the `indices` kept if tokens are evicted."""
        assert self.operators
        prompt.compact(self.operators[0], bounds=bounds)

    def trim(self, cache: CacheLayer, budgets: Value, lengths: Value, *, bounds: bool) -> None:
        """Graph: write the outputs of `store` for a cache that keeps `budgets` [B] tokens of prompts of `lengths`
        [B]."""
        raise NotImplementedError(f"prompt eviction {self.name} does not trim")

    @property
    def by_row(self) -> PromptEviction | None:
        """The same eviction for caches whose rows have budgets of their own (`by_row.py`); None if there is none."""
        return None

    def new_entry(self, step: Entry) -> Entry:
        """Graph: return a step or a turn with keys and values in the form that this eviction's cache stores."""
        return step

    def no_turn(self, rule: Constants) -> str | None:
        """Return why a cache of this rule takes no turns; None if it does."""
        return "its method does not say what a turn evicts" if self.turn is None else None

    def begin_turns(self, prompt: PromptLayer) -> None:
        """Graph: after a prompt, write `turn_state`: the positions of the kept tokens that no step carries."""
        for tensor in self.turn_state:
            prompt.emit.Identity(f"indices.{prompt.name}", outputs=[f"{tensor.name}.{prompt.name}"])

    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Reference: keep the part of stored and new tokens that stays after a turn, if any is evicted."""
        raise NotImplementedError(f"prompt eviction {self.name} evicts nothing on turns")

    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Graph: attend from a turn's tokens to everything stored and to each other, and write the cache after it.

        That is the updated keys, values and `turn_state`, lengths [B], and the page bounds if `bounds`; the selection
        writes its own state in `append_turn`. Returns [B,H,M,D]. By default the tokens are appended."""
        return turn.append(bounds=bounds)

    def least(self, rule: Constants) -> int:
        """Return the fewest prompt tokens that a layer can keep, by default the observation window."""
        return rule.window

    def describe(self, rule: Constants) -> str:
        """Describe how prompt tokens are chosen, following their number; only for kinds that evict just prompts."""
        return ""

    def ranking(self, rule: Constants) -> PromptRanking | None:
        """Return the ranking of prompt tokens, which proves near-ties; None: only lists on equal inputs are judged."""
        return None

    def runs(self) -> Mapping[str, PromptRun]:
        """Return the isolated run of each of its operators on a prompt, by the operator's name."""
        return {operator.name: self.run_alone for operator in self.operators or ()}

    def turn_runs(self) -> Mapping[str, TurnRun]:
        """Return the isolated run of each operator that it has for turns alone, by the operator's name."""
        return {}

    def run_alone(self, operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
        """Run its first operator and the reference in float64 and float32; where these two differ, rounding decides."""
        import torch

        from kvc_trt.methods.base.isolated_runs import float32

        assert self.operators
        inputs = case.inputs()
        results = operator.run(**{one.name: inputs[one.name] for one in self.operators[0].inputs})
        rows = torch.from_numpy(case.prompt_lengths)
        q, k, v = (float32(table) for table in (case.q_window, case.k, case.v))
        single = self.compact(q, k, v, rows, rule)
        double = self.compact(q.double(), k.double(), v.double(), rows, rule)
        return self.judged(results, case, rule, double, single, self.weighed(case, rule))

    def weighed(self, case: PromptCase, rule: Constants) -> Sequence[WeighedEntries]:
        """Return, by row, the entries ranked by softmax weights; nothing for other rankings."""
        return ()

    def judged(
        self,
        results: Sequence[Array],
        case: PromptCase,
        rule: Constants,
        double: Compacted,
        single: Compacted,
        weighed: Sequence[WeighedEntries] = (),
    ) -> Found:
        """Compare its first operator's result with the two results of the reference, as `judged_as` does."""
        assert self.operators
        return judged_as(self.operators[0], results, case, rule, double, single, weighed)


def judged_as(
    operator: Operator,
    results: Sequence[Array],
    case: PromptCase,
    rule: Constants,
    double: Compacted,
    single: Compacted,
    weighed: Sequence[WeighedEntries] = (),
) -> Found:
    """Compare a compaction's result with those of the reference in float64 and float32; it must equal one of them.

    `weighed` holds, by row, the entries ranked by softmax weights: underflow of these may be why it equals none."""
    from kvc_trt.methods.base.isolated_runs import ExactList, Found

    found = {one.name: result for one, result in zip(operator.outputs, results, strict=True)}
    indices, width = found["indices"], single.indices.shape[2]
    keys, values = case.kept(indices)
    moved = [
        (found["cache_lengths"], single.lengths.numpy()),
        (found["k_cache"], keys),
        (found["v_cache"], values),
    ]
    if "bounds" in found:
        moved += stored_bounds(rule, found["bounds"], found["k_cache"], single.lengths.numpy())
    if "slot_positions" in found:
        moved.append((found["slot_positions"], indices))
    return Found(
        lists=[
            ExactList(
                row,
                indices[row, :, :width],
                (double.indices[row].numpy(), single.indices[row].numpy()),
                weighed[row] if weighed else None,
            )
            for row in range(len(indices))
        ],
        moved=moved,
        computed=[] if double.scores is None else [(found["scores"][:, :, :width], double.scores.numpy())],
    )


def stored_bounds(rule: Constants, found: Array, keys: Array, lengths: Array) -> list[tuple[Array, Array]]:
    """Pair a compaction's page bounds with those of the keys it stored, if a step reads them."""
    from kvc_trt.methods.base.isolated_runs import page_bounds

    pages = decode_selection(rule.decode_selection).pages
    return [(found, page_bounds(keys, lengths, rule.page_size, fp8=rule.fp8_bounds))] if pages else []


def prompt_eviction(name: str) -> PromptEviction:
    """Return the kind of that name; InputError for one that no file of this package defines."""
    found = objects(PromptEviction).get(name)  # type: ignore[type-abstract]
    if found is None:
        raise InputError(f"unknown prompt eviction {name!r}", hint="kvc-trt policies lists them")
    return found
