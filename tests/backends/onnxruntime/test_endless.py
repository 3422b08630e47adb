"""Answers far longer than the cache: memory does not grow after the first tokens."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.runtime import Request, Sampling, Session
from tests.small_model import SMALL
from tests.small_programs import SmallPrograms

POLICIES = ("streaming-llm", "streaming-llm, positions of the cache", "sliding-window", "h2o", "tova")
"""Policies whose caches are all full after a prompt, so that each step takes the place of an earlier token."""
MODEL = replace(SMALL, num_hidden_layers=1, max_position_embeddings=200_000)
MIB = 1 << 20


@pytest.fixture
def executor_of(make_program):
    """executor_of(name, new_tokens): for a row of so long an answer."""
    return lambda name, new_tokens: made_executor(make_program, name, new_tokens)


def made_executor(make_program, name, new_tokens):
    program = make_program(name, model=MODEL, token_budget=32, max_input_len=100, max_output_len=new_tokens)
    return OnnxRuntimeExecutor(program, RunOptions(threads=1))


def answer(executor, new_tokens):
    """Answer one row with `new_tokens`; the memory of the process must stand still in at least a fifth of them."""
    process, memory, session = psutil.Process(), [], Session(executor, None, 1)
    allocated, seen = executor.state_bytes(), 0
    addresses = {name: buffer.ctypes.data for name, buffer in executor.buffers.items()}

    def watch(_, event):
        nonlocal seen
        seen += 1
        if seen % (new_tokens // 5) == 0:
            memory.append(process.memory_info().rss)

    request = Request(
        list(range(2, 80)), max_new_tokens=new_tokens, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=0)
    )
    [output] = session.generate([request], watch)
    assert {name: buffer.ctypes.data for name, buffer in executor.buffers.items()} == addresses
    assert executor.state_bytes() == allocated == sum(tensor.bytes_per_row() for tensor in executor.program.state)
    assert (output.finish_reason, len(output.token_ids)) == ("length", new_tokens)
    assert output.logical_length == 78 + new_tokens - 1
    assert output.physical_lengths == executor.limits.capacities
    for tensor in executor.program.state:
        assert np.isfinite(executor.buffers[tensor.name]).all()
    # A process may grow once for reasons of its own; what stores tokens grows in every fifth.
    stored = MODEL.num_hidden_layers * 2 * MODEL.num_key_value_heads * MODEL.head_size * 4 * (new_tokens // 5)
    assert len(memory) == 5
    assert np.diff(memory).min() < MIB // 4 + stored // 2, "as if the tokens between were stored"


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_longer_than_the_cache_is_not_cut_short(executor_of, name):
    answer(executor := executor_of(name, 1000), 1000)
    if name == "tova":
        positions = np.sort(executor.buffers["slot_positions.0"][0], axis=1)
        np.testing.assert_array_equal(positions[:, [0, -1]], [[-1, 78 + 998]] * 2)
        assert (np.diff(positions[:, 1:], axis=1) > 0).all()
        np.testing.assert_array_equal(positions[0], positions[1])
    if name == "h2o":
        positions = np.sort(executor.buffers["slot_positions.0"][0], axis=1)
        assert (positions[:, 0] == -1).all()
        np.testing.assert_array_equal(positions[:, -16:], np.broadcast_to(np.arange(78 + 999 - 16, 78 + 999), (2, 16)))


@pytest.mark.parametrize("name", POLICIES)
def test_steps_in_place_equal_steps_in_separate_memory(executor_of, name):
    """Sums and positions are read and written in the same buffers; so is a ring that turns."""
    executor = executor_of(name, 60)
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


def answer_in_a_process_of_its_own(name, new_tokens, folder):
    """In a process of many tests an allocator takes back, a little at every step, what others had freed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(_answer_here, name, new_tokens, folder).result()


def _answer_here(name: str, new_tokens: int, folder: Path) -> None:
    answer(made_executor(SmallPrograms(folder), name, new_tokens), new_tokens)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_twenty_thousand_tokens_take_no_more_memory(name, tmp_path):
    """A ring, whose steps write to the oldest slot, and a cache whose steps choose one."""
    answer_in_a_process_of_its_own(name, 20_000, tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_thousand_tokens_take_no_more_memory(name, tmp_path):
    answer_in_a_process_of_its_own(name, 100_000, tmp_path)
