"""Rung 1: every kvc operator of the engine against the normative reference, on inputs at the engine's own constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvc_trt.backends.harness import EngineOperator, Harness
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.graph.state import CacheSite, cache_heads, cache_sites
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.isolated_runs import CacheCase, Found, RunnableAlone
from kvc_trt.methods.base.registry import prompt_runs, step_runs, turn_runs
from kvc_trt.operators.attention.sliding_attention import OVER_PROMPT
from kvc_trt.operators.compaction.layer_budgets import LAYER_BUDGETS
from kvc_trt.operators.compaction.store_tokens import STORE_TOKENS
from kvc_trt.operators.experts import OF_EXPERTS
from kvc_trt.verify.checks import Check, at_most
from kvc_trt.verify.codes.operators import run_store_tokens, with_stored_caches
from kvc_trt.verify.rankings.array_errors import exact, larger, maximum_error
from kvc_trt.verify.rankings.index_lists import IndexComparison, compare_exactly, compare_kept
from kvc_trt.verify.rankings.steps import compare_step
from kvc_trt.verify.rungs.inputs import prompt_cases, step_cases
from kvc_trt.verify.rungs.parts.experts import check_experts
from kvc_trt.verify.rungs.parts.layer_budgets import check_layer_budgets
from kvc_trt.verify.rungs.parts.linear_layers import OF_LINEAR_LAYERS, check_linear
from kvc_trt.verify.rungs.parts.prefill_attention import attention_cases, check_prefill_attention
from kvc_trt.verify.rungs.parts.quantised import QUANTISED, check_quantised
from kvc_trt.verify.rungs.turn_operators import shared_runs, turn_cases
from kvc_trt.verify.thresholds import Thresholds

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.models.config import ModelConfig
    from kvc_trt.policies import PolicyParameters


OperatorCheck: TypeAlias = "Callable[[EngineOperator, ModelConfig, PolicyParameters], list[Check]]"
"""Checks an operator alone, given the heads that its cache serves and the cache's parameters."""

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


class IsolatedRuns(NamedTuple):
    """How a group of operators runs alone: the run of each by its name, and the cases that all of them run on."""

    runs: Mapping[str, Callable[[RunnableAlone, Any, Constants], Found]]
    cases: Callable[[ModelConfig, PolicyParameters, str, int], Iterable[CacheCase]]


def isolated_runs() -> tuple[IsolatedRuns, ...]:
    """Return the groups of operators on caches: those of prompts, of turns, and of steps."""
    return (
        IsolatedRuns({**prompt_runs(), STORE_TOKENS.name: run_store_tokens}, prompt_cases),
        IsolatedRuns({**shared_runs(), **turn_runs()}, turn_cases),
        IsolatedRuns(step_runs(), step_cases),
    )


def group_of(operator: EngineOperator) -> IsolatedRuns:
    """Return the group that an operator on a cache belongs to."""
    return next(group for group in isolated_runs() if operator.name in group.runs)


def check_operators(
    engine: EngineDirectory,
    target: Harness,
    thresholds: Thresholds,
    *,
    seed: int = 0,
    options: RunOptions = DEFAULTS,
) -> tuple[list[Check], IndexComparison]:
    """Run each operator of the graphs alone; return the checks, and the counts of lists compared and admitted."""
    checks: list[Check] = []
    admitted = IndexComparison()
    others = _cacheless_checks(engine, thresholds, seed, options)
    sites = cache_sites(engine.model, engine.parameters)
    for operator in target.operators():
        site = None if operator.cache is None else sites[operator.cache]
        parameters = engine.parameters if site is None else site.parameters
        model = engine.model if site is None else model_of(engine.model, site)
        if operator.name in others:
            checks += others[operator.name](operator, model, parameters)
            continue
        cases = list(group_of(operator).cases(model, parameters, engine.model.dtype, seed))
        outcome = Outcome()
        for case in cases:
            outcome += run_case(operator, case, parameters, truncates=target.truncates)
        checks += _checks(operator, [case.name for case in cases], outcome, thresholds.value_error)
        admitted += outcome.indices
    return checks, admitted


