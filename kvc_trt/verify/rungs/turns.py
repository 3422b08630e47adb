"""Turns of a conversation on the whole model: two of them after a prompt, engine against reference.

The second one attends to the caches that the first one left, so its logits judge every cache. Choices are judged as
those of a prompt are, and then forced on the reference, so that only numerical differences remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvc_trt import policies, reference
from kvc_trt.backends.harness import Array, ObservedExecutor
from kvc_trt.methods.rankings.ranking import Prompts
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime.executor import Extended, TurnExecutor
from kvc_trt.runtime.session.batch import Batch, batch_of
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.codes.following import FollowedCodes
from kvc_trt.verify.codes.stored_tokens import StoredTokens
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.questions.prompts import random_prompts
from kvc_trt.verify.rankings.index_lists import IndexComparison, count_differences, judge_kept
from kvc_trt.verify.routes import FollowedRoutes, Routes
from kvc_trt.verify.rungs.codes import codes_checks, keys_check
from kvc_trt.verify.rungs.operators import index_check

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.reference import Compacted, LayerCache, Selection, Turn

LONGEST_PROMPT, LONGEST_TURN = 512, 48
TURNS = 2


@dataclass
class TurnsRun:
    """A prompt and its turns on the engine."""

    logits: NDArray[np.float32]
    """[1 + tokens, B, vocab]: after the prompt, and after each turn, or each of its tokens if the engine gives those.
    Rows that have fewer tokens are zero."""
    kept: list[Array]
    """Logical positions INT32 [B,G,C] in the order of the phases, and in each of the caches that list them."""


def check_turns(tested: EngineUnderTest) -> list[Check]:
    """Compare logits and kept positions with the reference; nothing if the engine takes no turns.

    The limited check of a large model leaves them to the operators: the reference would read all weights three times.
    """
    no_slots = tested.engine.parameters.max_output_len < TURNS  # in caches that keep everything
    if no_slots or tested.plan.limited:
        return []
    compactions = tested.target.compactions()
    stored = StoredTokens.of(tested.target, tested.sites, "prefill", "extend")
    lists = {op.cache: op.outputs[-1] for op in compactions} if stored is not None else {}
    routes = Routes.of(tested.engine, tested.target, "prefill", "extend")
    exposed = {*lists.values(), *(name for one in (stored, routes) if one is not None for name in one.names())}
    executor = tested.target.open(expose=sorted(exposed))
    if executor.limits.no_turns is not None or not isinstance(executor, TurnExecutor):
        return []
    prompts, turns = _prompts(tested), _turns(tested)
    caches = [f"slot_positions.{site.name}" for site in tested.sites if site.parameters.eviction.turn_state]
    with tested.phase("engine"):
        ours = _on_engine(executor, prompts, turns, caches, stored, lists, routes)
    parameters, engine = tested.engine.parameters, tested.engine
    method = _ForcedTurns(parameters, iter(ours.kept), tested.thresholds.choice_slack)
    with tested.phase("reference"):
        decoder = ReferenceDecoder(engine.model, engine.weights(), method=method, parameters=parameters, resident=False)
        followed = None if stored is None else FollowedCodes(stored.sites, stored.tables)
        if followed is not None:
            decoder.follow(followed)
        experts = None if routes is None else FollowedRoutes(routes, tested.routes_bar)
        if experts is not None:
            decoder.follow_routes(experts)
        expected = _on_reference(decoder, prompts, turns, all_logits=executor.limits.all_logits)
    scale = max(1.0, float(np.abs(expected).max()))
    error = float(np.abs(ours.logits - expected).max()) / scale
    tokens = " and ".join(str(turn.prompt_lengths.tolist()) for turn in turns)
    sample, note = f"{len(prompts)} rows x {TURNS} turns", f"turns of {tokens} tokens after {prompts.prompt_lengths}"
    note += ", the logits after each of their tokens" if executor.limits.all_logits else ""
    bar = tested.thresholds.logits_max_error
    checks = []
    if stored is not None and followed is not None:
        checks += [*codes_checks(stored.found, "turns: "), keys_check(followed.off, bar, "turns: ")]
    if experts is not None:
        checks.append(experts.check("turns: "))
    checks.append(at_most("turns: max logit error", sample, error, bar, note=note))
    if method.compared.compared:
        checks.append(index_check("turns: tokens kept", method.compared, "on the reference's inputs"))
    return checks


def _prompts(tested: EngineUnderTest) -> Batch:
    """Return two prompts that a policy must evict from, if its budget is small enough for a quick check."""
    longest = min(tested.plan.longest_prompt, LONGEST_PROMPT, tested.engine.parameters.max_input_len)
    lengths = [max(1, longest - TURNS * LONGEST_TURN), max(1, longest // 3)]
    return batch_of(random_prompts(tested.engine.model, lengths, tested.seed))


def _turns(tested: EngineUnderTest) -> list[Batch]:
    """Return the turns' tokens: of unequal lengths, and as many as caches that keep everything have room for."""
    parameters = tested.engine.parameters
    longest = max(1, min(LONGEST_TURN, parameters.max_output_len // TURNS))
    lengths = [longest, max(1, longest // 5)]
    return [
        batch_of(random_prompts(tested.engine.model, lengths[:: 1 - 2 * (number % 2)], tested.seed + 1 + number), 1)
        for number in range(TURNS)
    ]


def _on_engine(
    executor: ObservedExecutor, prompts: Batch, turns: list[Batch], caches: list[str], stored: StoredTokens | None,
    lists: Mapping[int, str], routes: Routes | None,
) -> TurnsRun:  # fmt: skip
    """Run a prompt and its turns; `lists` name the positions that caches with a format keep of a prompt."""
    assert isinstance(executor, TurnExecutor)
    rows = len(prompts)
    executor.allocate(rows)
    prefilled = executor.prefill(prompts.input_ids, prompts.prompt_lengths)
    for row in range(rows):
        executor.insert(prefilled, row, row)
    if routes is not None:
        routes.after_block(executor, prompts.prompt_lengths)
    if stored is not None:
        of_prompt = {cache: executor.exposed(name).copy() for cache, name in lists.items()}
        stored.after_prompt(executor, executor.buffers, of_prompt, prompts.prompt_lengths)
    logits, kept = [prefilled.logits[None]], [executor.buffers[name][:rows].copy() for name in caches]
    positions, lengths = prompts.prompt_lengths, prefilled.cache_lengths
    for turn in turns:
        found = executor.extend(0, turn.input_ids, turn.prompt_lengths, positions, lengths)
        if routes is not None:
            routes.after_block(executor, turn.prompt_lengths, graph="extend")
        if stored is not None:
            stored.after_turn(executor, positions, turn.prompt_lengths, executor.buffers, lengths)
        positions, lengths = positions + turn.prompt_lengths, found.cache_lengths
        logits.append(_by_token(found, turn.prompt_lengths))
        kept += [executor.buffers[name][:rows].copy() for name in caches]
    return TurnsRun(np.concatenate(logits), kept)


def _by_token(found: Extended, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits [tokens,B,vocab] that a turn gave: after each of its tokens, or after the last one alone."""
    if found.all_logits is None:
        return found.logits[None]
    real = np.arange(found.all_logits.shape[1]) < lengths[:, None]
    kept: NDArray[np.float32] = np.where(real[:, :, None], found.all_logits, np.float32(0)).swapaxes(0, 1)
    return kept


def _on_reference(
    decoder: ReferenceDecoder, prompts: Batch, turns: list[Batch], *, all_logits: bool
) -> NDArray[np.float32]:
    first, cache = decoder.prefill(torch.from_numpy(prompts.input_ids), torch.from_numpy(prompts.prompt_lengths))
    logits = [first[None]]
    for turn in turns:
        lengths = torch.from_numpy(turn.prompt_lengths)
        found = decoder.extend(torch.from_numpy(turn.input_ids), lengths, cache, all_logits=all_logits)
        logits.append(found.transpose(0, 1) if all_logits else found[None])
    together: NDArray[np.float32] = torch.cat(logits).float().numpy()
    return together


class _ForcedTurns:
    """A method that keeps the tokens that the engine kept, where the engine lists them; prompts and turns come layer by
    layer."""

    def __init__(self, parameters: PolicyParameters, given: Iterator[Array], slack: float | None) -> None:
        self.compared = IndexComparison()
        self._own, self._given, self._slack = policies.method(parameters), given, slack

    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, parameters: PolicyParameters
    ) -> Compacted:
        """Keep the tokens of a prompt that the engine kept."""
        own = self._own.compact(observed, keys, values, prompt_lengths, parameters)
        if not parameters.eviction.turn_state:
            return own
        shared = own.indices.shape[1] // keys.shape[1]
        keys, values = (table.repeat_interleave(shared, dim=1) for table in (keys, values))
        given = next(self._given)[:, :, : own.indices.shape[2]]
        prompts = Prompts.of_tensors(observed, keys, values, prompt_lengths)
        self._judge(prompts, own.indices.numpy(), given, parameters)
        return _kept(own, keys, values, torch.from_numpy(np.ascontiguousarray(given)).long())

    def compact_turn(self, turn: Turn, parameters: PolicyParameters) -> Compacted:
        """Keep the tokens that the engine kept after a turn."""
        own = self._own.compact_turn(turn, parameters)
        if not parameters.eviction.turn_state:
            return own
        given = torch.from_numpy(next(self._given)[:, :, : own.indices.shape[2]].astype(np.int64))
        beyond = torch.iinfo(torch.int64).max
        real = torch.arange(turn.keys.shape[2]) < turn.lengths[:, None, None]
        places = torch.where(real, turn.places, beyond).contiguous()
        indices = torch.searchsorted(places, given.clamp(min=0)).clamp(max=places.shape[2] - 1)
        indices = indices.masked_fill(given < 0, -1)
        for b, new in enumerate(turn.new_lengths.tolist()):
            one, voting = slice(b, b + 1), min(parameters.window, new, turn.queries.shape[2])
            queries = turn.queries[one, :, -voting:]
            observed = queries if turn.softmax.plain else reference.Observed(queries, turn.softmax)
            tables = observed, turn.keys[one], turn.values[one], turn.lengths[one]
            lists = own.indices[one].numpy(), indices[one].int().numpy()
            self._judge(Prompts.of_tensors(*tables, turn.positions[one]), *lists, parameters)
        return _kept(own, turn.keys, turn.values, indices)

    def select(self, query: Tensor, cache: LayerCache, parameters: PolicyParameters) -> Selection:
        """Read as the method does."""
        return self._own.select(query, cache, parameters)

    def _judge(self, prompts: Prompts, own: Array, given: Array, parameters: PolicyParameters) -> None:
        ranking = parameters.eviction.ranking(parameters)
        if ranking is None or not ranking.ranks_turns_alike or self._slack is None:
            self.compared += count_differences(own, given)
        else:
            self.compared += judge_kept(ranking, prompts, own, given, self._slack)


def _kept(own: Compacted, keys: Tensor, values: Tensor, indices: Tensor) -> Compacted:
    """Return `own` with other entries of keys and values kept: int64 [B,G,C], -1 past a row's end."""
    where, empty = indices.clamp(min=0)[..., None].expand(-1, -1, -1, keys.shape[-1]), (indices < 0)[..., None]
    keys, values = (torch.gather(table, 2, where).masked_fill(empty, 0) for table in (keys, values))
    return reference.Compacted(keys, values, indices.int(), own.lengths)
