"""The operators of the extend graph that belong to no method, each alone against plain arrays or the reference.

They join, append and attend. A method's own operators are checked in its file (`PromptEviction.turn_runs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.isolated_runs import (
    Array,
    Found,
    RunnableAlone,
    TurnCase,
    TurnRun,
    float32,
    page_bounds,
    sinks_of,
)
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.turns.append_block import APPEND_BLOCK, APPEND_CHANNELS, RAISE_BOUNDS
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION
from kvc_trt.operators.turns.join_block import JOIN_BLOCK, JOIN_IN_ORDER
from kvc_trt.operators.turns.keep_positions import KEEP_POSITIONS
from kvc_trt.policies import PolicyParameters
from kvc_trt.verify.rungs.inputs import enough_slots, repeated, softmax_of_case

LONGEST_TURN = 160
"""More than one block of queries, and few enough for a quick check."""


def turn_cases(config: ModelConfig, parameters: PolicyParameters, dtype: str, seed: int) -> Iterator[TurnCase]:
    """Turns of one token and of several blocks, onto caches with one token and with as many as a turn may find."""
    slots = parameters.capacity if parameters.evicts_on_turns else enough_slots(parameters)
    most = slots - parameters.spare_slots
    longest = LONGEST_TURN if parameters.evicts_on_turns else max(1, min(LONGEST_TURN, slots // 2))
    full = most if parameters.evicts_on_turns else slots - longest
    stored = np.array([1, max(1, full // 2), max(1, full), max(1, full)], np.int64)
    lengths = np.array([longest, max(1, longest // 3), 1, longest], np.int64)
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_size
    for name in ("random", "repeated keys"):
        rng = np.random.default_rng([seed, len(name)])
        shapes = [(4, heads, longest, size), *[(4, groups, longest, size)] * 2, *[(4, groups, slots, size)] * 2]
        q, k_new, v_new, k_cache, v_cache = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
        if name != "random":
            k_cache = repeated(rng, shapes[3], run=1, distinct=max(2, slots // 7))
        empty = (np.arange(slots) >= stored[:, None])[:, None, :, None]
        k_cache, v_cache = np.where(empty, 0, k_cache), np.where(empty, 0, v_cache)
        q, k_new, v_new, k_cache, v_cache = (
            np.ascontiguousarray(table, numpy_dtype(dtype)) for table in (q, k_new, v_new, k_cache, v_cache)
        )
        softmax = softmax_of_case(config, seed)
        yield TurnCase(name, name != "random", q, k_new, v_new, k_cache, v_cache, stored, lengths, softmax)


def shared_runs() -> Mapping[str, TurnRun]:
    """Return the isolated runs by the operator's name."""
    return {
        EXTEND_ATTENTION.name: _run_attention,
        APPEND_BLOCK.name: _run_append,
        RAISE_BOUNDS.name: _run_bounds,
        APPEND_CHANNELS.name: _run_channels,
        JOIN_BLOCK.name: _run_join,
        JOIN_IN_ORDER.name: _run_join_in_order,
        KEEP_POSITIONS.name: _run_positions,
    }


