"""The two parts of a policy: a kind of prompt eviction and a kind of decode selection.

A method's file defines its new kinds: subclasses of these two, and one object of each. Everything else (reference,
graphs, plan, verification, backends) asks the object; nothing outside this package knows its name.

The graph pieces of a kind import `onnx` and its reference imports `torch`, inside the functions that need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvc_trt.errors import InputError
from kvc_trt.methods.constants import Constants
from kvc_trt.methods.discovery import objects
from kvc_trt.operators.schema import CACHE, Operator, Tensor

if TYPE_CHECKING:
    import torch

    from kvc_trt.methods.graph_pieces import CacheLayer, PromptLayer, StepLayer
    from kvc_trt.methods.turn_pieces import TurnLayer
    from kvc_trt.methods.verification import (
        Array,
        ByPages,
        ByWindow,
        Found,
        PromptCase,
        PromptRun,
        RunnableAlone,
        StepCase,
        StepRun,
        TurnRun,
    )
    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn
    from kvc_trt.reference.rules import PromptQueries

Entry = TypeVar("Entry", "StepLayer", "TurnLayer")


Rebuild: TypeAlias = "Callable[[Array, Array, Constants], Array]"
"""Makes a state tensor [B,...] from keys [B,G,C,D], of which `lengths` [B] slots are in use, and the constants."""


class PromptEviction(ABC):
    """A way to choose which tokens of a prompt are kept."""

    name: str
    """The name that `PolicyParameters.prompt_eviction` records."""
    operators: tuple[Operator, ...] | None = ()
    """The operators that do all of its work, the usual one first; None if its graph needs other nodes too."""
    evicts = True
    cache_per_query_head = False
    """Whether each query head has its own cache, so that a group's keys and values are repeated."""
    query_agnostic = False
    """Whether it chooses without regard to what a prompt asks; then a prefix can be shared by later questions."""
    observes_every_query = False
    """Whether all queries of a prompt decide, not only those of the window."""
    turn: str | None = None
    """What a turn of a conversation evicts, in one sentence for the user; None: there are no turns."""
    turn_state: tuple[Tensor, ...] = ()
    """What the cache carries from a prompt to a turn and from turn to turn, which no step reads."""
    keeps_whole = False
    """Whether every token is kept beside the cache that a step reads, for turns to choose from."""
    trims = False
    """Whether `store` can leave more than the budget, ranked, for `trim` to cut once the budget is known."""

    def observe(self, queries: PromptQueries, prompt_lengths: torch.Tensor, rule: Constants) -> Any:
        """Reference: return what `compact` observes, by default the last queries."""
        return queries.window

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
        """Graph: write what `store` writes, for a cache that keeps `budgets` [B] tokens of prompts of `lengths` [B]."""
        raise NotImplementedError(f"prompt eviction {self.name} does not trim")

    def new_entry(self, step: Entry) -> Entry:
        """Graph: return a step or a turn with keys and values in the form that this eviction's cache stores."""
        return step

    def no_turn(self, rule: Constants) -> str | None:
        """Return why a cache of this rule takes no turns; None if it does."""
        return "its method does not say what a turn evicts" if self.turn is None else None

    def begin_turns(self, prompt: PromptLayer) -> None:
        """Graph: after a prompt, write `turn_state`: the positions of what was kept, as far as no step carries them."""
        for tensor in self.turn_state:
            prompt.emit.Identity(f"indices.{prompt.name}", outputs=[f"{tensor.name}.{prompt.name}"])

    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        """Reference: keep the part of stored and new tokens that stays after a turn, if any is evicted."""
        raise NotImplementedError(f"prompt eviction {self.name} evicts nothing on turns")

    def extend(self, turn: TurnLayer, *, bounds: bool) -> Value:
        """Graph: attend from a turn's tokens to everything stored and to each other, and write the cache after it.

        That is the updated keys, values and `turn_state`, lengths [B], and the page bounds if `bounds`; the selection
        writes what else it carries in `append_turn`. Returns [B,H,M,D]. By default the tokens are appended."""
        return turn.append(bounds=bounds)

    def least(self, rule: Constants) -> int:
        """Return the fewest prompt tokens that a layer can keep, by default the observation window."""
        return rule.window

    def describe(self, rule: Constants) -> str:
        """Describe how prompt tokens are chosen, following their number; only for kinds that evict just prompts."""
        return ""

    def ranking(self, rule: Constants) -> ByWindow | None:
        """Return how prompt tokens are ranked, if verification can prove a near-tie of that ranking."""
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

        from kvc_trt.methods.verification import float32

        assert self.operators
        inputs = case.inputs()
        results = operator.run(**{one.name: inputs[one.name] for one in self.operators[0].inputs})
        rows = torch.from_numpy(case.prompt_lengths)
        q, k, v = (float32(table) for table in (case.q_window, case.k, case.v))
        single = self.compact(q, k, v, rows, rule)
        return self.judged(results, case, rule, self.compact(q.double(), k.double(), v.double(), rows, rule), single)

    def judged(
        self, results: Sequence[Array], case: PromptCase, rule: Constants, double: Compacted, single: Compacted
    ) -> Found:
        """Compare its first operator's result with the two results of the reference; it must equal one of them."""
        assert self.operators
        return judged_as(self.operators[0], results, case, rule, double, single)


