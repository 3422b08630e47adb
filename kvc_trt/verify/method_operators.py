"""Rung 1 for the operators of single methods: each alone, against the reference on the same inputs.

A table of runs by operator name. Where a cache has more state than keys and values, the run makes it from the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from kvc_trt import policies, reference
from kvc_trt.policies import PolicyParameters
from kvc_trt.verify.choices import compare_either
from kvc_trt.verify.inputs import PromptCase, StepCase
from kvc_trt.verify.near_ties import IndexComparison, count_differences
from kvc_trt.verify.outcome import Outcome, appended, exact, float32, gathered, maximum_error, page_bounds
from kvc_trt.verify.target import Array, Operator


def run_quest(operator: Operator, case: StepCase, rule: PolicyParameters) -> Outcome:
    """Bounds are those of the keys, before and after the append."""
    keys, values, lengths = appended(case)
    before = page_bounds(case.k_cache, case.cache_lengths, rule.page_size)
    output, k_cache, v_cache, bounds, selected = operator.run(**_state(case), bounds=before)
    compared, error = compare_either(case.query, keys, values, lengths, output, selected, rule)
    copied = exact(k_cache, keys), exact(v_cache, values), exact(bounds, page_bounds(keys, lengths, rule.page_size))
    return Outcome(compared, error, max(copied))


def run_sparq(operator: Operator, case: StepCase, rule: PolicyParameters) -> Outcome:
    """The second copy of the keys is moved bit for bit; the sum of values is a sum."""
    keys, values, lengths = appended(case)
    columns, total = np.ascontiguousarray(case.k_cache.swapaxes(2, 3)), case.v_cache.sum(2, dtype=np.float32)
    found = operator.run(**_state(case), channels=columns, value_sum=total)
    output, k_cache, v_cache, channels, value_sum, selected = found
    compared, error = compare_either(case.query, keys, values, lengths, output, selected, rule)
    copied = exact(k_cache, keys), exact(v_cache, values), exact(channels, keys.swapaxes(2, 3))
    drift = maximum_error(value_sum, values.sum(2, dtype=np.float64))
    return Outcome(compared, float(np.maximum(error, drift)), max(copied))


def run_recent(operator: Operator, case: StepCase, rule: PolicyParameters) -> Outcome:
    """The ring as it fills, and after it has turned: as many tokens again as it has slots, and a few."""
    outcome = Outcome()
    for turned in (0, rule.capacity + 3):
        ring = _turned(case, rule, turned)
        output, k_cache, v_cache = operator.run(**{**_state(case), "cache_lengths": case.cache_lengths + turned})
        expected = reference.dense_attention(
            float32(case.query), float32(ring.keys), float32(ring.values), ring.lengths
        )
        copied = max(exact(k_cache, ring.keys), exact(v_cache, ring.values))
        outcome += Outcome(value_error=maximum_error(output, expected.numpy()), copy_error=copied)
    return outcome


def run_ranked_recent(operator: Operator, case: StepCase, rule: PolicyParameters) -> Outcome:
    """As `run_recent`, of keys that are rotated by their rank: by hand, in the order of the ranks."""
    outcome, half = Outcome(), case.query.shape[2] // 2
    angles = np.outer(np.arange(rule.capacity), 10_000.0 ** (-np.arange(half) / half))
    tables = {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    for turned in (0, rule.capacity + 3):
        ring = _turned(case, rule, turned)
        found = operator.run(**{**_state(case), "cache_lengths": case.cache_lengths + turned}, **tables)
        keys, values = (np.take_along_axis(rows, ring.by_rank, axis=2) for rows in (ring.keys, ring.values))
        newest = ring.lengths.numpy() - 1
        query = _rotated(case.query[:, :, None], tables, newest[:, None, None])[:, :, 0]
        turned_keys = _rotated(keys, tables, np.arange(rule.capacity)[None, None])
        expected = reference.dense_attention(float32(query), float32(turned_keys), float32(values), ring.lengths)
        copied = max(exact(found[1], ring.keys), exact(found[2], ring.values))
        outcome += Outcome(value_error=maximum_error(found[0], expected.numpy()), copy_error=copied)
    return outcome


class _Ring(NamedTuple):
    """A ring after its append: keys, values [B,G,C,D], lengths [B], and the slots in the order of their ranks."""

    keys: Array
    values: Array
    lengths: torch.Tensor
    by_rank: Array
    """INT64 [B,1,C,1]"""


def _turned(case: StepCase, rule: PolicyParameters, turned: int) -> _Ring:
    stored, ring = case.cache_lengths + turned, rule.capacity - rule.sinks
    over = stored >= rule.capacity
    slots = np.where(over, rule.sinks + (stored - rule.sinks) % ring, stored)
    keys, values, rows = case.k_cache.copy(), case.v_cache.copy(), np.arange(len(slots))
    keys[rows, :, slots], values[rows, :, slots] = case.k_new, case.v_new
    order = np.tile(np.arange(rule.capacity), (len(slots), 1))
    for row in np.flatnonzero(over):
        order[row, rule.sinks :] = np.roll(order[row, rule.sinks :], rule.sinks - slots[row] - 1)
    lengths = torch.from_numpy(np.minimum(stored + 1, rule.capacity))
    return _Ring(keys, values, lengths, order[:, None, :, None])


def _rotated(rows: Array, tables: dict[str, Array], ranks: Array) -> Array:
    """Rotary embedding of rows [B,heads,n,D] at `ranks`, which broadcast to [B,heads,n]."""
    cosine, sine = tables["cosine"][ranks], tables["sine"][ranks]
    left, right = np.split(rows.astype(np.float32), 2, axis=-1)
    return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def run_heavy_hitters(operator: Operator, case: StepCase, rule: PolicyParameters) -> Outcome:
    """Entries stand in the order of the text; what they have received is random."""
    stored = np.minimum(case.cache_lengths, rule.capacity - 1)
    case = replace(case, cache_lengths=stored)
    slots = np.broadcast_to(np.arange(case.k_cache.shape[2]), case.k_cache.shape[:3])
    present = slots < stored[:, None, None]
    scores = np.random.default_rng(7).random(slots.shape, np.float32) * present
    before = np.where(present, slots, -1).astype(np.int32)
    found = operator.run(**_state(case), scores=scores, slot_positions=before, positions=stored)
    output, k_cache, v_cache, new_scores, slot_positions = found
    keys, values, lengths = appended(case)
    cache = reference.LayerCache(
        float32(keys), float32(values), torch.from_numpy(lengths), scores=torch.from_numpy(scores)
    )
    step = policies.method(rule).select(float32(case.query), cache, rule)
    assert step.kept is not None
    assert step.scores is not None
    compared = IndexComparison()
    for row, kept in enumerate(step.kept):
        stay = np.sort(np.where(slot_positions[row] < 0, np.iinfo(np.int32).max, slot_positions[row]), axis=-1)
        compared += _all_equal(kept.numpy()[None], stay[None, :, : kept.shape[1]].astype(np.int64), row)
    kept_scores = np.where(slot_positions >= 0, step.scores.numpy(), 0)
    error = max(maximum_error(output, step.output.numpy()), maximum_error(new_scores, kept_scores))
    return Outcome(compared, error, max(exact(k_cache, keys), exact(v_cache, values)))


def run_compact_heavy_hitters(operator: Operator, case: PromptCase, rule: PolicyParameters) -> Outcome:
    """Every query of the prompt counts: the case's window, repeated over it, stands for them."""
    slots, window = case.k.shape[2], case.q_window.shape[2]
    queries = np.ascontiguousarray(case.q_window[:, :, np.arange(slots) % window])
    aligned = np.zeros_like(queries)
    for row, n in enumerate(case.prompt_lengths):
        aligned[row, :, slots - n :] = queries[row, :, :n]
    inputs = {"q": queries, "k": case.k, "v": case.v, "prompt_lengths": case.prompt_lengths}
    k_cache, v_cache, scores, positions, lengths, indices = operator.run(**inputs)
    rows = torch.from_numpy(case.prompt_lengths)
    single = policies.method(rule).compact(float32(aligned), float32(case.k), float32(case.v), rows, rule)
    double = policies.method(rule).compact(
        float32(aligned).double(), float32(case.k).double(), float32(case.v).double(), rows, rule
    )
    compared = IndexComparison()
    width = single.indices.shape[2]
    for row in range(len(rows)):
        either = [run.indices[row].numpy() for run in (double, single)]
        right = min(either, key=lambda lists: int((lists != indices[row, :, :width]).sum()))
        compared += _all_equal(right[None], indices[row : row + 1, :, :width], row)
    assert double.scores is not None
    drift = maximum_error(scores[:, :, :width], double.scores.numpy()) if not compared.wrong else 0.0
    copied = [exact(lengths, single.lengths.numpy()), exact(positions, indices)]
    copied += [exact(cache, gathered(rows, indices)) for cache, rows in ((k_cache, case.k), (v_cache, case.v))]
    return Outcome(compared, drift, max(copied))


STEP_RUNS: dict[str, Callable[[Operator, StepCase, PolicyParameters], Outcome]] = {
    "KvcQuestAttention": run_quest,
    "KvcSparqAttention": run_sparq,
    "KvcRecentAttention": run_recent,
    "KvcRankedRecentAttention": run_ranked_recent,
    "KvcHeavyHitterAttention": run_heavy_hitters,
}
PROMPT_RUNS: dict[str, Callable[[Operator, PromptCase, PolicyParameters], Outcome]] = {
    "KvcCompactHeavyHitters": run_compact_heavy_hitters,
}


def _state(case: StepCase) -> dict[str, Array]:
    """The inputs that every step has."""
    names = ("query", "k_new", "v_new", "k_cache", "v_cache", "cache_lengths")
    return {name: getattr(case, name) for name in names}


def _all_equal(expected: Array, found: Array, row: int) -> IndexComparison:
    """Lists that must be the same to the last entry."""
    compared = count_differences(expected, found)
    if not compared.near_ties:
        return compared
    return IndexComparison(compared.compared, wrong=(f"row {row}: {compared.near_ties} lists of kept tokens differ",))
