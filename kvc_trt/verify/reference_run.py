"""Run the reference along given tokens, layer by layer: every weight is read once, and one layer is in memory at once.

It makes its own choices of tokens to keep and to read, or the engine's choices are forced on it. A token swapped at a
near-tie may carry much attention: from there on logits differ although neither side is wrong. So the engine's choices
are judged first, each on the reference's own inputs, and then forced on the reference; remaining differences are
numerical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from kvc_trt import policies, reference
from kvc_trt.graph.state import cache_sites
from kvc_trt.methods.rankings.ranking import Prompts, Step
from kvc_trt.models.weights import LINEAR, LINEAR_NORM
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime.session.batch import Batch
from kvc_trt.verify.codes.following import FollowedCodes, KeysOff
from kvc_trt.verify.ranges import Ranges
from kvc_trt.verify.rankings.array_errors import larger
from kvc_trt.verify.rankings.index_lists import IndexComparison, count_differences, judge_kept, judge_read
from kvc_trt.verify.rankings.steps import attend_selected
from kvc_trt.verify.routes import FollowedRoutes, Routes
from kvc_trt.verify.thresholds import FLOAT32_SLACK

if TYPE_CHECKING:
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.models.weights import WeightSource
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.reference.layers import Weights
    from kvc_trt.reference.model.rules import Method
    from kvc_trt.verify.codes.stored_tokens import StoredTokens

Choices = Mapping[int, list[NDArray[np.integer]]]
"""Per cache: the prompt positions kept [B,G,C], then per step the slots read [B,G,k] (none if all are read)."""


class StepInputs(NamedTuple):
    """The inputs of a step's choice: its query [B,H,D], and the keys [B,G,n,D] that are stored, or more of them."""

    query: NDArray[Any]
    keys: NDArray[Any]


Inputs = Mapping[int, list[StepInputs]]
"""Per cache: the inputs of each step's choice."""


@dataclass(frozen=True)
class KnownRun:
    """A model under a policy, with prompts and tokens that are known beforehand."""

    model: ModelConfig
    weights: WeightSource
    parameters: PolicyParameters
    batch: Batch
    tokens: NDArray[np.int64]
    """The token fed to each row at each step, [N,B]."""
    progress: Progress | None = None
    activations: str = "float32"
    """The type of the engine's activations, with whose range the reference's values are compared."""
    stored: StoredTokens | None = None
    """The engine's stored tokens, with whose codes the reference continues; None: it continues with its own."""
    routes: Routes | None = None
    """The experts that the engine chose, with which the reference continues; None: it continues with its own."""
    routes_bar: float = 0.0
    """The bar of router logits that change places (`FollowedRoutes`)."""

    def under(self, method: Method) -> ReferenceRun:
        """Run the reference, with `method` making the choices."""
        decoder = ForcedDecoder(self.model, self.weights, method=method, parameters=self.parameters, resident=False)
        decoder.ranges = Ranges(self.activations)
        followed = None if self.stored is None else FollowedCodes(self.stored.sites, self.stored.tables)
        if followed is not None:
            decoder.follow(followed)
        routes = None if self.routes is None else FollowedRoutes(self.routes, self.routes_bar)
        if routes is not None:
            decoder.follow_routes(routes)
        found = decoder.forced(self.batch, self.tokens, self.progress)
        found.keys_off, found.routes = None if followed is None else followed.off, routes
        return found


@dataclass(frozen=True)
class Judging:
    """The rules by which choices of an engine are judged.

    A step's choice is judged on the engine's own `inputs`, if these are known, within `inputs_slack` times the
    tolerance of a near-tie. Any other choice is judged on the reference's own inputs. Rounding of earlier layers
    differs between the two, so there `slack` times that tolerance is allowed.
    """

    slack: float | None
    """The multiple of the tolerance on the reference's inputs; None: differences are only counted."""
    inputs: Inputs = field(default_factory=dict)
    inputs_slack: float = FLOAT32_SLACK


