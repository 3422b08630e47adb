"""Two controls without which an engine that does not follow its policy could pass the ladder.

A batch within the budget must equal the dense twin bit for bit; and for a prompt longer than the budget, compression
must be active, as measured by the operators' results and not by the engine's parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.checks import Check, Rung, at_most
from kvc_trt.verify.engine_run import run
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.questions.prompts import random_prompts

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters

_MOST_STEPS = 8


def dense_limit(parameters: PolicyParameters, layers: int) -> int:
    """Return the number of stored tokens up to which every row equals the dense engine's bit for bit."""
    rules = [group.parameters for layer in range(layers) for group in parameters.groups(layer)]
    return min([parameters.slice_limit, *(_all_kept(rule) for rule in rules if rule.compresses)])


def _all_kept(rule: PolicyParameters) -> int:
    """Return the longest prompt of which nothing is evicted."""
    if not rule.eviction.evicts:
        return rule.capacity
    return rule.longest_whole if rule.division is None else rule.division.smallest


def check_dense_twin(tested: EngineUnderTest, rung: Rung) -> None:
    """Control (a): within the budget, engine and dense twin agree to the last bit."""
    parameters = tested.engine.parameters
    if not parameters.compresses:
        rung.reason = "a full engine is its own dense twin"
        return
    if parameters.positions == "cache" and parameters.cache_format.keys is not None:
        rung.reason = "its caches store keys before rotation, whose codes are not those of the twin's rotated keys"
        return
    limit = min(dense_limit(parameters, tested.engine.model.num_hidden_layers), parameters.max_input_len)
    steps = min(_MOST_STEPS, limit - 1, parameters.max_output_len)
    if steps < 1:
        rung.reason = f"no row fits: dense up to {limit} tokens"
        return
    longest = limit - steps
    batch = batch_of(random_prompts(tested.engine.model, sorted({longest, max(1, longest // 2), 1}), tested.seed))
    with tested.phase("engine"):
        ours = run(tested.beside_twin, batch, steps)
    with tested.phase("dense twin"):
        dense = run(tested.twin, batch, steps, tokens=ours.tokens)
    sample = f"{len(batch)} rows x {steps + 1} positions"
    if parameters.eviction.cache_per_query_head:
        error = float(np.abs(ours.logits - dense.logits).max())
        note = f"rows of up to {limit} tokens; a cache per query head multiplies in another order, so not bit for bit"
        bar = tested.thresholds.logits_max_error
        rung.checks.append(at_most("logits unlike the dense twin's", sample, error, bar, note=note))
        return
    unequal = int((ours.logits != dense.logits).any(axis=-1).sum())
    note = f"rows of up to {limit} tokens, every bit compared"
    rung.checks.append(at_most("logits unlike the dense twin's", sample, unequal, 0, note=note))


def check_activity(tested: EngineUnderTest, rung: Rung) -> None:
    """Control (b): prompts longer than the budget lose tokens, and steps of rows that do not fit read at most k."""
    parameters = tested.engine.parameters
    if not parameters.compresses:
        rung.reason = "a full engine compresses nothing"
        return
    rung.checks += [*_eviction(tested, rung.layers), *_selection(tested, rung.layers)]
    if not rung.checks:
        rung.left_out = tested.plan.limited
        longest = int(tested.batch.prompt_lengths.max()) + len(tested.engine_run.tokens)
        size = f"prompts of up to {parameters.max_input_len} tokens" if not rung.left_out else f"{longest} tokens"
        rung.reason = f"{size} fit the budget: nothing to compress"


def _eviction(tested: EngineUnderTest, measured: list[dict[str, int]]) -> list[Check]:
    """Return checks of the longest prompt's tokens, stored and kept, in every cache that evicts."""
    batch, lists, stored = tested.batch, tested.observed.kept, tested.engine_run.cache_lengths
    row = int(np.argmax(batch.prompt_lengths))
    logical = int(batch.prompt_lengths[row])
    over, most = 0, 0
    for site in tested.sites:
        budget = site.parameters.kept_of(logical) if site.parameters.by_length else site.parameters.most_kept
        if not site.parameters.eviction.evicts or logical <= budget:
            continue
        kept = int((lists[site.cache][row] >= 0).sum(-1).max()) if site.cache in lists else logical
        physical = int(stored[site.cache, row])
        measured.append({"layer": site.layer, "logical": logical, "physical": physical, "kept": kept, "budget": budget})
        over, most = over + (max(physical, kept) > budget), max(most, physical, kept)
    if not measured:
        return []
    note = f"{most} of {logical} tokens at most: the cache's length and the operator's own list, the larger"
    return [
        at_most(f"caches over their budget, a {logical}-token prompt", f"{len(measured)} caches", over, 0, note=note)
    ]


def _selection(tested: EngineUnderTest, measured: list[dict[str, int]]) -> list[Check]:
    """Return checks of the tokens read by steps of rows that do not fit, counted in the operators' lists."""
    observed = tested.observed
    choosing = [site for site in tested.sites if site.parameters.reads_a_part]
    steps, counts = 0, [0]
    for site in choosing:
        lengths = np.array([stored[site.cache] for stored in observed.lengths])
        over = lengths > site.parameters.dense_limit
        if not over.any():
            continue
        reads = observed.read.get(site.cache, [])
        read = np.array([(chosen >= 0).sum(-1).max(-1) for chosen in reads]) if reads else lengths
        steps, counts = steps + int(over.sum()), [*counts, int(read[over].max())]
        measured.append({"layer": site.layer, "stored": int(lengths[over].max()), "read": counts[-1]})
    if not steps:
        return []
    sample = f"{steps} row steps over {choosing[0].parameters.dense_limit}"
    return [at_most("tokens read by a step", sample, max(counts), choosing[0].parameters.most_read)]
