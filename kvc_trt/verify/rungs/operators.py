"""Rung 1: every kvc operator of the engine against the normative reference, on inputs at the engine's own constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvc_trt.backends.harness import Array, EngineOperator, Harness
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.graph.state import CacheSite, cache_heads, cache_sites
from kvc_trt.methods.base.isolated_runs import (
    Choice,
    ExactList,
    Found,
    KeptOfPrompt,
    PromptCase,
    PromptRun,
    StepCase,
    TurnCase,
    float32,
)
from kvc_trt.methods.base.registry import prompt_runs, step_runs, turn_runs
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.attention.sliding_attention import OVER_PROMPT
from kvc_trt.operators.compaction.layer_budgets import LAYER_BUDGETS
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.experts import OF_EXPERTS
from kvc_trt.operators.softmax import SINK_LOGITS
from kvc_trt.reference.dense import causal_attention
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.codes.operators import run_store_tokens, with_stored_caches
from kvc_trt.verify.rankings.array_errors import exact, larger, maximum_error
from kvc_trt.verify.rankings.index_lists import IndexComparison, compare_exactly, compare_kept
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.rungs.inputs import AttentionCase, attention_cases, prompt_cases, step_cases
from kvc_trt.verify.rungs.parts.experts import check_experts
from kvc_trt.verify.rungs.parts.linear_layers import OF_LINEAR_LAYERS, check_linear
from kvc_trt.verify.rungs.parts.quantised import QUANTISED, check_quantised
from kvc_trt.verify.rungs.turn_operators import shared_runs, turn_cases
from kvc_trt.verify.thresholds import Thresholds

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters


Case: TypeAlias = "PromptCase | StepCase | TurnCase | AttentionCase"


NOTHING_COMPARED = IndexComparison()


@dataclass(frozen=True)
class Outcome:
    """The result of running one operator: judged index lists, and errors relative to the largest reference value."""

    indices: IndexComparison = NOTHING_COMPARED
    value_error: float = 0.0
    copy_error: float = 0.0
    """The error of values that are only moved (caches, bounds, lengths); only 0 is right."""
    computes: bool = False
    """True if the operator computes values with rounding, so that `value_error` has a meaning."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.indices + other.indices,
            larger(self.value_error, other.value_error),
            larger(self.copy_error, other.copy_error),
            self.computes or other.computes,
        )


def check_operators(
    engine: EngineDirectory,
    target: Harness,
    thresholds: Thresholds,
    *,
    seed: int = 0,
    options: RunOptions = DEFAULTS,
) -> tuple[list[Check], IndexComparison]:
    """Run each operator of the graphs alone; return the checks, and the counts of lists compared and admitted."""
    dtype = engine.model.dtype
    checks: list[Check] = []
    admitted = IndexComparison()
    sites = cache_sites(engine.model, engine.parameters)
    for operator in target.operators():
        if operator.name in QUANTISED:
            checks += check_quantised(operator, seed)
            continue
        if operator.name in OF_EXPERTS:
            clamped = engine.model.description.clamped_gate
            checks += check_experts(operator, dtype, thresholds.value_error, seed, clamped)
            continue
        if operator.name in OF_LINEAR_LAYERS:
            checks += check_linear(operator, engine.model, thresholds.value_error, seed)
            continue
        site = None if operator.cache is None else sites[operator.cache]
        parameters = engine.parameters if site is None else site.parameters
        model = engine.model if site is None else model_of(engine.model, site)
        over_prompt = operator.name in OVER_PROMPT
        window = parameters.capacity if over_prompt and parameters.slides else None
        cases: Sequence[Case] = (
            attention_cases(model, dtype, seed, options.prefill_precision, window)
            if over_prompt
            else _cases(model, parameters, operator, dtype, seed)
        )
        bar = thresholds.prompt_error if over_prompt else thresholds.value_error
        outcome = Outcome()
        for case in cases:
            if operator.name == LAYER_BUDGETS.name and isinstance(case, PromptCase):
                layers = engine.model.num_hidden_layers - engine.parameters.skip_layers
                outcome += _run_layer_budgets(operator, case, parameters, layers)
            else:
                outcome += run_case(operator, case, parameters, truncates=target.truncates)
        checks += _checks(operator, [case.name for case in cases], outcome, bar)
        admitted += outcome.indices
    return checks, admitted


def run_case(operator: EngineOperator, case: Case, parameters: PolicyParameters, *, truncates: bool = False) -> Outcome:
    """Run one operator on one case. `truncates` says that tensor cores have summed the products of scores."""
    if isinstance(case, AttentionCase):
        window = parameters.capacity if parameters.slides else None
        return _run_prefill_attention(operator, case, window)
    alone, case = with_stored_caches(operator, case, parameters.cache_format)
    if isinstance(case, TurnCase):
        found = {**shared_runs(), **turn_runs()}[operator.name](alone, case, parameters)
    elif isinstance(case, PromptCase):
        found = _prompt_runs()[operator.name](alone, case, parameters)
    else:
        found = step_runs()[operator.name](alone, case, parameters)
    return _strict(case, _judged(case, found, parameters, truncates))


def _prompt_runs() -> Mapping[str, PromptRun]:
    return {**prompt_runs(), STORE_TOKENS.name: run_store_tokens}