@dataclass
class ReferenceRun:
    """The reference's logits [N+1,B,vocab], and its choices for every cache."""

    logits: NDArray[np.float32]
    choices: dict[int, list[NDArray[np.integer]]]
    ranges: Ranges
    explained: IndexComparison | None = None
    """Under forced choices: the comparison of these choices with the reference's own."""
    inputs_off: float | None = None
    """The largest distance of the queries and keys by which the choices were made from the reference's, divided by the
    longest vector of the same row and cache; None if it is not known."""
    keys_off: KeysOff | None = None
    """The errors of the engine's exact keys and values, if the reference continues from the engine's codes."""
    routes: FollowedRoutes | None = None
    """The comparison of the engine's experts with the reference's own, if the reference continues with these."""


@dataclass(frozen=True)
class ForcedChoices:
    """Reference logits [N+1,B,vocab] with which the engine's are compared."""

    logits: NDArray[np.float32]
    rows: tuple[int, ...] = ()
    """The rows of the batch that were run again under the engine's choices."""
    explained: IndexComparison | None = None
    """The comparison of the engine's choices with the reference's own."""
    inputs_off: float | None = None
    """The distance of the choices' inputs from the reference's (`ReferenceRun.inputs_off`)."""
    keys_off: KeysOff | None = None
    """The errors of the engine's exact keys and values (`ReferenceRun.keys_off`)."""
    routes: FollowedRoutes | None = None
    """The comparison of experts (`ReferenceRun.routes`); of runs again, that of the last one."""