def judged_as(
    operator: Operator,
    results: Sequence[Array],
    case: PromptCase,
    rule: Constants,
    double: Compacted,
    single: Compacted,
) -> Found:
    """Compare a compaction's result with those of the reference in float64 and float32; it must equal one of them."""
    from kvc_trt.methods.verification import ExactList, Found, gathered

    found = {one.name: result for one, result in zip(operator.outputs, results, strict=True)}
    indices, width = found["indices"], single.indices.shape[2]
    moved = [
        (found["cache_lengths"], single.lengths.numpy()),
        (found["k_cache"], gathered(case.k, indices)),
        (found["v_cache"], gathered(case.v, indices)),
    ]
    if "bounds" in found:
        moved += stored_bounds(rule, found["bounds"], found["k_cache"], single.lengths.numpy())
    if "slot_positions" in found:
        moved.append((found["slot_positions"], indices))
    return Found(
        chosen=[
            ExactList(row, indices[row, :, :width], (double.indices[row].numpy(), single.indices[row].numpy()))
            for row in range(len(indices))
        ],
        moved=moved,
        computed=[] if double.scores is None else [(found["scores"][:, :, :width], double.scores.numpy())],
    )


class DecodeSelection(ABC):
    """A way to choose which cached tokens a step reads and which it drops."""

    name: str
    """The name that `PolicyParameters.decode_selection` records."""
    operators: tuple[Operator, ...] = ()
    """The operators that a step may call, the usual one first; their state inputs define what the cache carries."""
    evicts_while_decoding = False
    """Whether a step drops one token for each that it appends, so that caches never fill up."""
    drops_before_append = False
    """Whether a step drops the oldest token that is not a sink before it stores the new one."""
    spare_slots = 0
    """Number of slots beyond the budget."""
    reads_a_part = False
    """Whether a step reads only some entries of a cache that keeps them all, once a row exceeds the budget."""
    reads_beside = 0
    """Number of tokens that such a step reads in addition to `top_k`."""
    sums: tuple[str, ...] = ()
    """State to which a step adds, so that undoing one needs a copy from before."""
    oracle = False
    """Whether it reads everything to find out what matters; then only the reference runs it."""

    @abstractmethod
    def select(self, query: torch.Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Reference: run one step [B,H,D] over a cache that holds the current token."""

    def decode(self, step: StepLayer) -> Value:
        """Graph: append one token, attend, and write the aliased outputs of the cache's state; returns [B,heads,D]."""
        return step.attend(self.operators[0])

    def complete(self, prompt: PromptLayer) -> None:  # noqa: B027 (most caches carry nothing else)
        """Graph: after a prompt, write what the cache carries in addition to keys, values and page bounds."""

    def append_turn(self, turn: TurnLayer) -> None:  # noqa: B027 (most caches carry nothing else)
        """Graph: after a turn, write what the cache carries in addition to keys, values and page bounds.

        Called where the turn's tokens were appended; a compaction writes all of its cache itself."""

    @property
    def no_drafts(self) -> str | None:
        """Why the tokens of a draft cannot be checked in one pass; None if they can."""
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
        """Whether it scores pages by bounds of their keys, which the cache then carries."""
        return any(tensor.name == "bounds" for tensor in self.state)

    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Return the K+V pairs per head read to choose among `entries` tokens; a head-sized vector is half a pair."""
        return 0.0

    def recent_of(self, rule: Constants, budget: int) -> int:
        """Return `recent` for a layer with its own budget of `budget` tokens."""
        return rule.recent

    def describe(self, rule: Constants) -> str:
        """Describe how a step chooses, following "a step reads N tokens"; only for kinds that read a part."""
        return ""

    def ranking(self, rule: Constants) -> ByPages | None:
        """Return how cached tokens are ranked, if verification can prove a near-tie of that ranking."""
        return None

    @property
    def rebuilt(self) -> Mapping[str, Rebuild]:
        """Return, by name, the functions that make state from the stored keys alone, bit for bit.

        A stored context leaves this state out; everything else that a cache carries is part of it."""
        from kvc_trt.methods.verification import page_bounds

        return {"bounds": lambda keys, lengths, rule: page_bounds(keys, lengths, rule.page_size)} if self.pages else {}

    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make what the cache carries in addition to keys and values [B,G,C,D] with `lengths` [B] slots in use."""
        return {name: rebuild(keys, lengths, rule) for name, rebuild in self.rebuilt.items()}

    def take_back(
        self, state: Mapping[str, Array], saved: Mapping[str, Array], before: int, steps: range, rule: Constants
    ) -> None:
        """Undo the steps that stored the slots `steps` of one row, in place: the state is then as if they had not been.

        `state` are the row's tensors [G,...] by name, `saved` copies of `sums` from when there were `before` entries.
        Keys and values past a row's end do not count, so only what follows from them changes: here, bounds of pages.
        """
        if self.pages:
            from kvc_trt.methods.verification import rebuild_bounds

            rebuild_bounds(state["k_cache"], state["bounds"], steps, rule.page_size)

    def layer_cache(
        self, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, rule: Constants
    ) -> LayerCache:
        """Reference: return the cache that `select` reads, made from keys and values [B,G,C,D] and lengths [B]."""
        from kvc_trt import reference

        cache = reference.LayerCache(keys, values, lengths)
        if self.pages:
            cache.page_min, cache.page_max = reference.page_bounds(keys, lengths, rule.page_size)
        return cache

    def runs(self) -> Mapping[str, StepRun]:
        """Return the isolated run of each of its operators on a step, by the operator's name."""
        return {operator.name: self.run_alone for operator in self.operators}

    def run_alone(self, operator: RunnableAlone, case: StepCase, rule: Constants) -> Found:
        """Run its first operator. State of the cache's type must match exactly, other state up to rounding."""
        import torch

        from kvc_trt.methods.verification import Found, ReadByStep, float32

        schema, (keys, values, lengths) = self.operators[0], case.appended()
        carried = self.state_of(case.k_cache, case.v_cache, case.cache_lengths, rule)
        before = {one.name: carried[one.name] for one in schema.state if one.name in carried}
        after = {"k_cache": keys, "v_cache": values, **self.state_of(keys, values, lengths, rule)}
        results = operator.run(**case.inputs(), **before)
        found = {one.name: result for one, result in zip(schema.outputs, results, strict=True)}
        state = [(one.element, (found[one.name], after[one.alias])) for one in schema.outputs if one.alias]
        moved, computed = (
            [pair for element, pair in state if (element == CACHE) is copied] for copied in (True, False)
        )
        if "selected" in found:
            choice = ReadByStep(keys, values, lengths, found["output"], found["selected"])
            return Found((choice,), moved, computed)
        cache = self.layer_cache(float32(keys), float32(values), torch.from_numpy(lengths), rule)
        expected = self.select(float32(case.query), cache, rule).output.numpy()
        return Found((), moved, [(found["output"], expected), *computed])


def prompt_eviction(name: str) -> PromptEviction:
    """The kind of that name; InputError for one that no file of this package defines."""
    found = objects(PromptEviction).get(name)  # type: ignore[type-abstract]
    if found is None:
        raise InputError(f"unknown prompt eviction {name!r}", hint="kvc-trt policies lists them")
    return found


def decode_selection(name: str) -> DecodeSelection:
    """The kind of that name; InputError for one that no file of this package defines."""
    found = objects(DecodeSelection).get(name)  # type: ignore[type-abstract]
    if found is None:
        raise InputError(f"unknown decode selection {name!r}", hint="kvc-trt policies lists them")
    return found


def stored_bounds(rule: Constants, found: Array, keys: Array, lengths: Array) -> list[tuple[Array, Array]]:
    """Pair a compaction's page bounds with those of the keys it stored, if a step reads them."""
    from kvc_trt.methods.verification import page_bounds

    pages = decode_selection(rule.decode_selection).pages
    return [(found, page_bounds(keys, lengths, rule.page_size))] if pages else []


def prompt_runs() -> Mapping[str, PromptRun]:
    """Return the isolated run of every operator of an eviction, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}


def turn_runs() -> Mapping[str, TurnRun]:
    """Return the isolated run of every operator that an eviction has for turns alone, by name."""
    kinds = objects(PromptEviction).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.turn_runs().items()}


def step_runs() -> Mapping[str, StepRun]:
    """Return the isolated run of every operator of a selection, by name."""
    kinds = objects(DecodeSelection).values()  # type: ignore[type-abstract]
    return {operator: run for kind in kinds for operator, run in kind.runs().items()}