def _cacheless_checks(
    engine: EngineDirectory, thresholds: Thresholds, seed: int, options: RunOptions
) -> Mapping[str, OperatorCheck]:
    """Return, by name, the checks of the operators that neither write nor read a cache."""
    config, dtype, bar = engine.model, engine.model.dtype, thresholds.value_error

    def attention(operator: EngineOperator, model: ModelConfig, rule: PolicyParameters) -> list[Check]:
        window = rule.capacity if rule.slides else None
        cases = attention_cases(model, dtype, seed, options.prefill_precision, window)
        return check_prefill_attention(operator, cases, window, thresholds.prompt_error)

    def budgets(operator: EngineOperator, model: ModelConfig, rule: PolicyParameters) -> list[Check]:
        layers = config.num_hidden_layers - engine.parameters.skip_layers
        return check_layer_budgets(operator, list(prompt_cases(model, rule, dtype, seed)), rule, layers)

    return {
        **dict.fromkeys(QUANTISED, lambda operator, model, rule: check_quantised(operator, seed)),
        **dict.fromkeys(
            OF_EXPERTS,
            lambda operator, model, rule: check_experts(operator, dtype, bar, seed, config.description.clamped_gate),
        ),
        **dict.fromkeys(OF_LINEAR_LAYERS, lambda operator, model, rule: check_linear(operator, config, bar, seed)),
        **dict.fromkeys(OVER_PROMPT, attention),
        LAYER_BUDGETS.name: budgets,
    }


def run_case(
    operator: EngineOperator, case: CacheCase, parameters: PolicyParameters, *, truncates: bool = False
) -> Outcome:
    """Run one operator on one case. `truncates` says that tensor cores have summed the products of scores."""
    alone, case = with_stored_caches(operator, case, parameters.cache_format)
    run = group_of(operator).runs[operator.name]
    return _strict(case, _judged(run(alone, case, parameters), parameters, truncates))


def model_of(model: ModelConfig, site: CacheSite) -> ModelConfig:
    """Return a model with only the heads that one cache serves."""
    kv_heads = cache_heads(model, site)
    served = model.num_key_value_heads if site.kv_heads is None else len(site.kv_heads)
    return replace(model, num_attention_heads=served * model.group_size, num_key_value_heads=kv_heads)


def _checks(operator: EngineOperator, names: Sequence[str], outcome: Outcome, bar: float) -> list[Check]:
    where, cases = f"{operator.nodes} nodes: {', '.join(names)}", len(names)
    checks = []
    if outcome.indices.compared:
        checks.append(index_check(f"{operator.name} indices", outcome.indices, where))
    if outcome.computes:
        checks.append(at_most(f"{operator.name} values", f"{cases} cases", outcome.value_error, bar, note=where))
    checks.append(at_most(f"{operator.name} caches", f"{cases} cases", outcome.copy_error, 0.0, note=where))
    return checks


def index_check(name: str, found: IndexComparison, where: str = "") -> Check:
    """Return the check of index lists, of which none may be wrong; its detail has the number of near-ties."""
    ties = f"{found.near_ties} near-ties" if found.near_ties else ""
    detail = "; ".join(filter(None, [*found.wrong[:1], ties]))
    return at_most(name, f"{found.compared} lists", len(found.wrong), 0, detail, where)


def _strict(case: CacheCase, outcome: Outcome) -> Outcome:
    """Return the outcome; for a case of exact ties, lists that prefer a higher index are counted as wrong.

    Equal columns have equal scores, so rounding cannot explain such a list.
    """
    found = outcome.indices
    if not case.ties or not found.upwards:
        return outcome
    broken = f"{case.name}: {found.upwards} lists take a higher index where scores tie exactly"
    return replace(outcome, indices=replace(found, wrong=(*found.wrong, broken)))


def _judged(found: Found, rule: PolicyParameters, truncates: bool) -> Outcome:
    """Compare an operator's results with the expected ones: lists by their proof, arrays by their largest error."""
    outcome = Outcome(computes=bool(found.computed))
    for one in found.lists:
        outcome += Outcome(compare_exactly(one))
    for kept in found.kept:
        lists = kept.expected, kept.indices
        outcome += Outcome(compare_kept(kept.ranking, kept.prompts, *lists, truncates=truncates))
    for read in found.read:
        outcome += Outcome(*compare_step(read, rule, truncates=truncates), computes=True)
    for array, expected in found.moved:
        outcome += Outcome(copy_error=exact(array, expected))
    for array, expected in found.computed:
        outcome += Outcome(value_error=maximum_error(array, expected))
    return outcome
