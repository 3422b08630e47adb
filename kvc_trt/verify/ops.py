"""Rung 1: every kvc operator of the engine against the normative reference, on inputs at the engine's own constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from kvc_trt import policies, reference
from kvc_trt.graph.state import LOWEST
from kvc_trt.reference.dense import causal_attention
from kvc_trt.verify.attention import attend_selected
from kvc_trt.verify.inputs import AttentionCase, PromptCase, StepCase, attention_cases, prompt_cases, step_cases
from kvc_trt.verify.near_ties import IndexComparison, compare_compaction, compare_selection
from kvc_trt.verify.report import Check, at_most
from kvc_trt.verify.rounding import differences
from kvc_trt.verify.target import Array, Operator, Target
from kvc_trt.verify.thresholds import Thresholds

if TYPE_CHECKING:
    from kvc_trt.engine import Engine
    from kvc_trt.policies import PolicyParameters


Case: TypeAlias = "PromptCase | StepCase | AttentionCase"

NOTHING_COMPARED = IndexComparison()


@dataclass(frozen=True)
class Outcome:
    """What one operator did: index lists judged, and errors relative to the largest reference value."""

    indices: IndexComparison = NOTHING_COMPARED
    value_error: float = 0.0
    copy_error: float = 0.0
    """Error of what is merely moved (caches, bounds, lengths); nothing but 0 is right."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.indices + other.indices,
            larger(self.value_error, other.value_error),
            larger(self.copy_error, other.copy_error),
        )


def check_operators(
    engine: Engine, target: Target, thresholds: Thresholds, *, seed: int = 0
) -> tuple[list[Check], IndexComparison]:
    """Run each operator of both graphs alone; returns the checks and what was compared and admitted."""
    dtype = engine.state[0].dtype
    checks: list[Check] = []
    admitted = IndexComparison()
    for operator in target.operators():
        cases = _cases(engine, operator, dtype, seed)
        outcome = Outcome()
        for case in cases:
            outcome += run_case(operator, case, engine.parameters)
        checks += _checks(operator, [case.name for case in cases], outcome, thresholds.value_error)
        admitted += outcome.indices
    return checks, admitted


def run_case(operator: Operator, case: Case, parameters: PolicyParameters) -> Outcome:
    """One operator on one case."""
    if isinstance(case, AttentionCase):
        return _run_prefill_attention(operator, case)
    if isinstance(case, PromptCase):
        return _strict(case, _run_compact(operator, case, parameters))
    run = _run_hybrid if operator.name == "KvcHybridAttention" else _run_dense
    return _strict(case, run(operator, case, parameters))


def _cases(engine: Engine, operator: Operator, dtype: str, seed: int) -> Sequence[Case]:
    if operator.name == "KvcPrefillAttention":
        return list(attention_cases(engine.model, dtype, seed))
    if operator.name == "KvcCompact":
        return list(prompt_cases(engine.model, engine.parameters, dtype, seed))
    return list(step_cases(engine.model, engine.parameters, dtype, seed))


def _checks(operator: Operator, names: Sequence[str], outcome: Outcome, bar: float) -> list[Check]:
    where, cases = f"{operator.nodes} nodes: {', '.join(names)}", len(names)
    checks = []
    if outcome.indices.compared:
        checks.append(index_check(f"{operator.name} indices", outcome.indices, where))
    if operator.name != "KvcCompact":
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
    rows = zip(_float32(case.q), _float32(case.k), _float32(case.v), strict=True)
    expected = torch.stack([causal_attention(*row) for row in rows])
    return Outcome(value_error=maximum_error(output, expected.numpy()))


