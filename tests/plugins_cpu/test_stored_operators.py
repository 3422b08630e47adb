"""Native operators over caches that have a format: the tests of the bodies, with the library in their place."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvc_trt.operators.compaction.compact import COMPACT_TURN
from kvc_trt.operators.turns.extend_attention import EXTEND_ATTENTION
from kvc_trt.operators.turns.join_block import JOIN_BLOCK
from tests.graph.small_models import SingleNode
from tests.operators import test_stored_compaction as compaction
from tests.operators import test_stored_steps as steps
from tests.operators import test_stored_turns as turns
from tests.plugins_cpu.native_node import NativeNode
from tests.rounding import assert_close
from tests.stored_tables import FORMATS, gathered, parts_names

SIZES = pytest.mark.parametrize("size", [24, 32, 96])
KV_HEADS = pytest.mark.parametrize("kv_heads", [1, 2])
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS)


@cache
def native(body: SingleNode, library: Path, threads: int = 2) -> NativeNode:
    """Return the operator of a node, by the library."""
    return NativeNode(body.body, body.attributes, library, threads)


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [steps.SHORT, steps.LONG], ids=["short", "long"])
@EVERY_FORMAT
@SIZES
@pytest.mark.parametrize("name", ["dense", "hybrid", "hybrid, bounds in fp8"])
def test_a_step_reads_what_is_stored_and_stores_its_token(
    library: Path, instructions: str, name: str, form: str, size: int, lengths: np.ndarray
) -> None:
    step = steps.random_step(size, seed=size)
    found = steps.run(name, form, step, lengths, exact=False, made=lambda *kind: native(steps.node(*kind), library))
    steps.check_step(found, name, form, step, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [np.nan, -np.inf])
@EVERY_FORMAT
@pytest.mark.parametrize("name", ["hybrid", "hybrid, bounds in fp8"])
def test_bounds_of_a_token_that_is_not_finite_are_the_bodys(
    library: Path, instructions: str, name: str, form: str, spoiled: float
) -> None:
    step = steps.random_step(32, seed=5)
    step["k_new"][1, 0, 3] = spoiled
    by_library, by_body = (
        steps.run(name, form, step, steps.LONG, exact=False, made=made)
        for made in (lambda *kind: native(steps.node(*kind), library), steps.node)
    )
    for output in ("bounds_out", "selected", *parts_names(form, steps.UPDATED)):
        np.testing.assert_array_equal(by_library[output], by_body[output], err_msg=output)


@pytest.mark.pairwise
@EVERY_FORMAT
@SIZES
@KV_HEADS
def test_survivors_of_exact_votes_are_stored_as_the_reference_stores_them(
    library: Path, instructions: str, form: str, size: int, kv_heads: int
) -> None:
    case, made = compaction.CASES["observed"], compaction.prompts(kv_heads, size, "float32", seed=size)
    inputs = {**case.given(made), "k": made.keys, "v": made.values, "prompt_lengths": compaction.LENGTHS}
    found = native(compaction.node("observed", form, "float32", size), library).named(inputs)
    compaction.check_lists(found, case.chosen(made))
    compaction.check_tables(found, made.keys, made.values, form)


@pytest.mark.pairwise
@EVERY_FORMAT
@SIZES
@KV_HEADS
@pytest.mark.parametrize("fp8", [0, 1])
def test_a_turn_moves_kept_codes_unchanged(
    library: Path, instructions: str, form: str, size: int, kv_heads: int, fp8: int
) -> None:
    made = turns.turn(kv_heads, size, "float32", seed=size)
    _, numbers, given, chosen = turns.compactions(made, "observed", form)
    numbers = {"prompt_budget": turns.BUDGET, "capacity": turns.CAPACITY, **numbers, "fp8_bounds": fp8}
    body, tables = turns.node(COMPACT_TURN, form, "float32", size, **numbers), turns.joined(made, form)
    inputs = {**tables, "prompt_lengths": turns.STORED + turns.NEW, **given}
    found, expected = native(body, library).named(inputs), body.named(inputs)
    width = chosen.indices.shape[2]
    np.testing.assert_array_equal(found["indices"][:, :, :width], chosen.indices.numpy())
    for cached, table in zip(parts_names(form), parts_names(form, turns.JOINED), strict=True):
        np.testing.assert_array_equal(found[cached], gathered(tables[table], found["indices"]), strict=True)
    turns.assert_same(found, expected)


@pytest.mark.pairwise
@EVERY_FORMAT
@SIZES
@KV_HEADS
def test_new_tokens_are_stored_behind_those_of_the_cache(
    library: Path, instructions: str, form: str, size: int, kv_heads: int
) -> None:
    made = turns.turn(kv_heads, size, "float32", seed=size)
    body = turns.node(JOIN_BLOCK, form, "float32", size)
    found = native(body, library).named({**made.new(), **made.state(form)})
    np.testing.assert_array_equal(found["joined_lengths"], turns.STORED + turns.NEW)
    turns.assert_same(found, turns.joined(made, form))


@pytest.mark.pairwise
@EVERY_FORMAT
@SIZES
@KV_HEADS
def test_a_turn_attends_to_what_is_stored(
    library: Path, instructions: str, form: str, size: int, kv_heads: int
) -> None:
    made = turns.turn(kv_heads, size, "float32", seed=size)
    body = turns.node(EXTEND_ATTENTION, form, "float32", size)
    inputs = {"q": made.queries, **turns.joined(made, form), "cache_lengths": turns.STORED}
    found, expected = native(body, library).named(inputs)["o"], body.named(inputs)["o"]
    for row, count in enumerate(turns.NEW):
        assert_close(found[row, :, :count], expected[row, :, :count], 2e-6)
