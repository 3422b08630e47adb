"""Answers far longer than the cache: memory stays what it was after the first tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import psutil
import pytest

from kvc_trt import policies
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.engine.program import Program
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.runtime import Request, Sampling, Session
from tests.small_model import SMALL

ENGINES = {
    "streaming-llm": ("streaming-llm", {}),
    "streaming-llm ranked": ("streaming-llm", {"positions": "cache"}),
    "sliding-window": ("sliding-window", {}),
    "h2o": ("h2o", {}),
    "tova": ("tova", {}),
}
MODEL = replace(SMALL, num_hidden_layers=1, max_position_embeddings=200_000)
MIB = 1 << 20


def program(directory, policy, new_tokens, **settings):
    lengths = {"max_input_len": 100, "max_output_len": new_tokens}
    parameters = policies.resolve(policy, model=MODEL, token_budget=32, **lengths, **settings)
    path = directory / "weights.safetensors"
    write_weights(MODEL, RandomWeights(MODEL, 0), path, weights="fp32", length=parameters.max_sequence_len)
    weights = GraphWeights(path)
    return Program(
        MODEL, parameters, state_tensors(MODEL, parameters, weights.dtype), path,
        lambda: build_prefill(MODEL, parameters, weights=weights),
        lambda: build_decode(MODEL, parameters, weights=weights),
    )  # fmt: skip


def answer(directory, name, new_tokens):
    """One row of `new_tokens`; memory of the process after a fifth of them and at the end, bytes."""
    policy, settings = ENGINES[name]
    executor, process, memory = (
        OnnxRuntimeExecutor(program(directory, policy, new_tokens, **settings), threads=1),
        psutil.Process(),
        [],
    )
    session = Session(executor, None, 1)
    allocated, seen = executor.state_bytes(), 0

    def watch(_, event):
        nonlocal seen
        seen += 1
        if seen in (new_tokens // 5, new_tokens):
            memory.append(process.memory_info().rss)

    request = Request(
        list(range(2, 80)), max_new_tokens=new_tokens, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=0)
    )
    [output] = session.generate([request], watch)
    assert executor.state_bytes() == allocated == sum(tensor.bytes_per_row() for tensor in executor.program.state)
    assert (output.finish_reason, len(output.token_ids)) == ("length", new_tokens)
    assert output.logical_length == 78 + new_tokens - 1
    assert output.physical_lengths == executor.limits.capacities
    for tensor in executor.program.state:
        assert np.isfinite(executor.buffers[tensor.name]).all()
    return executor, memory


@pytest.mark.parametrize("name", ENGINES)
def test_an_answer_longer_than_the_cache_is_not_cut_short(tmp_path, name):
    executor, _ = answer(tmp_path, name, 1000)
    if name == "tova":
        positions = np.sort(executor.buffers["slot_positions.0"][0], axis=1)
        np.testing.assert_array_equal(positions[:, [0, -1]], [[-1, 78 + 998]] * 2)
        assert (np.diff(positions[:, 1:], axis=1) > 0).all()
        np.testing.assert_array_equal(positions[0], positions[1])
    if name == "h2o":
        positions = np.sort(executor.buffers["slot_positions.0"][0], axis=1)
        assert (positions[:, 0] == -1).all()
        np.testing.assert_array_equal(positions[:, -16:], np.broadcast_to(np.arange(78 + 999 - 16, 78 + 999), (2, 16)))


@pytest.mark.parametrize("name", ENGINES)
def test_in_place_it_is_what_it_is_in_separate_memory(tmp_path, name):
    """Sums and positions are read and written in the same buffers; so is a ring that turns."""
    policy, settings = ENGINES[name]
    executor = OnnxRuntimeExecutor(program(tmp_path, policy, 60, **settings), threads=1)
    executor.allocate(2)
    prompts, lengths = np.random.default_rng(0).integers(2, 97, (2, 128)), np.array([70, 9])
    prefilled = executor.prefill(prompts, lengths)
    for row in range(2):
        executor.insert(prefilled, row, row)
    state, stored = dict(prefilled.state), prefilled.cache_lengths
    for step, tokens in enumerate(np.random.default_rng(1).integers(2, 97, (50, 2))):
        feeds = {"token": tokens, "positions": lengths + step, "cache_lengths": stored + step, **state}
        logits, *after = executor.decode_session.run(None, feeds)
        np.testing.assert_array_equal(executor.decode(tokens, lengths + step, stored + step), logits)
        state = {tensor.name: found for tensor, found in zip(executor.program.state, after, strict=True)}
        for tensor in executor.program.state:
            np.testing.assert_array_equal(executor.buffers[tensor.name], state[tensor.name], tensor.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_a_hundred_thousand_tokens_take_no_more_memory(tmp_path, name):
    _, (early, late) = answer(tmp_path, name, 100_000)
    assert late - early < 32 * MIB  # of which the answer itself takes a few