class ForcedDecoder(ReferenceDecoder):
    """A reference decoder that is fed tokens known beforehand, and whose activations are measured as they arise."""

    ranges: Ranges
    _layer = 0

    @torch.inference_mode()
    def forced(self, batch: Batch, tokens: NDArray[np.int64], progress: Progress | None = None) -> ReferenceRun:
        """Run prompts, then `tokens` [N,B]: the same as `prefill` and N times `decode`, but layer by layer."""
        lengths = torch.from_numpy(batch.prompt_lengths)
        prompts = [self._embed(torch.tensor(row), torch.arange(len(row))) for row in batch.rows()]
        self._set_prompt_budgets(torch.from_numpy(batch.input_ids), lengths)
        steps = [self._embed(row, lengths + step) for step, row in enumerate(torch.from_numpy(tokens))]
        choices: dict[int, list[NDArray[np.integer]]] = {}
        layers = self.config.num_hidden_layers
        with (progress or NullProgress()).task("reference", layers) as advance:
            for index in range(layers):
                self._layer = index
                weights, state = self._weights.layer(index), self._empty_state(index, len(prompts))
                if state is not None:
                    prompts = self._linear_layer(index, weights, prompts, state)
                    steps = [self._linear_step(index, weights, hidden, state) for hidden in steps]
                    advance(1)
                    continue
                caches = self._prefill_layer(index, weights, prompts, lengths)
                made = [_list_of(cache.indices) for cache in caches]
                for step, hidden in enumerate(steps):
                    steps[step] = self._decode_layer(index, weights, hidden, lengths + step, caches)
                    for chosen, cache in zip(made, caches, strict=True):
                        chosen += _list_of(cache.selected)
                choices.update(enumerate(made, start=len(choices)))
                advance(1)
            hidden = torch.stack([*[torch.stack([x[-1] for x in prompts])], *steps])
            logits = self._logits(hidden.flatten(0, 1)).reshape(*hidden.shape[:2], -1)
            self.ranges.measure("the logits", logits)
        return ReferenceRun(logits.to(torch.float32).numpy(), choices, self.ranges)

    @override
    def _product(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        tensor = f"model.layers.{self._layer}.{name}"
        self.ranges.measure(f"what {tensor} multiplies", x)
        product = super()._product(weights, name, x)
        self.ranges.measure(f"the product of {tensor}", product)
        return product

    @override
    def _with_update(self, weights: Weights, hidden: Tensor, update: Tensor) -> Tensor:
        stream = super()._with_update(weights, hidden, update)
        part = LINEAR if LINEAR_NORM in weights else "self_attn"
        self.ranges.measure_stream(f"the residual stream after model.layers.{self._layer}.{part}", stream)
        return stream

    @override
    def _feed_forward(self, index: int, weights: Weights, before: Tensor, hidden: Tensor) -> Tensor:
        stream = super()._feed_forward(index, weights, before, hidden)
        self.ranges.measure_stream(f"the residual stream after model.layers.{self._layer}.mlp", stream)
        return stream


def reference_run(run: KnownRun) -> ReferenceRun:
    """Run the reference with its own choices, reading each weight once."""
    return run.under(policies.method(run.parameters))


def replay(run: KnownRun, chosen: Choices, judging: Judging) -> ReferenceRun:
    """Run the reference under an engine's choices `chosen`, and judge each of them.

    Earlier choices are forced, so that one near-tie is not counted again in everything that follows from it.
    """
    choosing = [site.cache for site in cache_sites(run.model, run.parameters) if site.parameters.chooses]
    method = _Replay({cache: chosen[cache] for cache in choosing}, run.parameters, judging)
    found = run.under(method)
    found.explained, found.inputs_off = method.compared, method.inputs_off
    return found


def can_judge(rules: Iterable[PolicyParameters]) -> bool:
    """Return whether near-ties can be distinguished from errors in the choices of caches under these rules."""
    return all(map(_can_judge, rules))


def _can_judge(rule: PolicyParameters) -> bool:
    """Return whether each choice under a rule is made once, by a ranking that can prove near-ties."""
    if rule.slides:
        return True
    of_prompt, of_step = rule.eviction.ranking(rule), rule.selection.ranking(rule)
    kept = not rule.eviction.evicts or of_prompt is not None
    read = not rule.reads_a_part or of_step is not None
    return kept and read and not rule.evicts_while_decoding and rule.squeeze_share is None


def force_choices(run: KnownRun, own: ReferenceRun, chosen: Choices, judging: Judging) -> ForcedChoices:
    """Run the reference again under the engine's choices `chosen`, for the rows where those of its `own` run differ.

    The choices are judged by `replay`.
    """
    rows = tuple(sorted(different_rows(own.choices, chosen)))
    if not rows:
        return ForcedChoices(own.logits, keys_off=own.keys_off, routes=own.routes)
    again = replay(run, chosen, judging)
    logits = own.logits.copy()
    logits[:, rows] = again.logits[:, rows]
    off = None
    if own.keys_off is not None and again.keys_off is not None:
        off = own.keys_off.of_rows(again.keys_off, rows)
    return ForcedChoices(logits, rows, again.explained, again.inputs_off, off, again.routes)


class _Replay:
    """A method that repeats an engine's choices, so that runs differ only numerically."""

    def __init__(self, chosen: Choices, parameters: PolicyParameters, judging: Judging) -> None:
        self.compared, self.inputs_off = IndexComparison(), 0.0 if judging.inputs else None
        self._own = policies.method(parameters)
        self._slack, self._inputs, self._inputs_slack = judging.slack, judging.inputs, judging.inputs_slack
        self._layers = iter((index, chosen[index]) for index in sorted(chosen))
        self._current: list[NDArray[np.integer]] = []
        self._cache, self._step = 0, 0

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
    ) -> reference.Compacted:
        """Keep the tokens that the engine kept. It is called once for each cache that chooses, in their order."""
        self._cache, given_lists = next(self._layers)
        self._current, self._step = list(given_lists), 0
        given = self._current.pop(0)
        own = self._own.compact(observed, keys, values, prompt_lengths, parameters).indices
        # With a list per query head, the keys and values are repeated for the query heads.
        keys, values = (x.repeat_interleave(given.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        if self._slack is None:
            found = count_differences(own.numpy(), given)
        else:
            prompts = Prompts.of_tensors(observed, keys, values, prompt_lengths)
            ranking = parameters.eviction.ranking(parameters)
            found = judge_kept(ranking, prompts, own.numpy(), given, self._slack)
        self.compared += self._located(found)
        indices = torch.from_numpy(np.ascontiguousarray(given))
        where = indices.clamp(min=0).long()[..., None].expand(-1, -1, -1, keys.shape[-1])
        empty = (indices < 0)[..., None]
        kept_keys, kept_values = (torch.gather(cache, 2, where).masked_fill(empty, 0) for cache in (keys, values))
        return reference.Compacted(kept_keys, kept_values, indices, (indices >= 0).sum(-1)[:, 0])

    def compact_turn(self, turn: reference.Turn, parameters: PolicyParameters) -> reference.Compacted:
        """Keep the method's own choice: turns are checked elsewhere."""
        return self._own.compact_turn(turn, parameters)

    def select(self, query: Tensor, cache: reference.LayerCache, parameters: PolicyParameters) -> reference.Selection:
        """Read the slots that the engine read. It is called for the steps in their order."""
        if not self._current:
            return self._own.select(query, cache, parameters)
        given = self._current.pop(0)
        self._step += 1
        own = self._own.select(query, cache, parameters).selected
        assert own is not None
        scored_by = None
        if self._slack is None:
            found = count_differences(own.numpy(), given)
        else:
            ranking = parameters.selection.ranking(parameters)
            assert ranking is not None, "its choices can be judged"
            query_seen, keys_seen, slack = self._seen(query, cache)
            step = Step.of_tensors(query_seen, keys_seen, cache.lengths, cache.softmax)
            found, explained = judge_read(ranking, step, own.numpy(), given, slack)
            scored_by = ranking.scored_by(step, explained, slack)
        self.compared += self._located(found)
        selected = torch.from_numpy(np.ascontiguousarray(given))
        return reference.Selection(_output_of(query, cache, selected, parameters, scored_by), selected)

    def _seen(self, query: Tensor, cache: reference.LayerCache) -> tuple[Tensor, Tensor, float]:
        """Return the query and keys on which the current choice is judged, and the slack for them."""
        assert self._slack is not None
        if self._cache not in self._inputs:
            return query, cache.keys, self._slack
        theirs = self._inputs[self._cache][self._step - 1]
        query_seen, keys_seen = (torch.from_numpy(np.ascontiguousarray(table, np.float32)) for table in theirs)
        for row, m in enumerate(cache.lengths.tolist()):
            pairs = (query[row], query_seen[row]), (cache.keys[row, :, :m], keys_seen[row, :, :m])
            for ours, other in pairs:
                longest = max(float(ours.norm(dim=-1).max()), 1e-30)
                off = float((ours - other).norm(dim=-1).max()) / longest
                self.inputs_off = larger(self.inputs_off or 0.0, off)
        return query_seen, keys_seen, self._inputs_slack

    def _located(self, found: IndexComparison) -> IndexComparison:
        """Return a comparison whose errors name the cache and the step; step 0 is the prompt's compaction."""
        return replace(found, wrong=tuple(f"cache {self._cache}, step {self._step}: {one}" for one in found.wrong))


def _output_of(
    query: Tensor, cache: reference.LayerCache, selected: Tensor, rule: PolicyParameters, scored_by: Any
) -> Tensor:
    """Return the output of a step of `rule` that reads `selected` [B,G,k] or [B,H,k]; `scored_by` is its ranking's."""
    shared = selected.shape[1] // cache.keys.shape[1]
    keys, values = (table.repeat_interleave(shared, dim=1) for table in (cache.keys, cache.values))
    attended = attend_selected(query, keys, values, selected, cache.softmax)
    return rule.selection.output_of(attended, query, cache, selected, rule, scored_by)


def _list_of(chosen: Tensor | None) -> list[NDArray[np.integer]]:
    return [] if chosen is None else [chosen.numpy()]


def different_rows(one: Choices, other: Choices) -> set[int]:
    """Return the rows of the batch for which two runs' choices differ anywhere."""
    rows: set[int] = set()
    for layer in one.keys() & other.keys():
        for a, b in zip(one[layer], other[layer], strict=False):
            width = min(a.shape[-1], b.shape[-1])
            differs = (a[..., :width] != b[..., :width]).any(axis=(1, 2))
            rest = [(x[..., width:] >= 0).any(axis=(1, 2)) for x in (a, b)]
            rows.update(np.flatnonzero(differs | rest[0] | rest[1]).tolist())
    return rows