def _run_compact(operator: Operator, case: PromptCase, parameters: PolicyParameters) -> Outcome:
    k_cache, v_cache, bounds, cache_lengths, indices = operator.run(
        q_window=case.q_window, k=case.k, v=case.v, prompt_lengths=case.prompt_lengths
    )
    expected = policies.method(parameters).compact(
        _float32(case.q_window), _float32(case.k), _float32(case.v), torch.from_numpy(case.prompt_lengths), parameters
    )
    compared = compare_compaction(
        case.q_window,
        case.k,
        case.prompt_lengths,
        expected.indices.numpy(),
        indices,
        pool_kernel=parameters.pool_kernel,
    )
    copied = [
        _exact(cache_lengths, expected.lengths.numpy()),
        *(_exact(cache, _gathered(source, indices)) for cache, source in ((k_cache, case.k), (v_cache, case.v))),
    ]
    if parameters.decode_selection == "hybrid":
        stored = np.clip(cache_lengths, 0, k_cache.shape[2])  # other lengths are an error already
        copied.append(_exact(bounds, page_bounds(k_cache, stored, parameters.page_size)))
    return Outcome(compared, copy_error=max(copied))


def _run_hybrid(operator: Operator, case: StepCase, parameters: PolicyParameters) -> Outcome:
    keys, values, lengths = _appended(case)
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
        _exact(k_cache, keys),
        _exact(v_cache, values),
        _exact(bounds, page_bounds(keys, lengths, parameters.page_size)),
    ]
    return Outcome(compared, error, max(copied))


def compare_step(
    query: Array, keys: Array, values: Array, lengths: Array, output: Array, selected: Array,
    parameters: PolicyParameters, *, exact: bool = False,
) -> tuple[IndexComparison, float]:  # fmt: skip
    """One hybrid step against the reference on the same inputs: keys, values, lengths hold the current token.

    Returns the comparison of what was read and the error of the output over what was read. `exact` takes the expected
    output in float64: real queries are larger than random ones, and float32's error grows with them on both sides.
    """
    q, k, v, m = _float32(query), _float32(keys), _float32(values), torch.from_numpy(lengths)
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
    keys, values, lengths = _appended(case)
    output, k_cache, v_cache = operator.run(
        query=case.query,
        k_new=case.k_new,
        v_new=case.v_new,
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        cache_lengths=case.cache_lengths,
    )
    expected = reference.dense_attention(
        _float32(case.query), _float32(keys), _float32(values), torch.from_numpy(lengths)
    )
    copied = max(_exact(k_cache, keys), _exact(v_cache, values))
    return Outcome(value_error=maximum_error(output, expected.numpy()), copy_error=copied)


def _appended(case: StepCase) -> tuple[Array, Array, Array]:
    keys, values = case.k_cache.copy(), case.v_cache.copy()
    rows = np.arange(len(case.cache_lengths))
    keys[rows, :, case.cache_lengths], values[rows, :, case.cache_lengths] = case.k_new, case.v_new
    return keys, values, case.cache_lengths + 1


def page_bounds(keys: Array, lengths: Array, page_size: int) -> Array:
    """Bounds as executors keep them, [B,G,2D,P]: maxima of K and of -K, the lowest finite value on empty pages."""
    low, high = reference.page_bounds(_float32(keys), torch.from_numpy(np.ascontiguousarray(lengths)), page_size)
    both = torch.cat([high, -low], dim=-1).transpose(2, 3).numpy()
    lowest = LOWEST[str(keys.dtype)]
    return np.where(np.isfinite(both), both, lowest).astype(keys.dtype)


def _gathered(source: Array, indices: Array) -> Array:
    """Rows of `source` [B,G,S,D] at `indices` [B,G,C], zeros where an index is -1."""
    picked = np.take_along_axis(source, np.clip(indices, 0, source.shape[2] - 1)[..., None].astype(np.int64), axis=2)
    return np.where(indices[..., None] >= 0, picked, 0).astype(source.dtype)


def maximum_error(found: Array, expected: Array) -> float:
    """Largest difference over the largest expected magnitude (at least 1); NaN if anything is NaN.

    Differences are what they were before a bfloat16 output was rounded.
    """
    if not expected.size:
        return 0.0
    scale = max(1.0, float(np.abs(expected).max()))
    return float(differences(found, expected).max() / scale)


def _exact(found: Array, expected: Array) -> float:
    """Largest difference; infinite where shapes differ or anything is NaN, which no maximum may hide."""
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    worst = float(difference.max()) if difference.size else 0.0
    return float("inf") if np.isnan(worst) else worst


def _float32(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def larger(one: float, other: float) -> float:
    """The maximum, NaN winning on either side: a NaN must not hide."""
    return float(np.maximum(one, other))