def _run_attention(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    both = case.joined(1)
    (found,) = operator.run(q=case.q, k=both.k, v=both.v, cache_lengths=case.cache_lengths, **sinks_of(case))
    lengths = torch.from_numpy(case.cache_lengths), torch.from_numpy(case.lengths)
    tables = float32(case.q), float32(both.k), float32(both.v)
    expected = reference.extend_attention(*tables, *lengths, softmax=case.softmax).numpy()
    real = (np.arange(case.q.shape[2]) < case.lengths[:, None])[:, None, :, None]
    return Found(computed=((np.where(real, found, 0).astype(found.dtype), expected),))


def _appended(case: TurnCase) -> tuple[Array, Array]:
    """Return keys and values [B,G,C,D] after the turn, with free slots as they were."""
    tables = []
    for cache, block in ((case.k_cache, case.k_new), (case.v_cache, case.v_new)):
        after = cache.copy()
        for row, (stored, new) in enumerate(zip(case.cache_lengths, case.lengths, strict=True)):
            after[row, :, stored : stored + new] = block[row, :, :new]
        tables.append(after)
    return tables[0], tables[1]


def _given(case: TurnCase, *more: str) -> dict[str, Array]:
    inputs = case.inputs()
    return {name: inputs[name] for name in ("k_new", "cache_lengths", "lengths", *more)}


def _with_room(case: TurnCase) -> TurnCase:
    """Return the case with slots for the whole turn behind those of the cache."""
    room = [(0, 0), (0, 0), (0, case.q.shape[2]), (0, 0)]
    return replace(case, k_cache=np.pad(case.k_cache, room), v_cache=np.pad(case.v_cache, room))


def _run_append(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    case = _with_room(case)
    found = operator.run(**_given(case, "v_new", "k_cache", "v_cache"))
    return Found(moved=tuple(zip(found, _appended(case), strict=True)))


def _run_bounds(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    before = page_bounds(case.k_cache, case.cache_lengths, rule.page_size, fp8=rule.fp8_bounds)
    (found,) = operator.run(**_given(case), bounds=before)
    keys, _ = _appended(case)
    after = page_bounds(keys, case.cache_lengths + case.lengths, rule.page_size, fp8=rule.fp8_bounds)
    return Found(moved=((found, after),))


def _run_channels(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    before = np.ascontiguousarray(case.k_cache.swapaxes(2, 3)), case.v_cache.sum(axis=2, dtype=np.float32)
    channels, total = operator.run(**_given(case, "v_new"), channels=before[0], value_sum=before[1])
    keys, values = _appended(case)
    return Found(
        moved=((channels, np.ascontiguousarray(keys.swapaxes(2, 3))),),
        computed=((total, values.sum(axis=2, dtype=np.float64)),),
    )


def _run_join(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    return _joined(operator.run(**_given(case, "v_new", "k_cache", "v_cache")), case)


def _joined(result: list[Array], case: TurnCase) -> Found:
    """Judge joined keys, values and lengths; entries past a row's end do not matter."""
    both = case.joined(1)
    real = (np.arange(both.k.shape[2]) < both.prompt_lengths[:, None])[:, None, :, None]
    keys, values = (np.where(real, table, 0).astype(table.dtype) for table in result[:2])
    return Found(moved=((keys, both.k), (values, both.v), (result[2], both.prompt_lengths)))


def _run_join_in_order(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    """Run the join over a cache whose slots are shuffled, each KV head its own way."""
    rng, shape = np.random.default_rng(5), case.k_cache.shape[:3]
    place = rng.random(shape).argsort(axis=-1)
    text = np.where(np.arange(shape[2]) < case.cache_lengths[:, None, None], np.arange(shape[2]) * 3, -1)
    text = np.broadcast_to(text, shape).astype(np.int32)
    positions = np.take_along_axis(text, place, axis=2)
    tables = [np.take_along_axis(table, place[..., None], axis=2) for table in (case.k_cache, case.v_cache)]
    given = {**_given(case, "v_new"), "k_cache": tables[0], "v_cache": tables[1]}
    result = operator.run(**given, slot_positions=positions)
    order = np.clip(result[3], 0, shape[2] - 1).astype(np.int64)  # one that points elsewhere differs all the same
    ordered = np.take_along_axis(positions, order, axis=2)
    return _joined(result, case) + Found(moved=((result[4], text), (ordered, text)))


def _run_positions(operator: RunnableAlone, case: TurnCase, rule: Constants) -> Found:
    """Run with half of the stored positions recorded, and every third entry kept."""
    slots, shape = case.k_cache.shape[2], case.k_cache.shape[:3]
    starts = case.cache_lengths * 5 + 7
    recorded = np.full(shape, -1, np.int32)
    kept = np.full(shape, -1, np.int32)
    expected = np.full(shape, -1, np.int32)
    for row, (stored, new, start) in enumerate(zip(case.cache_lengths, case.lengths, starts, strict=True)):
        known = stored // 2
        recorded[row, :, :known] = np.arange(known) * 2
        places = np.concatenate([np.arange(known) * 2, start - stored + np.arange(known, stored + new)])
        chosen = np.arange(0, stored + new, 3)[:slots]
        kept[row, :, : len(chosen)], expected[row, :, : len(chosen)] = chosen, places[chosen]
    (found,) = operator.run(slot_positions=recorded, cache_lengths=case.cache_lengths, positions=starts, indices=kept)
    return Found(moved=((found, expected),))
