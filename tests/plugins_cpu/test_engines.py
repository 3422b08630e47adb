"""Whole engines: native operators give the bodies' tokens, index lists and state, under every kind of policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.inliner import inline_selected_functions

from kvc_trt.backends.onnxruntime import native
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.native import VARIABLE, load
from kvc_trt.backends.onnxruntime.operator_times import operator_times
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import Program, read_graph
from kvc_trt.graph.rewrites.native import prepare
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.quantised_linear import CONTRIBUTED_PRODUCT, QUANTISED_LINEAR
from tests.backends.onnxruntime.test_turns import ROOM, tokens_of
from tests.backends.prompts import filled
from tests.graph.test_steps_of_stored_caches import SHARE
from tests.plugins_cpu.libraries import best_and_lowest, use
from tests.rounding import assert_close

FP8 = ("rocketkv, bounds in fp8", "hybrid, bounds in fp8", "quest, bounds in fp8")
POLICIES = ("full", "rocketkv", "snapkv++", "hybrid", "quest", "duo-attention", "streaming-llm", "h2o", "sparq", *FP8)
TAKING_TURNS = ("full", "rocketkv", "snapkv++", "hybrid", "quest", "streaming-llm", "tova", *FP8)
IN_A_FORMAT = [("full", "int8"), ("rocketkv", "fp8"), ("hybrid", "k8v4"), ("snapkv++", "int4"), ("quest", "int8")]
LACKING = frozenset({"KvcCompact_int8_fp8_bounds", "KvcHybridAttention_int8_fp8_bounds"})
STEPS = 12


def decoded(
    program: Program, threads: int, expose: tuple[str, ...] = (), fed: np.ndarray | None = None
) -> dict[str, Any]:
    """Return the tokens of every step, the exposed lists of the last one, its logits and the state behind it.

    `fed` has the tokens of every step [STEPS + 1,B]; without it each is the likeliest after the last."""
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=threads), expose=expose)
    executor.allocate(3)
    tokens, positions, lengths = filled(executor)
    first = tokens.copy()
    answers = [first]
    for step in range(STEPS):
        logits = executor.decode(tokens, positions, lengths)
        tokens, positions = logits.argmax(axis=1) if fed is None else fed[step + 1], positions + 1
        lengths = lengths + 1
        answers.append(tokens)
    state = {name: buffer.copy() for name, buffer in executor.buffers.items()}
    return {
        "tokens": np.stack(answers),
        "logits": logits.copy(),
        "state": state,
        "lists": {name: executor.exposed(name) for name in expose},
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_the_bodies_answers(
    make_program: Callable[..., Program], policy: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(policy)
    listed = program.parameters.policy in ("rocketkv", "hybrid")
    expose = tuple(f"selected.{layer}" for layer in range(3)) if listed else ()
    bodies = decoded(program, 1, expose)
    monkeypatch.setenv(VARIABLE, str(library))
    for instructions in best_and_lowest(library):
        use(library, instructions)
        found = decoded(program, 2, expose)
        np.testing.assert_array_equal(found["tokens"], bodies["tokens"], err_msg=instructions)
        assert_close(found["logits"], bodies["logits"], name=instructions)
        for name, listed in bodies["lists"].items():
            np.testing.assert_array_equal(found["lists"][name], listed, err_msg=f"{name}, {instructions}")
        for name, buffer in bodies["state"].items():
            assert_close(found["state"][name], buffer, name=f"{name}, {instructions}")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), IN_A_FORMAT)
def test_logits_from_stored_caches_are_the_bodies_logits(
    make_program: Callable[..., Program], policy: str, form: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same tokens: a number beside an edge may get the next code, and the likeliest token then be another."""
    bodies = decoded(make_program(policy, kv_cache=form), 1)
    exact = decoded(make_program(policy), 1, fed=bodies["tokens"])
    limit = SHARE * np.abs(bodies["logits"] - exact["logits"]).max()
    monkeypatch.setenv(VARIABLE, str(library))
    for instructions in best_and_lowest(library):
        use(library, instructions)
        found = decoded(make_program(policy, kv_cache=form), 2, fed=bodies["tokens"])
        np.testing.assert_allclose(found["logits"], bodies["logits"], rtol=0, atol=limit, err_msg=instructions)


def test_operators_that_the_library_lacks_in_a_format_run_their_bodies_and_no_others(
    make_program: Callable[..., Program], library: Path
) -> None:
    program = make_program("rocketkv, bounds in fp8", skip_layers=1, kv_cache="int8")
    native = load(library).operators
    fewer = native - LACKING
    prefill, decode = (prepare(read_graph(one), fewer) for one in (program.prefill, program.decode))
    assert {"KvcCompact_body", "KvcPrefillAttention"} <= {node.op_type for node in prefill.graph.node}
    assert {"KvcHybridAttention_body", "KvcDenseAttention_int8"} <= {node.op_type for node in decode.graph.node}
    assert [body.name for body in decode.functions] == ["KvcHybridAttention_body"]
    whole = prepare(read_graph(program.decode), native)
    assert {"KvcHybridAttention_int8_fp8_bounds", "KvcDenseAttention_int8"} <= {n.op_type for n in whole.graph.node}
    assert not whole.functions