def model_of(model: ModelConfig, site: CacheSite) -> ModelConfig:
    """Return a model with only the heads that one cache serves."""
    kv_heads = cache_heads(model, site)
    served = model.num_key_value_heads if site.kv_heads is None else len(site.kv_heads)
    return replace(model, num_attention_heads=served * model.group_size, num_key_value_heads=kv_heads)


def _cases(
    model: ModelConfig, parameters: PolicyParameters, operator: EngineOperator, dtype: str, seed: int
) -> Sequence[Case]:
    if operator.name in (*_prompt_runs(), LAYER_BUDGETS.name):
        return list(prompt_cases(model, parameters, dtype, seed))
    if operator.name in (*shared_runs(), *turn_runs()):
        return list(turn_cases(model, parameters, dtype, seed))
    return list(step_cases(model, parameters, dtype, seed))


def _checks(operator: EngineOperator, names: Sequence[str], outcome: Outcome, bar: float) -> list[Check]:
    where, cases = f"{operator.nodes} nodes: {', '.join(names)}", len(names)
    checks = []
    if outcome.indices.compared:
        checks.append(index_check(f"{operator.name} indices", outcome.indices, where))
    if outcome.computes:
        checks.append(at_most(f"{operator.name} values", f"{cases} cases", outcome.value_error, bar, note=where))
    if operator.name not in OVER_PROMPT:
        checks.append(at_most(f"{operator.name} caches", f"{cases} cases", outcome.copy_error, 0.0, note=where))
    return checks


def index_check(name: str, found: IndexComparison, where: str = "") -> Check:
    """Return the check of index lists, of which none may be wrong; its detail has the number of near-ties."""
    ties = f"{found.near_ties} near-ties" if found.near_ties else ""
    detail = "; ".join(filter(None, [*found.wrong[:1], ties]))
    return at_most(name, f"{found.compared} lists", len(found.wrong), 0, detail, where)


def _strict(case: PromptCase | StepCase | TurnCase, outcome: Outcome) -> Outcome:
    """Return the outcome; for a case of exact ties, lists that prefer a higher index are counted as wrong.

    Equal columns have equal scores, so rounding cannot explain such a list.
    """
    found = outcome.indices
    if not case.ties or not found.upwards:
        return outcome
    broken = f"{case.name}: {found.upwards} lists take a higher index where scores tie exactly"
    return replace(outcome, indices=replace(found, wrong=(*found.wrong, broken)))


def _run_prefill_attention(operator: EngineOperator, case: AttentionCase, window: int | None) -> Outcome:
    sinks = {} if case.softmax.sinks is None else {SINK_LOGITS: case.softmax.sinks.numpy().astype(case.k.dtype)}
    (output,) = operator.run(q=case.q, k=case.k, v=case.v, **sinks)
    rows = zip(float32(case.q), float32(case.k), float32(case.v), strict=True)
    expected = torch.stack([causal_attention(*row, window=window, softmax=case.softmax) for row in rows])
    return Outcome(value_error=maximum_error(_as_rounded(output), expected.numpy()), computes=True)


def _as_rounded(output: Array) -> Array:
    """Return an output as bfloat16 if it was rounded to that type and widened again; otherwise unchanged."""
    rounded = output.astype(numpy_dtype("bfloat16"))
    return rounded if bool((rounded.astype(output.dtype) == output).all()) else output


def _run_layer_budgets(operator: EngineOperator, case: PromptCase, rule: PolicyParameters, layers: int) -> Outcome:
    """Run KvcLayerBudgets on random cosines, or on eighths, which repeat; the integers must equal the reference's."""
    division, lengths = rule.division, case.prompt_lengths
    assert division is not None
    shape, rng = (layers, len(lengths)), np.random.default_rng(len(case.name))
    table = rng.uniform(0.2, 1, shape) if case.name == "random" else rng.integers(1, 9, shape) / 8
    cosines = table.astype(np.float32)
    (budgets,) = operator.run(cosines=cosines, prompt_lengths=lengths)
    expected = [
        squeeze(
            column, division.budget, share=division.share, minimum=division.least, maximum=min(division.most, n)
        ).budgets
        for column, n in zip(cosines.T.tolist(), lengths.tolist(), strict=True)
    ]
    return Outcome(copy_error=exact(budgets, np.array(expected, np.int64).T))


def _judged(case: PromptCase | StepCase | TurnCase, found: Found, rule: PolicyParameters, truncates: bool) -> Outcome:
    """Compare an operator's results with the expected ones: lists by their proof, arrays by their largest error."""
    outcome = Outcome(computes=bool(found.computed))
    for choice in found.chosen:
        outcome += _judged_choice(case, choice, rule, truncates)
    for array, expected in found.moved:
        outcome += Outcome(copy_error=exact(array, expected))
    for array, expected in found.computed:
        outcome += Outcome(value_error=maximum_error(array, expected))
    return outcome


def _judged_choice(
    case: PromptCase | StepCase | TurnCase, choice: Choice, rule: PolicyParameters, truncates: bool
) -> Outcome:
    if isinstance(choice, KeptOfPrompt):
        lists = choice.expected, choice.indices
        return Outcome(compare_kept(choice.ranking, choice.prompts, *lists, truncates=truncates))
    if isinstance(choice, ExactList):
        return Outcome(compare_exactly(choice))
    assert isinstance(case, StepCase)
    compared, error = compare_step(case.query, choice, rule, truncates=truncates)
    return Outcome(compared, error, computes=True)
