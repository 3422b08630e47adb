"""SnapKV++: RocketKV's first stage alone (arXiv 2502.14051, section 3.2).

After prefill, each KV head keeps the `prompt_budget` prompt tokens that the last `window` queries attend to most: votes
are summed over the query heads of its group and spread to neighbours by pooling. Generated tokens are never
evicted. A step attends densely to everything kept.

A turn of a conversation attends exactly to everything stored. If stored and new tokens together are more than the
prompt budget, they compete under the same rule: the last min(window, turn) queries of the turn vote and their tokens
stay, votes spread over slots, generated tokens of earlier answers compete like all others.

Deviations: the prompt budget is the one RocketKV would use for the same token budget, so a step reads the whole
compressed cache, which is more than the token budget. Scores are float32 (released: float16), and the softmax includes
the causal window (the paper's text is ambiguous, the released code includes it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.errors import InputError
from kvc_trt.methods.base.constants import Constants, PoolKind
from kvc_trt.methods.base.graph_context import CacheLayer, PromptLayer
from kvc_trt.methods.base.inputs import BY_LENGTH, DEFAULT_WINDOW, EVERY_POLICY, EVICTION, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import (
    Array,
    Found,
    KeptOfPrompt,
    PromptCase,
    PromptRun,
    RunnableAlone,
    TurnCase,
    TurnRun,
    float32,
)
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction, stored_bounds
from kvc_trt.methods.base.rocketkv_budget import (
    LONG,
    SHORT,
    auto_pool_kernel,
    budgets_by_length,
    cache_capacity,
    long_prompt,
)
from kvc_trt.methods.base.scored_eviction import ScoredEviction, checked_prompt_budget
from kvc_trt.methods.full import DENSE
from kvc_trt.methods.rankings.exact_softmax import capped, sink_logits
from kvc_trt.methods.rankings.ranking import ChosenList, PromptRanking, Prompts
from kvc_trt.methods.rankings.rounding import Float64, Magnitude, lost_to_underflow, outside_tolerance
from kvc_trt.operators.compaction.compact import COMPACT, COMPACT_AVERAGE, COMPACT_AVERAGE_TURN, COMPACT_TURN
from kvc_trt.operators.compaction.ranked import COMPACT_AVERAGE_RANKED, COMPACT_RANKED, TRIM
from kvc_trt.operators.schema import Operator
from kvc_trt.reference.softmax import PLAIN, Softmax

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.operators.emitter import Value
    from kvc_trt.reference import Compacted, Turn
    from kvc_trt.reference.model.rules import PromptQueries


@dataclass(frozen=True)
class WindowScores(Magnitude):
    """Exact votes for the tokens before the window: each one's own `summed` [n-W], and `pooled` [n-W] over neighbours.

    `magnitude` is M of the tolerance 2^-20 (1+M), `underflow` is the most that a score may lose below float32's normal
    range, in any executor."""

    summed: Float64
    pooled: Float64
    magnitude: float
    products: int
    underflow: float


@dataclass(frozen=True)
class ByWindow(PromptRanking):
    """Prompt tokens ranked by the last queries' attention to them, spread by pooling."""

    pool_kernel: int
    short_pool_kernel: int = 0
    """The kernel of texts shorter than `long_prompt` tokens."""
    long_prompt: int = 0
    pool_kind: PoolKind = "max"
    proves_equal_inputs = True
    ranks_turns_alike = True

    @override
    def explain(self, inputs: Prompts, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list within `slack` times the tolerance."""
        return self._judge(inputs, chosen, truncates=False, slack=slack)

    @override
    def explain_on_equal_inputs(self, inputs: Prompts, chosen: ChosenList, *, truncates: bool) -> str | None:
        """Judge the list within the tolerance itself."""
        return self._judge(inputs, chosen, truncates=truncates)

    def _judge(self, prompts: Prompts, chosen: ChosenList, *, truncates: bool, slack: float = 1.0) -> str | None:
        extra, missing = chosen.extra, chosen.missing
        (queries,) = prompts.observed_by(chosen)
        kernel = self.short_pool_kernel if prompts.tokens_of(chosen) < self.long_prompt else self.pool_kernel
        softmax = prompts.softmax_of(chosen)
        scores = window_scores(queries, prompts.keys_of(chosen), kernel, self.pool_kind, softmax)
        if max(extra.max(), missing.max()) >= scores.pooled.size:
            return f"the window must be kept, {missing.max()} is not"
        tolerance = scores.allowed(truncates=truncates, slack=slack)
        lost = 2 * scores.underflow  # by the executor that kept these tokens, and by the reference
        if self.pool_kind == "avg":  # each of two sums of positive votes rounds `kernel` times
            tolerance, lost = tolerance + kernel * 2.0**-23, kernel * lost
        problem = outside_tolerance(scores.pooled[extra], scores.pooled[missing], tolerance, lost)
        if problem is not None:
            return chosen.instead("kept", problem)
        if self.pool_kind == "avg":
            return None
        contenders = {int(j): _contenders(scores, int(j), tolerance, kernel) for j in (*extra, *missing)}
        for kept in extra:
            for dropped in missing:
                # Under any rounding, the dropped one scores at least as high and comes first.
                if dropped < kept and contenders[int(kept)] <= contenders[int(dropped)]:
                    return f"kept {kept} instead of {dropped}: an exact tie, and the lower index wins"
        return None


def _contenders(scores: WindowScores, position: int, tolerance: float, kernel: int) -> set[int]:
    """Return positions under the pooling window of `position` that float32 may have found to be its maximum.

    Where underflow may have lost the maximum, that is any of them.
    """
    half = kernel // 2
    first, last = max(0, position - half), position + half + 1
    near = scores.summed[first:last] >= scores.pooled[position] * (1 - tolerance) - scores.underflow
    return {first + int(j) for j in np.flatnonzero(near)}


def window_scores(
    q_window: Float64, keys: Float64, pool_kernel: int, pool_kind: PoolKind = "max", softmax: Softmax = PLAIN
) -> WindowScores:
    """Score the prompt of one KV head exactly (RocketKV, stage 1).

    q_window [g, W, D]: the last W queries of the group; keys [n, D]: the row's prompt, padding removed.
    Queries before position 0 (a prompt shorter than the window) are dropped. Neither a cap of logits nor sinks [g] move
    a logit or a sum of weights by more than the products move.
    """
    n, head_size = keys.shape
    window = min(q_window.shape[1], n)
    queries = q_window[:, q_window.shape[1] - window :]

    logits = capped(queries @ keys.T / np.sqrt(head_size), softmax)
    future = np.arange(n) > (n - window + np.arange(window))[:, None]
    masked, sinks = np.where(future, -np.inf, logits), sink_logits(softmax)
    highest = np.maximum(masked.max(-1), sinks[:, None])[:, :, None]
    weights = np.exp(masked - highest)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
    summed = weights[:, :, : n - window].sum(axis=(0, 1))

    magnitude = float((np.abs(queries) @ np.abs(keys).T).max() / np.sqrt(head_size))
    underflow = lost_to_underflow(weights.shape[0] * window)
    return WindowScores(summed, _pooled(summed, pool_kernel, pool_kind), magnitude, head_size, underflow)


def _pooled(values: Float64, kernel: int, kind: PoolKind) -> Float64:
    """Give each position the maximum or the sum within the kernel around it: [n] -> [n]."""
    if not values.size:
        return values
    padded = np.pad(values, kernel // 2, constant_values=-np.inf if kind == "max" else 0)
    around = np.lib.stride_tricks.sliding_window_view(padded, kernel)
    pooled: Float64 = around.max(-1) if kind == "max" else around.sum(-1)
    return pooled


class ObservedAttention(ScoredEviction):
    """Keep the tokens that the last queries attend to most, one list per KV head."""

    name = "snapkv++"
    any_softmax = True
    operators = (COMPACT,)
    operator_of_turn = COMPACT_TURN
    turn = "Stored and new tokens compete for the prompt budget: the last queries of the turn vote, as after a prompt."
    trims = True

    @override
    def operators_of(self, rule: Constants) -> tuple[Operator, ...]:
        return self.operators if rule.pool_kind == "max" else (COMPACT_AVERAGE,)

    @override
    def turns_operator(self, rule: Constants) -> Operator:
        return COMPACT_TURN if rule.pool_kind == "max" else COMPACT_AVERAGE_TURN

    @override
    def observe(self, queries: PromptQueries, prompt_lengths: Tensor, rule: Constants) -> Any:
        return queries.observed

    @override
    def compact(
        self, observed: Any, keys: Tensor, values: Tensor, prompt_lengths: Tensor, rule: Constants
    ) -> Compacted:
        numbers = _numbers(rule, prompt_lengths, rule.kept_of)
        if isinstance(observed, reference.Observed):
            observed, numbers["softmax"] = observed
        return reference.compact(observed, keys, values, prompt_lengths, **numbers)

    @override
    def store(self, prompt: PromptLayer, *, bounds: bool) -> None:
        """Write KvcCompact; if budgets are set per prompt, keep the most that a layer may get, with ranks for
        `trim`."""
        if prompt.rule.squeeze_share is None:
            prompt.compact(self.operators_of(prompt.rule)[0], bounds=bounds)
        else:
            ranked = COMPACT_RANKED if prompt.rule.pool_kind == "max" else COMPACT_AVERAGE_RANKED
            prompt.compact(ranked, prompt_budget=prompt.rule.most_kept)

    @override
    def compact_turn(self, turn: Turn, rule: Constants) -> Compacted:
        return reference.compact_turn(
            turn.queries[:, :, -rule.window :], turn.keys, turn.values, turn.lengths, turn.new_lengths,
            **_numbers(rule, turn.positions, rule.kept_after), softmax=turn.softmax,
        )  # fmt: skip

    @override
    def turn_runs(self) -> Mapping[str, TurnRun]:
        return {COMPACT_TURN.name: _run_turn, COMPACT_AVERAGE_TURN.name: _run_turn}

    @override
    def trim(self, cache: CacheLayer, budgets: Value, lengths: Value, *, bounds: bool) -> None:
        kept = {tensor.name: f"{tensor.name}.{cache.name}" for tensor in COMPACT_RANKED.outputs}
        inputs = {**kept, "budgets": budgets, "prompt_lengths": lengths}
        cache.call(TRIM, inputs, cache.stored(TRIM, bounds=bounds))

    @override
    def describe(self, rule: Constants) -> str:
        kernels = str(rule.pool_kernel)
        if rule.short_pool_kernel:
            kernels = f"{rule.short_pool_kernel}, from {rule.long_prompt:,} tokens {rule.pool_kernel}"
        kind = ", averages" if rule.pool_kind == "avg" else ""
        return f"window {rule.window}, pool kernel {kernels}{kind}"

    @override
    def ranking(self, rule: Constants) -> ByWindow:
        """Return the ranking by the window's pooled attention."""
        return ByWindow(rule.pool_kernel, rule.short_pool_kernel, rule.long_prompt, rule.pool_kind)

    @override
    def runs(self) -> Mapping[str, PromptRun]:
        """Return the isolated runs: compaction to a budget, and its two halves for a budget known later."""
        alone: list[tuple[PromptRun, Operator]] = [
            (_run_compact, COMPACT), (_run_compact, COMPACT_AVERAGE), (_run_ranked, COMPACT_RANKED),
            (_run_ranked, COMPACT_AVERAGE_RANKED), (_run_trim, TRIM),
        ]  # fmt: skip
        return {operator.name: run for run, operator in alone}


def _numbers(rule: Constants, tokens: Tensor, kept: Callable[[int], int]) -> dict[str, Any]:
    """Return budget and pool kernel of the reference's rows: the rule's, or those of texts of `tokens` [B]."""
    kind = {"pool_kind": rule.pool_kind}
    if not rule.by_length:
        return {"prompt_budget": rule.prompt_budget, "pool_kernel": rule.pool_kernel, **kind}
    budgets = tokens.new_tensor([kept(count) for count in tokens.tolist()])
    kernels = tokens.new_tensor([rule.pool_kernel_of(count) for count in tokens.tolist()])
    return {"prompt_budget": budgets, "pool_kernel": kernels, **kind}


def _run_compact(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    budgets = np.array([rule.kept_of(count) for count in case.prompt_lengths.tolist()])
    k_cache, v_cache, bounds, cache_lengths, indices = operator.run(**case.inputs(), **_own(rule, case, budgets))
    stored = np.clip(cache_lengths, 0, k_cache.shape[2])  # other lengths are an error already
    return Found(
        kept=(_kept(case, rule, budgets, indices),),
        moved=(
            (cache_lengths, np.minimum(case.prompt_lengths, budgets)),
            *zip((k_cache, v_cache), case.kept(indices), strict=True),
            *stored_bounds(rule, bounds, k_cache, stored),
        ),
    )


def _run_turn(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    """Run KvcCompactTurn: each row must keep the same of stored and new tokens as KvcCompact does by the row's own
    window."""
    both = case.joined(rule.window)
    votes = np.minimum(case.lengths, both.q_window.shape[2])
    budgets = np.array([rule.kept_after(count) for count in both.prompt_lengths.tolist()])
    inputs = {**both.inputs(), "window_lengths": votes, **_own(rule, both, budgets)}
    k_cache, v_cache, bounds, cache_lengths, indices = operator.run(**inputs)
    kept = []
    for row, count in enumerate(votes):
        alone = both.row(row)
        alone = replace(alone, q_window=alone.q_window[:, :, alone.q_window.shape[2] - count :])
        kept.append(_kept(alone, rule, budgets[row : row + 1], indices[row : row + 1]))
    moved = (
        (cache_lengths, np.minimum(both.prompt_lengths, budgets)),
        *zip((k_cache, v_cache), both.kept(indices), strict=True),
        *stored_bounds(rule, bounds, k_cache, np.clip(cache_lengths, 0, k_cache.shape[2])),
    )
    return Found(kept=tuple(kept), moved=moved)


def _own(rule: Constants, case: PromptCase, budgets: Array) -> dict[str, Array]:
    """Return the operator's inputs by length: budgets and pool kernels of rows [B]."""
    if not rule.by_length:
        return {}
    kernels = [rule.pool_kernel_of(count) for count in case.prompt_lengths.tolist()]
    return {"prompt_budgets": budgets.astype(np.int64), "pool_kernels": np.array(kernels, np.int64)}


def _kept(case: PromptCase, rule: Constants, budget: int | Array, indices: Array) -> KeptOfPrompt:
    """Pair positions kept to a budget, or to those of the rows [B], with those that the reference keeps."""
    import torch

    inputs = float32(case.q_window), float32(case.k), float32(case.v), torch.from_numpy(case.prompt_lengths)
    budgets = budget if isinstance(budget, int) else torch.from_numpy(budget)
    kernels = torch.tensor([rule.pool_kernel_of(count) for count in case.prompt_lengths.tolist()])
    numbers: dict[str, Any] = {
        "prompt_budget": budgets, "pool_kernel": kernels, "pool_kind": rule.pool_kind, "softmax": case.softmax
    }  # fmt: skip
    expected = reference.compact(*inputs, **numbers).indices.numpy()
    prompts = Prompts((case.q_window,), case.k, case.v, case.prompt_lengths, softmax=case.softmax)
    return KeptOfPrompt(prompts, expected, indices, OBSERVED_ATTENTION.ranking(rule))


def _run_ranked(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    """Run KvcCompactRanked: the lowest ranks must be the tokens that `reference.compact` keeps at any smaller
    budget."""
    k_kept, v_kept, kept, ranks = operator.run(**case.inputs())
    each_once = np.sort(ranks, axis=-1), np.broadcast_to(np.arange(ranks.shape[2]), ranks.shape)
    found = Found(moved=(*zip((k_kept, v_kept), case.kept(kept), strict=True), each_once))
    past = np.iinfo(np.int32).max
    for budget in sorted({rule.window, rule.prompt_budget, rule.most_kept}):
        chosen = np.where(ranks < np.minimum(budget, case.prompt_lengths)[:, None, None], kept, past)
        lists = np.sort(chosen, axis=-1)[:, :, : min(budget, kept.shape[2])]
        found += Found(kept=(_kept(case, rule, budget, np.where(lists == past, -1, lists).astype(np.int32)),))
    return found


def _run_trim(operator: RunnableAlone, case: PromptCase, rule: Constants) -> Found:
    """Run KvcTrim, each row to another budget, on the reference's kept tokens and ranks."""
    kept, ranks = _ranked(case, rule)
    budgets = np.linspace(rule.window, rule.most_kept, len(case.prompt_lengths)).astype(np.int64)
    rows = {**dict(zip(("k_kept", "v_kept"), case.kept(kept), strict=True)), "kept": kept, "ranks": ranks}
    result = operator.run(**rows, budgets=budgets, prompt_lengths=case.prompt_lengths)
    k_cache, v_cache, bounds, lengths, indices = result
    chosen = tuple(
        _kept(case.row(row), rule, int(budget), indices[row : row + 1, :, :budget])
        for row, budget in enumerate(budgets)
    )
    moved = (
        (lengths, np.minimum(budgets, case.prompt_lengths)),
        *zip((k_cache, v_cache), case.kept(indices), strict=True),
        *stored_bounds(rule, bounds, k_cache, lengths),
    )
    return Found(kept=chosen, moved=moved)


def _ranked(case: PromptCase, rule: Constants) -> tuple[Array, Array]:
    """Return kept positions, ascending, and their ranks, INT64 [B,G,n]: window first, then by score, then padding."""
    import torch

    from kvc_trt.reference.compaction import scores
    from kvc_trt.reference.selection import best

    q, k, n = float32(case.q_window), float32(case.k), torch.from_numpy(case.prompt_lengths)
    pooling: dict[str, Any] = {"pool_kernel": rule.pool_kernel, "pool_kind": rule.pool_kind}
    values = scores(q, k, n, **pooling, softmax=case.softmax).values
    positions = torch.arange(k.shape[2])
    window = (positions >= n[:, None, None] - rule.window) & (positions < n[:, None, None])
    values = torch.where(window, torch.inf, values)
    values = torch.where(positions >= n[:, None, None], torch.nan, values)
    kept, ranks = best(values, min(rule.most_kept, k.shape[2])).sort(dim=-1)
    return kept.numpy(), ranks.numpy()


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive RocketKV's prompt budget with dense decoding."""
    numbers = first_stage(inputs)
    capacity = numbers["prompt_budget"] + inputs.max_output_len
    return constants(inputs, OBSERVED_ATTENTION, DENSE, capacity=capacity, **numbers)


def first_stage(inputs: PolicyInputs) -> dict[str, Any]:
    """Return the numbers of RocketKV's first stage: for every prompt alike, or for each by its own length.

    By length is the default, unless a prompt budget or layer budgets are given; InputError for it with these.
    """
    model, longest, new = inputs.model, inputs.max_input_len, inputs.max_output_len
    window = inputs.value("window", DEFAULT_WINDOW)
    kernel = inputs.value("pool_kernel", auto_pool_kernel(model, longest))
    alike = [name for name in ("prompt_budget", "layer_budget") if inputs.choice(name, "uniform") != "uniform"]
    if not inputs.choice("by_length", not alike):
        capacity = cache_capacity(inputs.sequence, inputs.budget, new, inputs.split)
        return {
            "prompt_budget": budget_with_window(inputs, capacity - new), "window": window, "pool_kernel": kernel
        }  # fmt: skip
    if alike:
        raise InputError(
            f"by_length derives the prompt budget from each prompt's length, {alike[0]} sets it for all",
            hint=f"give one of by_length and {alike[0]}",
        )
    budget_with_window(inputs, cache_capacity(longest + new, inputs.budget, new, inputs.split) - new)
    threshold = long_prompt(model)
    two_kernels = kernel == LONG and "pool_kernel" not in inputs.overrides and threshold is not None
    return {
        "prompt_budget": int(budgets_by_length(longest, inputs.budget, new, inputs.split, window).max()),
        "window": window,
        "pool_kernel": kernel,
        "by_length": True,
        "long_prompt": threshold if two_kernels else 0,
        "short_pool_kernel": SHORT if two_kernels else 0,
    }


def evict_then_dense(
    inputs: PolicyInputs, prompt_budget: int, pool_kernel: int, eviction: PromptEviction | None = None
) -> PolicyParameters:
    """Return the parameters of a method that keeps `prompt_budget` prompt tokens and reads the whole cache."""
    prompt_budget = budget_with_window(inputs, prompt_budget)
    return constants(
        inputs, eviction or OBSERVED_ATTENTION, DENSE,
        capacity=prompt_budget + inputs.max_output_len,
        prompt_budget=prompt_budget,
        window=inputs.value("window", DEFAULT_WINDOW),
        pool_kernel=inputs.value("pool_kernel", pool_kernel),
    )  # fmt: skip


def budget_with_window(inputs: PolicyInputs, derived: int) -> int:
    """Return the prompt budget; InputError if the observation window does not fit in it."""
    window = inputs.value("window", DEFAULT_WINDOW)
    needed = f"the observation window of {window}"
    return checked_prompt_budget(inputs, derived, least=window, least_is=needed, setting="window")


OBSERVED_ATTENTION = ObservedAttention()
SNAPKV_PLUS_PLUS = Policy(
    name="snapkv++",
    summary="evict prompt tokens once, then attend densely to the rest",
    source="RocketKV stage 1, arXiv 2502.14051",
    eviction=OBSERVED_ATTENTION,
    selection=DENSE,
    resolve=resolve,
    divides=True,
    overrides=(*EVICTION, *BY_LENGTH, *EVERY_POLICY),
    candidate=True,
)