@pytest.mark.parametrize("lacking", [frozenset(), LACKING], ids=["native", "body"])
def test_profiles_count_every_form_of_an_operator_as_the_operator(
    make_program: Callable[..., Program], library: Path, lacking: frozenset[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv(VARIABLE, str(library))
    whole = load(library)
    monkeypatch.setattr(native, "load", lambda path: replace(whole, operators=whole.operators - lacking))
    program = make_program("rocketkv, bounds in fp8", kv_cache="int8")
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1), profile=tmp_path)
    executor.allocate(3)
    tokens, positions, lengths = filled(executor)
    executor.decode(tokens, positions, lengths)
    calls = {one.name: one.calls for one in operator_times(executor.end_profiling()["decode"], warm_up=0)}
    of_a_layer = calls["KvcHybridAttention"] / program.model.num_hidden_layers
    assert of_a_layer > 100 if lacking else of_a_layer == 1, "a body is all of its nodes"


def turned(program: Program, threads: int) -> dict[str, Any]:
    """The logits, lengths and state of two rows after each of three turns, which compact where the policy does."""
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=threads))
    executor.allocate(2)
    prompts = np.zeros((2, 128), np.int64)
    lengths = np.array([100, 40])
    for row, ids in enumerate(tokens_of(*lengths)):
        prompts[row, : len(ids)] = ids
    prefilled = executor.prefill(prompts, lengths)
    for row in range(2):
        executor.insert(prefilled, row, row)
    entries, found = prefilled.cache_lengths, {}
    for number, new in enumerate((np.array([60, 9]), np.array([1, 60]), np.array([33, 2]))):
        block = np.random.default_rng(number).integers(2, 97, (2, 60))
        result = executor.extend(0, block, new, lengths, entries)
        lengths, entries = lengths + new, result.cache_lengths
        found |= {f"logits {number}": result.logits.copy(), f"lengths {number}": entries.copy()}
        found |= {f"{name} {number}": buffer.copy() for name, buffer in executor.buffers.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", TAKING_TURNS)
def test_turns_are_the_bodies_turns(
    make_program: Callable[..., Program], policy: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(policy, turns=True, **ROOM)
    bodies = turned(program, 1)
    monkeypatch.setenv(VARIABLE, str(library))
    for instructions in best_and_lowest(library):
        use(library, instructions)
        found = turned(program, 2)
        for name, expected in bodies.items():
            assert_close(found[name], expected, name=f"{name}, {instructions}")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), [one for one in IN_A_FORMAT if one[0] in TAKING_TURNS])
def test_turns_over_stored_caches_are_the_bodies_turns(
    make_program: Callable[..., Program], policy: str, form: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides round keys differently, so a code beside an edge may differ by one: far less than what the format
    changes."""
    bodies, exact = (turned(make_program(policy, turns=True, kv_cache=one, **ROOM), 1) for one in (form, AUTO))
    monkeypatch.setenv(VARIABLE, str(library))
    for instructions in best_and_lowest(library):
        use(library, instructions)
        found = turned(make_program(policy, turns=True, kv_cache=form, **ROOM), 2)
        for name in (one for one in bodies if one.startswith(("logits", "lengths"))):
            limit = SHARE * np.abs(bodies[name] - exact[name]).max()
            message = f"{name}, {instructions}"
            np.testing.assert_allclose(found[name], bodies[name], rtol=0, atol=limit, err_msg=message)


def test_while_a_prompt_fits_its_budget_a_sparse_engine_is_the_dense_one_bit_for_bit(
    make_program: Callable[..., Program], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(library))
    sparse, dense = (decoded(make_program(policy, token_budget=256), 2) for policy in ("rocketkv", "full"))
    np.testing.assert_array_equal(sparse["logits"], dense["logits"])


def test_steps_write_where_the_buffers_are(
    make_program: Callable[..., Program], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(library))
    executor = OnnxRuntimeExecutor(make_program("rocketkv"), RunOptions(threads=1))
    executor.allocate(3)
    tokens, positions, lengths = filled(executor)
    before = {name: buffer.copy() for name, buffer in executor.buffers.items()}
    executor.decode(tokens, positions, lengths)
    for name, buffer in executor.buffers.items():
        if "cache" in name:
            changed = (buffer != before[name]).any(axis=-1)
            expected = np.zeros(changed.shape, bool)
            expected[range(3), :, lengths[int(name.split(".")[1])]] = True
            np.testing.assert_array_equal(changed, expected, err_msg=name)
        else:
            assert (buffer != before[name]).any(axis=(1, 2, 3)).all(), name


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_engines_whose_graphs_call_onnx_runtimes_product_still_prepack_it(
    make_program: Callable[..., Program], precision: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines built before there was an operator for it: without prepacking, a step takes 50 times as long."""
    monkeypatch.setenv(VARIABLE, str(library))
    program = make_program("full", precision)
    whole = read_graph(program.decode)
    inlined = inline_selected_functions(whole, [(KVC_DOMAIN, QUANTISED_LINEAR.name)])
    assert any(node.op_type == CONTRIBUTED_PRODUCT for node in inlined.graph.node)
    assert OnnxRuntimeExecutor(replace(program, decode=lambda: inlined)).prepacks_decode
    assert not OnnxRuntimeExecutor(program).prepacks_decode


def test_caches_of_another_type_run_the_bodies(
    make_program: Callable[..., Program], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program("rocketkv", "fp16")
    bodies = decoded(program, 1)
    monkeypatch.setenv(VARIABLE, str(library))
    np.testing.assert_array_equal(decoded(program, 1)["logits"], bodies["logits"])
