"""Rung 1: every kvc operator of the engine against the normative reference, on inputs at the engine's own constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvc_trt import policies, reference
from kvc_trt.graph.state import PAGED, CacheSite, cache_heads, cache_sites
from kvc_trt.reference.dense import causal_attention
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.choices import compare_either
from kvc_trt.verify.inputs import AttentionCase, PromptCase, StepCase, attention_cases, prompt_cases, step_cases
from kvc_trt.verify.layer_budget_operators import run_compact_ranked, run_layer_budgets, run_trim
from kvc_trt.verify.method_operators import PROMPT_RUNS, STEP_RUNS
from kvc_trt.verify.near_ties import IndexComparison, compare_compaction, compare_selection
from kvc_trt.verify.outcome import (
    Outcome,
    appended,
    attend_selected,
    exact,
    float32,
    gathered,
    maximum_error,
    page_bounds,
)
from kvc_trt.verify.target import Array, Operator, Target
from kvc_trt.verify.thresholds import Thresholds

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters


Case: TypeAlias = "PromptCase | StepCase | AttentionCase"


LAYER_BUDGETS = "KvcLayerBudgets"
MOVING = ("KvcCompact", "KvcCompactRanked", "KvcTrim", LAYER_BUDGETS)
"""Operators whose outputs are moved or counted: nothing in them is computed to within rounding."""


def check_operators(
    engine: Engine, target: Target, thresholds: Thresholds, *, seed: int = 0
) -> tuple[list[Check], IndexComparison]:
    """Run each operator of both graphs alone; returns the checks and what was compared and admitted."""
    dtype = engine.state[0].dtype
    checks: list[Check] = []
    admitted = IndexComparison()
    sites = cache_sites(engine.model, engine.parameters)
    for operator in target.operators():
        site = None if operator.cache is None else sites[operator.cache]
        parameters = engine.parameters if site is None else site.parameters
        model = engine.model if site is None else model_of(engine.model, site)
        cases = _cases(model, parameters, operator, dtype, seed)
        outcome = Outcome()
        for case in cases:
            if operator.name == LAYER_BUDGETS and isinstance(case, PromptCase):
                layers = engine.model.num_hidden_layers - engine.parameters.skip_layers
                outcome += run_layer_budgets(operator, case, parameters, layers)
            else:
                outcome += run_case(operator, case, parameters)
        checks += _checks(operator, [case.name for case in cases], outcome, thresholds.value_error)
        admitted += outcome.indices
    return checks, admitted


def run_case(operator: Operator, case: Case, parameters: PolicyParameters) -> Outcome:
    """One operator on one case."""
    if isinstance(case, AttentionCase):
        return _run_prefill_attention(operator, case)
    if isinstance(case, PromptCase):
        return _strict(case, _PROMPT_RUNS[operator.name](operator, case, parameters))
    return _strict(case, _STEP_RUNS.get(operator.name, _run_dense)(operator, case, parameters))


def model_of(model: ModelConfig, site: CacheSite) -> ModelConfig:
    """A model of the heads that one cache serves."""
    kv_heads = cache_heads(model, site)
    served = model.num_key_value_heads if site.kv_heads is None else len(site.kv_heads)
    return replace(model, num_attention_heads=served * model.group_size, num_key_value_heads=kv_heads)


def _cases(
    model: ModelConfig, parameters: PolicyParameters, operator: Operator, dtype: str, seed: int
) -> Sequence[Case]:
    if operator.name == "KvcPrefillAttention":
        return list(attention_cases(model, dtype, seed))
    if operator.name in (*_PROMPT_RUNS, LAYER_BUDGETS):
        return list(prompt_cases(model, parameters, dtype, seed))
    return list(step_cases(model, parameters, dtype, seed))


def _checks(operator: Operator, names: Sequence[str], outcome: Outcome, bar: float) -> list[Check]:
    where, cases = f"{operator.nodes} nodes: {', '.join(names)}", len(names)
    checks = []
    if outcome.indices.compared:
        checks.append(index_check(f"{operator.name} indices", outcome.indices, where))
    if operator.name not in MOVING:
        checks.append(at_most(f"{operator.name} values", f"{cases} cases", outcome.value_error, bar, note=where))
    if operator.name != "KvcPrefillAttention":
        checks.append(at_most(f"{operator.name} caches", f"{cases} cases", outcome.copy_error, 0.0, note=where))
    return checks


def index_check(name: str, found: IndexComparison, where: str = "") -> Check:
    """The verdict on index lists: none may be wrong; near-ties are counted beside."""
    ties = f"{found.near_ties} near-ties" if found.near_ties else ""
    detail = "; ".join(filter(None, [*found.wrong[:1], ties]))
    return at_most(name, f"{found.compared} lists", len(found.wrong), 0, detail, where)


def _strict(case: PromptCase | StepCase, outcome: Outcome) -> Outcome:
    """Where equal columns score, a higher index in place of a lower one is a broken tie, not rounding."""
    found = outcome.indices
    if not case.ties or not found.upwards:
        return outcome
    broken = f"{case.name}: {found.upwards} lists take a higher index where scores tie exactly"
    return replace(outcome, indices=replace(found, wrong=(*found.wrong, broken)))


def _run_prefill_attention(operator: Operator, case: AttentionCase) -> Outcome:
    (output,) = operator.run(q=case.q, k=case.k, v=case.v)
    rows = zip(float32(case.q), float32(case.k), float32(case.v), strict=True)
    expected = torch.stack([causal_attention(*row) for row in rows])
    return Outcome(value_error=maximum_error(output, expected.numpy()))


def _run_compact(operator: Operator, case: PromptCase, parameters: PolicyParameters) -> Outcome:
    k_cache, v_cache, bounds, cache_lengths, indices = operator.run(
        q_window=case.q_window, k=case.k, v=case.v, prompt_lengths=case.prompt_lengths
    )
    rows, kernel = torch.from_numpy(case.prompt_lengths), parameters.pool_kernel
    expected = reference.compact(
        float32(case.q_window), float32(case.k), float32(case.v), rows,
        prompt_budget=parameters.prompt_budget, pool_kernel=kernel,
    )  # fmt: skip
    compared = compare_compaction(
        case.q_window,
        case.k,
        case.prompt_lengths,
        expected.indices.numpy(),
        indices,
        pool_kernel=kernel,
    )
    copied = [
        exact(cache_lengths, expected.lengths.numpy()),
        *(exact(cache, gathered(source, indices)) for cache, source in ((k_cache, case.k), (v_cache, case.v))),
    ]
    if parameters.decode_selection in PAGED:
        stored = np.clip(cache_lengths, 0, k_cache.shape[2])  # other lengths are an error already
        copied.append(exact(bounds, page_bounds(k_cache, stored, parameters.page_size)))
    return Outcome(compared, copy_error=max(copied))


def _run_hybrid(operator: Operator, case: StepCase, parameters: PolicyParameters) -> Outcome:
    keys, values, lengths = appended(case)
    bounds_before = page_bounds(case.k_cache, case.cache_lengths, parameters.page_size)
    output, k_cache, v_cache, bounds, selected = operator.run(
        query=case.query,
        k_new=case.k_new,
        v_new=case.v_new,
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        bounds=bounds_before,
        cache_lengths=case.cache_lengths,
    )
    compared, error = compare_step(case.query, keys, values, lengths, output, selected, parameters)
    copied = [
        exact(k_cache, keys),
        exact(v_cache, values),
        exact(bounds, page_bounds(keys, lengths, parameters.page_size)),
    ]
    return Outcome(compared, error, max(copied))


def compare_step(
    query: Array, keys: Array, values: Array, lengths: Array, output: Array, selected: Array,
    parameters: PolicyParameters, *, exact: bool = False,
) -> tuple[IndexComparison, float]:  # fmt: skip
    """One step that chooses, against the reference on the same inputs: keys, values, lengths hold the current token.

    Returns the comparison of what was read and the error of the output over what was read. `exact` takes the expected
    output in float64: real queries are larger than random ones, and float32's error grows with them on both sides.
    """
    if parameters.decode_selection != "hybrid":
        return compare_either(query, keys, values, lengths, output, selected, parameters)
    q, k, v, m = float32(query), float32(keys), float32(values), torch.from_numpy(lengths)
    low, high = reference.page_bounds(k, m, parameters.page_size)
    wanted, expected, *_ = policies.method(parameters).select(q, reference.LayerCache(k, v, m, low, high), parameters)
    assert expected is not None
    compared = compare_selection(
        query, keys, lengths, expected.numpy(), selected, page_size=parameters.page_size, top_r=parameters.top_r
    )
    if exact:
        q, k, v = q.double(), k.double(), v.double()
    if exact or compared.near_ties or compared.wrong:
        wanted = attend_selected(q, k, v, torch.from_numpy(np.ascontiguousarray(selected)))
    return compared, maximum_error(output, wanted.numpy())


def _run_dense(operator: Operator, case: StepCase, parameters: PolicyParameters) -> Outcome:
    keys, values, lengths = appended(case)
    output, k_cache, v_cache = operator.run(
        query=case.query,
        k_new=case.k_new,
        v_new=case.v_new,
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        cache_lengths=case.cache_lengths,
    )
    expected = reference.dense_attention(float32(case.query), float32(keys), float32(values), torch.from_numpy(lengths))
    copied = max(exact(k_cache, keys), exact(v_cache, values))
    return Outcome(value_error=maximum_error(output, expected.numpy()), copy_error=copied)


_STEP_RUNS = {"KvcHybridAttention": _run_hybrid, **STEP_RUNS}
_PROMPT_RUNS = {
    "KvcCompact": _run_compact,
    "KvcCompactRanked": run_compact_ranked,
    "KvcTrim": run_trim,
    **PROMPT_RUNS,
}
