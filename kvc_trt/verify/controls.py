"""Two controls without which the ladder could pass an engine that does something else.

A batch within the budget must equal the dense twin bit for bit; and where a prompt is longer than the budget,
compression must have been active: measured from what the operators returned, not from what the parameters promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvc_trt.verify.engine_run import run
from kvc_trt.verify.prompts import batch_of, random_prompts
from kvc_trt.verify.report import Check, Rung, at_most

if TYPE_CHECKING:
    from kvc_trt.policies import PolicyParameters
    from kvc_trt.verify.subject import Subject

_MOST_STEPS = 8


def dense_limit(parameters: PolicyParameters) -> int:
    """Stored tokens up to which every row of a batch is promised the dense engine's bits."""
    from kvc_trt.graph.build import slice_limit

    evicting = parameters.prompt_eviction != "none"
    return min(slice_limit(parameters), parameters.prompt_budget if evicting else parameters.capacity)


def check_dense_twin(subject: Subject, rung: Rung) -> None:
    """Control (a): within the budget, engine and dense twin agree to the last bit."""
    parameters = subject.engine.parameters
    if parameters.policy == "full":
        rung.reason = "a full engine is its own dense twin"
        return
    limit = min(dense_limit(parameters), parameters.max_input_len)
    steps = min(_MOST_STEPS, limit - 1, parameters.max_output_len)
    if steps < 1:
        rung.reason = f"no row fits: dense up to {limit} tokens"
        return
    longest = limit - steps
    batch = batch_of(random_prompts(subject.engine.model, sorted({longest, max(1, longest // 2), 1}), subject.seed))
    with subject.phase("engine"):
        ours = run(subject.executor, batch, steps)
    with subject.phase("dense twin"):
        dense = run(subject.twin, batch, steps, tokens=ours.tokens)
    sample = f"{len(batch)} rows of up to {limit} tokens x {steps + 1} positions"
    unequal = int((ours.logits != dense.logits).any(axis=-1).sum())
    rung.checks.append(at_most("positions whose logits differ from the dense twin's", sample, unequal, 0))


def check_activity(subject: Subject, rung: Rung) -> None:
    """Control (b): evicted where a prompt is longer than the budget, and read no more than k where it does not fit."""
    parameters = subject.engine.parameters
    if parameters.policy == "full":
        rung.reason = "a full engine compresses nothing"
        return
    rung.checks += [*_eviction(subject), *_selection(subject)]
    if not rung.checks:
        rung.left_out = subject.plan.limited
        longest = int(subject.batch.prompt_lengths.max()) + len(subject.engine_run.tokens)
        size = f"prompts of up to {parameters.max_input_len} tokens" if not rung.left_out else f"{longest} tokens"
        rung.reason = f"{size} fit the budget: nothing to compress"


def _eviction(subject: Subject) -> list[Check]:
    parameters, batch = subject.engine.parameters, subject.batch
    over = np.flatnonzero(batch.prompt_lengths > parameters.prompt_budget)
    if parameters.prompt_eviction == "none" or not over.size:
        return []
    choices, stored = subject.observed.choices, subject.engine_run.cache_lengths
    row = int(over[np.argmax(batch.prompt_lengths[over])])
    logical = int(batch.prompt_lengths[row])
    layers = range(parameters.skip_layers, subject.engine.model.num_hidden_layers)
    checks = []
    for layer in layers:
        physical = int(stored[layer, row])
        kept = int((choices[layer][0][row] >= 0).sum(-1).max()) if layer in choices else logical
        active = max(physical, kept) <= parameters.prompt_budget
        measured = f"{physical} stored, {kept} kept"
        detail = f"prompt of {logical}, layer {layer}"
        bar = f"<= {parameters.prompt_budget} of {logical}"
        checks.append(Check("tokens of the prompt", f"layer {layer}", measured, bar, active, detail))
    return checks


def _selection(subject: Subject) -> list[Check]:
    parameters, observed = subject.engine.parameters, subject.observed
    if parameters.decode_selection != "hybrid":
        return []
    checks = []
    for layer in range(parameters.skip_layers, subject.engine.model.num_hidden_layers):
        lengths = np.array([stored[layer] for stored in observed.lengths])
        over = lengths > parameters.dense_limit
        if not over.any():
            continue
        reads = observed.choices.get(layer, [])[1:]
        counts = np.array([(chosen >= 0).sum(-1).max(-1) for chosen in reads]) if reads else lengths
        most = int(counts[over].max())
        sample = f"layer {layer}, {int(over.sum())} row steps over {parameters.dense_limit} tokens"
        stored_tokens = int(lengths[over].max())
        checks.append(
            at_most("tokens read by a step", sample, most, parameters.top_k, f"of up to {stored_tokens} stored")
        )
    return checks
