"""Rung 1 for the operators behind layer budgets that are set for each prompt: rank, divide, trim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.graph.state import PAGED
from kvc_trt.policies import PolicyParameters
from kvc_trt.reference.compaction import scores as prompt_scores
from kvc_trt.reference.selection import best
from kvc_trt.reference.squeeze import squeeze
from kvc_trt.verify.inputs import PromptCase
from kvc_trt.verify.near_ties import IndexComparison, compare_compaction
from kvc_trt.verify.outcome import Outcome, exact, float32, gathered, page_bounds
from kvc_trt.verify.target import Array, Operator


def run_compact_ranked(operator: Operator, case: PromptCase, rule: PolicyParameters) -> Outcome:
    """The best of any smaller budget are those of the smaller ranks: nested, as `reference.compact` chooses them."""
    inputs = {"q_window": case.q_window, "k": case.k, "v": case.v, "prompt_lengths": case.prompt_lengths}
    k_kept, v_kept, kept, ranks = operator.run(**inputs)
    each_once = exact(np.sort(ranks, axis=-1), np.broadcast_to(np.arange(ranks.shape[2]), ranks.shape))
    copied = exact(k_kept, gathered(case.k, kept)), exact(v_kept, gathered(case.v, kept)), each_once
    outcome = Outcome(copy_error=max(copied))
    for budget in sorted({rule.window, rule.prompt_budget, rule.most_kept}):
        chosen = np.where(ranks < np.minimum(budget, case.prompt_lengths)[:, None, None], kept, np.iinfo(np.int32).max)
        lists = np.sort(chosen, axis=-1)[:, :, : min(budget, kept.shape[2])]
        lists = np.where(lists == np.iinfo(np.int32).max, -1, lists).astype(np.int32)
        outcome += Outcome(_compared(case, rule, budget, lists))
    return outcome


def run_trim(operator: Operator, case: PromptCase, rule: PolicyParameters) -> Outcome:
    """Every row to another budget, from kept tokens and ranks that the reference gives."""
    kept, ranks = _ranked(case, rule)
    budgets = np.linspace(rule.window, rule.most_kept, len(case.prompt_lengths)).astype(np.int64)
    rows = {"k_kept": gathered(case.k, kept), "v_kept": gathered(case.v, kept), "kept": kept, "ranks": ranks}
    found = operator.run(**rows, budgets=budgets, prompt_lengths=case.prompt_lengths)
    k_cache, v_cache, bounds, lengths, indices = found
    outcome = Outcome()
    for row, budget in enumerate(budgets):
        one = slice(row, row + 1)
        alone = replace(
            case, q_window=case.q_window[one], k=case.k[one], v=case.v[one], prompt_lengths=case.prompt_lengths[one]
        )
        outcome += Outcome(_compared(alone, rule, int(budget), indices[one, :, :budget]))
    copied = [
        exact(lengths, np.minimum(budgets, case.prompt_lengths)),
        *(exact(cache, gathered(source, indices)) for cache, source in ((k_cache, case.k), (v_cache, case.v))),
    ]
    if rule.decode_selection in PAGED:
        copied.append(exact(bounds, page_bounds(k_cache, lengths, rule.page_size)))
    return outcome + Outcome(copy_error=max(copied))


def run_layer_budgets(operator: Operator, case: PromptCase, rule: PolicyParameters, layers: int) -> Outcome:
    """Cosines at random and in eighths, which repeat; the integers must be the reference's."""
    share, lengths = rule.squeeze_share, case.prompt_lengths
    assert share is not None
    shape, rng = (layers, len(lengths)), np.random.default_rng(len(case.name))
    table = rng.uniform(0.2, 1, shape) if case.name == "random" else rng.integers(1, 9, shape) / 8
    cosines = table.astype(np.float32)
    (budgets,) = operator.run(cosines=cosines, prompt_lengths=lengths)
    expected = [
        squeeze(column, rule.prompt_budget, share=share, minimum=rule.window, maximum=min(rule.most_kept, n)).budgets
        for column, n in zip(cosines.T.tolist(), lengths.tolist(), strict=True)
    ]
    return Outcome(copy_error=exact(budgets, np.array(expected, np.int64).T))


def _ranked(case: PromptCase, rule: PolicyParameters) -> tuple[Array, Array]:
    """Kept positions ascending and their ranks, INT64 [B,G,n]: window first, then by score, then padding."""
    q, k, n = float32(case.q_window), float32(case.k), torch.from_numpy(case.prompt_lengths)
    values = prompt_scores(q, k, n, pool_kernel=rule.pool_kernel).values
    positions = torch.arange(k.shape[2])
    window = (positions >= n[:, None, None] - rule.window) & (positions < n[:, None, None])
    values = torch.where(window, torch.inf, values)
    values = torch.where(positions >= n[:, None, None], torch.nan, values)
    kept, ranks = best(values, min(rule.most_kept, k.shape[2])).sort(dim=-1)
    return kept.numpy(), ranks.numpy()


def _compared(case: PromptCase, rule: PolicyParameters, budget: int, lists: Array) -> IndexComparison:
    rows, kernel = torch.from_numpy(case.prompt_lengths), rule.pool_kernel
    inputs = float32(case.q_window), float32(case.k), float32(case.v), rows
    expected = reference.compact(*inputs, prompt_budget=budget, pool_kernel=kernel).indices.numpy()
    return compare_compaction(case.q_window, case.k, case.prompt_lengths, expected, lists, pool_kernel=kernel)
