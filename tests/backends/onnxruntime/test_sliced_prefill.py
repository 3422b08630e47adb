"""A prefill in slices gives the bits of the whole graph, within the memory and the order of its plan."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import read_graph
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.models.config import Attention, ModelDescription
from kvc_trt.operators import PROMPT_BLOCK
from tests.every_policy import EVERY
from tests.slices import result_of
from tests.small_model import SMALL

ROOM = {"max_input_len": 700, "token_budget": 96}
ROOT = Path(__file__).resolve().parents[3]
TINY, LONG = 1e-9, 1e9
"""Limits that make every piece a slice, and the whole prompt one."""


def prompt(length, seed=0):
    ids = np.zeros((1, -(-length // PROMPT_BLOCK) * PROMPT_BLOCK), np.int64)
    ids[0, :length] = np.random.default_rng(seed).integers(2, SMALL.vocab_size, length)
    return ids, np.array([length])


def drained(slices):
    """Return the result, and the number of slices."""
    result, yielded = result_of(slices)
    return result, len(yielded) + 1


def assert_same(found, expected):
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_array_equal(found.cache_lengths, expected.cache_lengths)
    assert found.state.keys() == expected.state.keys()
    for name, values in expected.state.items():
        np.testing.assert_array_equal(found.state[name], values, err_msg=name)


STORED = [("rocketkv", "int8"), ("h2o", "fp8"), ("sparq", "int4"), ("rocketkv-mt", "k8v4")]


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "kv_cache"), [*((policy, AUTO) for policy in EVERY), *STORED])
def test_every_policy_gets_the_whole_graphs_result_bit_for_bit(make_program, policy, kv_cache):
    program = make_program(policy, kv_cache=kv_cache, **ROOM)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    for length in (700, 65):
        expected = executor.prefill(*prompt(length))
        found, slices = drained(executor.prefill_in_slices(*prompt(length), TINY))
        assert_same(found, expected)
        assert slices > (SMALL.num_hidden_layers + 1) * -(-length // PROMPT_BLOCK)


@pytest.fixture(scope="module")
def executor(make_program):
    """One whose prefill is cut once, for tests that leave it as it is."""
    return OnnxRuntimeExecutor(make_program("rocketkv", **ROOM), RunOptions(threads=1))


@pytest.fixture(scope="module")
def executors(make_program):
    """Executors by number of threads, for the compositions whose stores differ most."""
    made = {
        "rocketkv": make_program("rocketkv, a skipped layer", **ROOM),
        "squeeze": make_program("snapkv++, budgets from the prompt", **ROOM),
        "h2o": make_program("h2o", **ROOM),
    }
    return {
        (name, threads): OnnxRuntimeExecutor(program, RunOptions(threads=threads))
        for name, program in made.items()
        for threads in (1, 2, 3)
    }


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.sampled_from(["rocketkv", "squeeze", "h2o"]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 700),
    st.sampled_from([TINY, 1e-4, 5e-4, 2e-3, LONG]),
    st.integers(0, 1000),
)
def test_any_length_threads_and_limit_give_the_same_bits(executors, policy, threads, length, limit, seed):
    executor = executors[policy, threads]
    found, slices = drained(executor.prefill_in_slices(*prompt(length, seed), limit))
    assert_same(found, executor.prefill(*prompt(length, seed)))
    if limit == LONG:
        assert slices == 1


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_give_the_same_bits(make_program, precision):
    executor = OnnxRuntimeExecutor(make_program("rocketkv", precision, **ROOM), RunOptions(threads=2))
    found, _ = drained(executor.prefill_in_slices(*prompt(500), TINY))
    assert_same(found, executor.prefill(*prompt(500)))


@pytest.mark.parametrize("learned", [True, False])
def test_models_that_do_not_rotate_give_the_same_bits(make_program, learned):
    """Blocks of tokens get their rows of learned positions; without those, no part has positions."""
    description = ModelDescription(attention=(Attention(rotary=False),), learned_positions=learned)
    program = make_program("rocketkv", model=replace(SMALL, description=description), **ROOM)
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
    found, slices = drained(executor.prefill_in_slices(*prompt(500), TINY))
    assert_same(found, executor.prefill(*prompt(500)))
    assert slices > SMALL.num_hidden_layers + 1


def test_half_precision_is_one_slice_since_parts_would_round_more_often(make_program):
    executor = OnnxRuntimeExecutor(make_program("rocketkv", "fp16", **ROOM), RunOptions(threads=1))
    executor.prepare_slices()
    found, slices = drained(executor.prefill_in_slices(*prompt(500), TINY))
    assert slices == 1
    assert_same(found, executor.prefill(*prompt(500)))


def test_native_operators_give_the_same_bits(make_program, library, monkeypatch):
    monkeypatch.setenv("KVC_TRT_CPU_KERNELS", str(library))
    for precision in ("fp32", "int8"):
        executor = OnnxRuntimeExecutor(make_program("rocketkv", precision, **ROOM), RunOptions(threads=2))
        for limit in (TINY, 5e-4):
            found, _ = drained(executor.prefill_in_slices(*prompt(650), limit))
            assert_same(found, executor.prefill(*prompt(650)))


def test_an_engine_whose_attention_takes_all_queries_is_cut_too(executor):
    """The body of the whole attention counts keys from the first query; the body of the parts does not."""
    program = executor.program
    graph = read_graph(program.prefill)
    (body,) = (one for one in graph.functions if one.name == "KvcPrefillAttention")
    del body.node[:]
    expected = executor.prefill(*prompt(600))
    cut = OnnxRuntimeExecutor(replace(program, prefill=lambda: graph), RunOptions(threads=1))
    assert_same(drained(cut.prefill_in_slices(*prompt(600), TINY))[0], expected)


def test_kept_indices_are_the_whole_graphs(make_program):
    program = make_program("rocketkv, a skipped layer", **ROOM)
    names = [f"indices.{layer}" for layer in (1, 2)]
    executor = OnnxRuntimeExecutor(program, RunOptions(threads=1), expose=names)
    executor.prefill(*prompt(600))
    expected = {name: executor.exposed(name).copy() for name in names}
    drained(executor.prefill_in_slices(*prompt(600, seed=1), TINY))
    assert any((executor.exposed(name) != expected[name]).any() for name in names)
    drained(executor.prefill_in_slices(*prompt(600), TINY))
    for name in names:
        np.testing.assert_array_equal(executor.exposed(name), expected[name])


def test_other_prefills_and_steps_in_between_change_nothing(executor):
    executor.allocate(1)
    expected = executor.prefill(*prompt(600))
    one, other = (executor.prefill_in_slices(*prompt(600, seed), TINY) for seed in (0, 1))
    next(one)
    next(other)
    for _ in range(3):
        next(one)
        executor.decode(np.array([5]), np.array([3]), np.full((3, 1), 3))
        next(other)
    assert_same(drained(one)[0], expected)
    assert_same(drained(other)[0], executor.prefill(*prompt(600, 1)))


def test_a_prefill_that_is_closed_leaves_nothing_behind(executor):
    slices = executor.prefill_in_slices(*prompt(600), TINY)
    next(slices)
    next(slices)
    slices.close()
    del slices
    gc.collect()
    assert_same(drained(executor.prefill_in_slices(*prompt(300), TINY))[0], executor.prefill(*prompt(300)))


def test_equal_layers_share_a_session_and_the_weights_stay_in_the_file(make_program):
    executor = OnnxRuntimeExecutor(make_program("snapkv++", **ROOM), RunOptions(threads=1))
    sliced = executor._sliced
    middle = sliced._steps[1:-1]
    assert len({step.session for step in middle}) == 1
    assert len({store.session for store in sliced._stores[:-2]}) == 1
    first, last = np.asarray(executor._weights._bytes).ctypes.data, executor._weights._bytes.nbytes
    for step in sliced._steps:
        for weight in step._weights:
            assert first <= weight.data_ptr() < first + last


def test_at_most_two_layers_keys_and_values_live_at_a_time(executor):
    sliced, (ids, lengths) = executor._sliced, prompt(600)
    prefilled = executor._empty(1)
    results = {"logits": prefilled.logits, "cache_lengths": prefilled.cache_lengths, **prefilled.state}
    slices = sliced.run(sliced.slices(640, TINY), {"input_ids": ids, "prompt_lengths": lengths}, results)
    keys_and_values = {name for step in sliced._steps for name in step.part.up_to_block}
    layers = set()
    for _ in slices:
        values = slices.gi_frame.f_locals["values"]._values
        alive = {name.split("/")[0] for name in keys_and_values.intersection(values)}
        assert len(alive) <= 2
        layers |= alive
    assert len(layers) == SMALL.num_hidden_layers


PEAK = """
import pickle, sys
from kvc_trt.backends.host_memory import watch_memory
from tests.backends.onnxruntime.test_sliced_prefill import drained, prompt
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
program = pickle.loads(open(sys.argv[1], "rb").read())
executor = OnnxRuntimeExecutor(program, RunOptions(threads=1))
executor.prepare_slices()
executor.load()
with watch_memory() as peak:
    drained(executor.prefill_in_slices(*prompt(8000), float(sys.argv[2])))
print(peak.above)
"""


@pytest.mark.slow
def test_a_prompt_in_slices_takes_no_more_memory_than_in_one_piece(make_program, tmp_path):
    program = make_program("rocketkv", max_input_len=8000, token_budget=96)
    (tmp_path / "program").write_bytes(pickle.dumps(program))
    whole, in_slices = (
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(tmp_path / "program"), limit],
                capture_output=True, text=True, check=True, cwd=ROOT, timeout=300,
            ).stdout
        )
        for limit in ("1e9", "1e-9")
    )  # fmt: skip
    assert whole > 20e6
    assert in_slices <= whole


def test_a_prompt_in_slices_is_one_prompt(executor):
    ids = np.zeros((2, PROMPT_BLOCK), np.int64)
    with pytest.raises(ValueError, match="one prompt, found 2"):
        next(executor.prefill_in_slices(ids, np.array([5, 7]), TINY))
