"""Nodes run one by one: nothing without a use, values freed, state written in place and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.nodes.program import NodeProgram, Operators, Scope
from kvc_trt.operators.attention.quest_attention import QUEST_ATTENTION
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.shapes import HeadShape, Layout

OPERATORS = Operators(Layout(HeadShape(4, 2, 16), 32, 4), torch.device("cpu"))


def program(write, outputs, **options):
    emit = Emitter()
    write(emit)
    return NodeProgram(emit.nodes, outputs, OPERATORS, **options)


def scattered(emit, *, then=None):
    emit.ScatterND("cache", np.array([[1]]), np.float32([[5, 6]]), outputs=["cache_out"])
    if then == "values":
        emit.Add("cache", "cache_out", outputs=["sum"])
    if then == "shape":
        emit.Shape("cache", outputs=["size"])


@pytest.mark.parametrize(
    ("then", "outputs", "in_place"),
    [(None, [], True), ("shape", ["size"], True), ("values", ["sum"], False), (None, ["cache"], False)],
)
def test_a_state_is_written_in_place_if_nobody_reads_it_later(then, outputs, in_place):
    cache = torch.zeros(3, 2)
    found = program(lambda emit: scattered(emit, then=then), ["cache_out", *outputs], state=["cache"]).run(
        Scope({"cache": cache})
    )
    assert found[0][1].tolist() == [5, 6]
    assert (found[0].data_ptr() == cache.data_ptr()) == in_place
    assert bool((cache == 0).all()) != in_place


@pytest.mark.parametrize("view", ["Transpose", "Slice", "If"])
def test_a_view_that_is_read_later_keeps_what_it_showed(view):
    def write(emit):
        if view == "Transpose":
            before = emit.Transpose("cache", perm=[1, 0])
        elif view == "Slice":
            before = emit.Slice("cache", [0], [3], [0])
        else:
            whole = emit.Greater("x", 0.0)
            before = emit.choose(whole, lambda one: [one.Identity("cache")], lambda one: [one.Neg("cache")], outputs=1)
        scattered(emit)
        emit.ReduceSum(before, outputs=["sum_before"])

    cache, x = torch.ones(3, 2), torch.tensor(1.0)
    found = program(write, ["cache_out", "sum_before"], state=["cache"]).run(Scope({"cache": cache, "x": x}))
    assert found[0][1].tolist() == [5, 6]
    assert found[1].item() == 6


def test_values_that_are_not_state_are_copied():
    cache = torch.zeros(3, 2)
    (found,) = program(scattered, ["cache_out"]).run(Scope({"cache": cache}))
    assert found[1].tolist() == [5, 6]
    assert bool((cache == 0).all())


def test_nodes_without_a_use_are_left_out():
    def write(emit):
        emit.Add("x", 1.0, outputs=["used"])
        emit.Mul("unknown", 2.0, outputs=["unused"])

    made = program(write, ["used"])
    assert made.reads == {"x"}
    assert made.run(Scope({"x": torch.ones(2)}))[0].tolist() == [2, 2]


def test_a_value_is_freed_after_its_last_use():
    def write(emit):
        emit.Add("x", 1.0, outputs=["first"])
        emit.Mul("first", 2.0, outputs=["second"])
        emit.Sub("second", 1.0, outputs=["third"])

    scope = Scope({"x": torch.ones(2)})
    program(write, ["third"]).run(scope)
    assert set(scope) == {"third"}


def test_an_output_that_nobody_reads_is_freed_at_once():
    held = []

    def write(emit):
        emit.TopK("x", [1], outputs=["best", "place"], axis=0)
        emit.Add("place", 1, outputs=["next"])

    class Watched(Scope):
        def update(self, values):
            super().update(values)
            held.append(set(self))

    assert program(write, ["next"]).run(Watched({"x": torch.tensor([3.0, 4.0])}))[0].tolist() == [2]
    assert "best" not in held[-1]


def test_an_input_that_is_left_out_before_others_is_refused():
    with pytest.raises(ValueError, match="Clip leaves out an input before others"):
        program(lambda emit: emit.Clip("x", None, 1.0, outputs=["y"]), ["y"])


@pytest.mark.parametrize(("x", "expected"), [(1.0, 11.0), (-1.0, -6.0)])
def test_a_branch_can_read_values_computed_outside_it(x, expected):
    def write(emit):
        doubled = emit.Add("x", "x")
        emit.nodes[-1].output[0] = doubled
        chosen = emit.choose(
            emit.Greater("x", 0.0), lambda one: [one.Add(doubled, 9.0)], lambda one: [one.Mul(doubled, 3.0)], outputs=1
        )
        emit.Identity(chosen, outputs=["y"])

    assert program(write, ["y"]).run(Scope({"x": torch.tensor(x)}))[0].item() == expected


def test_loops_accumulate_values_and_collect_rows():
    def write(emit):
        count = emit.constant(4)
        emit.Identity(emit.accumulate(count, "x", lambda one, i, value: one.Add(value, i)), outputs=["sum"])
        emit.Identity(emit.collect(count, lambda one, i: str(one.Mul(i, "x"))), outputs=["rows"])

    total, rows = program(write, ["sum", "rows"]).run(Scope({"x": torch.tensor([10, 20])}))
    assert total.tolist() == [16, 26]
    assert rows.tolist() == [[0, 0], [10, 20], [20, 40], [30, 60]]


def test_a_name_that_nobody_writes_is_named():
    with pytest.raises(KeyError, match="nowhere"):
        program(lambda emit: emit.Add("nowhere", 1.0, outputs=["y"]), ["y"]).run(Scope({}))


def test_equal_calls_share_a_body_and_unused_outputs_cost_nothing():
    operators = Operators(Layout(HeadShape(4, 2, 16), 32, 4), torch.device("cpu"))
    numbers = {"page_size": 8, "top_k": 16, "token_budget": 16, "dense_until": 0, "fp8_bounds": 0}
    emit = Emitter()
    for call in range(2):
        names = {one.name: f"{one.name}.{call}" for one in (*QUEST_ATTENTION.inputs, *QUEST_ATTENTION.outputs)}
        inputs = {one.name: names[one.name] for one in QUEST_ATTENTION.inputs}
        outputs = {one.name: names[one.name] for one in QUEST_ATTENTION.outputs}
        QUEST_ATTENTION.call(emit, inputs, outputs, **numbers)
    NodeProgram(emit.nodes, ["output.0", "output.1"], operators)
    (body,) = operators._bodies.values()
    assert "selected" not in {name for step in body._steps for name in step.outputs}
