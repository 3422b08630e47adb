"""Steps over caches that have a format, beside the same operator over exact tensors that hold what is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.attention.heavy_hitter_attention import HEAVY_HITTER_ATTENTION
from kvc_trt.operators.attention.hybrid_attention import HYBRID_ATTENTION
from kvc_trt.operators.attention.quest_attention import QUEST_ATTENTION
from kvc_trt.operators.attention.recent_attention import RANKED_RECENT_ATTENTION, RECENT_ATTENTION
from kvc_trt.operators.attention.sparq_attention import SPARQ_ATTENTION
from kvc_trt.operators.attention.tova_attention import TOVA_ATTENTION
from kvc_trt.operators.schema import CACHE_FORMAT
from kvc_trt.operators.shapes import HeadShape, Layout
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated
from tests.graph.small_models import SingleNode, normal
from tests.rounding import assert_close
from tests.stored_tables import FORMATS, parts_names, parts_of, read_back, stored, unpacked

HEADS, KV_HEADS, CAPACITY, PAGE = 4, 2, 40, 4
UPDATED = updated(K_CACHE), updated(V_CACHE)
SHORT, LONG = np.array([0, 6, 3]), np.array([39, 12, 27])
OPERATORS: dict[str, tuple[Any, dict[str, int]]] = {
    "dense": (DENSE_ATTENTION, {"dense_until": 0}),
    "hybrid": (
        HYBRID_ATTENTION,
        {"page_size": PAGE, "top_r": 5, "top_k": 8, "token_budget": 8, "dense_until": 0, "fp8_bounds": 0, "recent": 0},
    ),
    "hybrid, bounds in fp8": (
        HYBRID_ATTENTION,
        {"page_size": PAGE, "top_r": 5, "top_k": 8, "token_budget": 8, "dense_until": 0, "fp8_bounds": 1, "recent": 3},
    ),
    "quest": (
        QUEST_ATTENTION,
        {"page_size": PAGE, "top_k": 8, "token_budget": 8, "dense_until": 0, "fp8_bounds": 1},
    ),
    "sparq": (SPARQ_ATTENTION, {"top_r": 5, "top_k": 8, "token_budget": 8, "dense_until": 0}),
    "recent": (RECENT_ATTENTION, {"capacity": CAPACITY, "sinks": 3}),
    "ranked recent": (RANKED_RECENT_ATTENTION, {"capacity": CAPACITY, "sinks": 3}),
    "heavy hitters": (HEAVY_HITTER_ATTENTION, {"capacity": CAPACITY, "recent": 5}),
    "tova": (TOVA_ATTENTION, {"capacity": CAPACITY, "recent": 5}),
}


@lru_cache
def node(name: str, form: str, size: int) -> SingleNode:
    operator, attributes = OPERATORS[name]
    layout = Layout(
        HeadShape(HEADS, KV_HEADS, size),
        fp8_bounds=bool(attributes.get("fp8_bounds", 0)),
        cache_format=CACHE_FORMATS[form],
        numbers={"reallocate": 1},
    )
    number = {} if form == AUTO else {CACHE_FORMAT.name: CACHE_FORMATS[form].code}
    return SingleNode(operator.body(layout), {**attributes, **number})


def run(
    name: str, form: str, step: dict[str, np.ndarray], lengths: np.ndarray, *, exact: bool,
    made: Callable[[str, str, int], SingleNode] = node,
) -> dict[str, Any]:  # fmt: skip
    """Run a step over a cache of the format, or over exact tensors of what such a cache gives, by a node of `made`."""
    own, attributes = CACHE_FORMATS[form], OPERATORS[name][1]
    used = (np.arange(CAPACITY) < lengths[:, None])[:, None, :, None]
    keys, values = (np.where(used, read_back(step[part], v), 0) for part, v in (("k", own.keys), ("v", own.values)))
    state: dict[str, np.ndarray] = {"cache_lengths": lengths}
    if exact:
        new = {"k_new": read_back(step["k_new"], own.keys), "v_new": read_back(step["v_new"], own.values)}
        state |= {"k_cache": keys, "v_cache": values, "channels": keys.swapaxes(2, 3)}
    else:
        new = {name: step[name] for name in ("k_new", "v_new")}
        parts = parts_of(step["k"], step["v"], form)
        state |= {name: np.where(used, part, 0).astype(part.dtype) for name, part in parts.items()}
        codes = np.where(used, unpacked(stored(step["k"], own.keys)[0], own.keys), 0).astype(np.int8)
        state["channels"] = np.ascontiguousarray(codes.swapaxes(2, 3))
    state["value_sum"] = values.sum(axis=2, dtype=np.float32)
    state["bounds"] = page_bounds(keys, lengths, PAGE, fp8=bool(attributes.get("fp8_bounds", 0)))
    slots = np.broadcast_to(np.arange(CAPACITY), (len(lengths), KV_HEADS, CAPACITY))
    state["slot_positions"] = np.where(used[..., 0], slots, -1).astype(np.int32)
    state["scores"] = np.where(used[..., 0], np.abs(step["k"][..., 0]), 0)
    state["positions"] = lengths
    angles = np.arange(CAPACITY)[:, None] / 10.0 ** np.linspace(0, 2, step["k"].shape[-1] // 2)
    state |= {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
    return made(name, AUTO if exact else form, step["k"].shape[-1]).named({**state, **new, "query": step["query"]})


def random_step(size: int, seed: int, rows: int = 3) -> dict[str, np.ndarray]:
    tables = {name: normal(seed + i, rows, KV_HEADS, CAPACITY, size) for i, name in enumerate(("k", "v"))}
    new = {name: normal(seed + 7 + i, rows, KV_HEADS, size) for i, name in enumerate(("k_new", "v_new"))}
    return {**tables, **new, "query": normal(seed + 11, rows, HEADS, size)}


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("form", "size"), [("int8", 24), ("fp8", 32), ("int4", 64), ("int4", 24), ("k8v4", 64)])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_step_reads_what_is_stored_and_stores_its_token(name, form, size, lengths):
    step = random_step(size, seed=size)
    check_step(run(name, form, step, lengths, exact=False), name, form, step, lengths)


def check_step(found: dict[str, Any], name: str, form: str, step: dict[str, np.ndarray], lengths: np.ndarray) -> None:
    """Hold a step over a cache of the format to the one over exact tensors of what such a cache gives."""
    expected = run(name, form, step, lengths, exact=True)
    assert_close(found["output"], expected["output"], 1e-5)
    for same in ("selected", "bounds_out", "slot_positions_out"):
        if same in expected:
            np.testing.assert_array_equal(found[same], expected[same])
    for close in ("scores_out", "value_sum_out"):
        if close in expected:
            assert_close(found[close], expected[close], 1e-5)
    own = CACHE_FORMATS[form]
    if "channels_out" in found:
        codes = unpacked(found["k_cache_out"], own.keys).swapaxes(2, 3)
        np.testing.assert_array_equal(found["channels_out"], codes)
    check_parts(found, step, form, lengths)


def check_parts(found: dict[str, Any], step: dict[str, np.ndarray], form: str, lengths: np.ndarray) -> None:
    """The new token is stored behind the others, bit for bit, and nothing else changed."""
    tables = []
    for table, new in (("k", "k_new"), ("v", "v_new")):
        used = (np.arange(CAPACITY) < lengths[:, None])[:, None, :, None]
        after = np.where(used, step[table], 0)
        for row, length in enumerate(lengths):
            after[row, :, length] = step[new][row]
        tables.append(after)
    occupied = (np.arange(CAPACITY) <= lengths[:, None])[:, None, :, None]
    for name, part in parts_of(*tables, form, UPDATED).items():
        np.testing.assert_array_equal(found[name], np.where(occupied, part, 0).astype(part.dtype), strict=True)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_a_token_that_is_not_finite_changes_no_other_row(name, form, spoiled):
    step = random_step(32, seed=5)
    bad = {part: table.copy() for part, table in step.items()}
    bad["k_new"][1, 0, 3] = spoiled
    clean, found = (run(name, form, one, LONG, exact=False) for one in (step, bad))
    for output, part in clean.items():
        others = [0, 2]
        np.testing.assert_array_equal(found[output][others], part[others])
    codes, scale = (found[output][1, 0, LONG[1]] for output in parts_names(form, UPDATED)[:2])
    assert not codes.any()
    assert (scale == -1 if form == "fp8" else np.isnan(scale)).all()
