"""Every policy runs in PyTorch, with a kernel or without one, and gives the reference's results."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.torch import device as device_module
from kvc_trt.backends.torch import memory
from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.policy_path import policy_path
from kvc_trt.graph.state import cache_sites
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.kernels import use_library
from kvc_trt.methods.base.registry import method
from kvc_trt.reference.model.decoder import ReferenceDecoder
from kvc_trt.runtime import Request, Session, Speculation
from kvc_trt.runtime.session.batch import batch_of
from kvc_trt.verify.engine_run import run
from tests.backends.torch.meta import LiveBytes
from tests.backends.torch.without_kernels import without_kernels
from tests.contexts.test_continuing import session_of, steps, through_a_file
from tests.every_policy import CASES, CHECKING_DRAFTS, EVERY, TAKING_TURNS
from tests.runtime.test_speculation import Always

STEPS = 4
COUNTS = st.integers(1, 40)
"""New tokens of a turn."""


@pytest.fixture(scope="module")
def program(make_program):
    """program(case, precision): its program, with turns where the policy takes them."""
    return cache(partial(make_program, turns=True, max_output_len=40))


def reference_of(program):
    rule = method(program.parameters)
    weights = EngineWeights(program.weight_file)
    return ReferenceDecoder(program.model, weights, method=rule, parameters=program.parameters)


def lists_of(program):
    """Return the lists that a run can show: the tokens kept of prompts, and the tokens that a step reads."""
    sites = cache_sites(program.model, program.parameters)
    kept = [(f"indices.{site.name}", site.cache) for site in sites if site.parameters.eviction.evicts]
    read = [(f"selected.{site.name}", site.cache) for site in sites if site.parameters.reads_a_part]
    return kept, read


@cache
def opened(program):
    kept, read = lists_of(program)
    return TorchExecutor(program, expose=[name for name, _ in (*kept, *read)], device="cpu"), reference_of(program)


def same_lists(found, expected):
    """Lists [B,.,n], ascending and -1 past the end; one may be wider."""
    width = min(found.shape[2], expected.shape[2])
    np.testing.assert_array_equal(found[..., :width], expected[..., :width])
    assert (found[..., width:] == -1).all()
    assert (expected[..., width:] == -1).all()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6, derandomize=True)
@given(lengths=st.lists(st.integers(1, 256), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_prompts_and_steps_are_the_references(name, program, lengths, seed):
    made = program(name)
    executor, reference = opened(made)
    kept, read = lists_of(made)
    generator = np.random.default_rng(seed)
    batch = batch_of([generator.integers(2, 97, length).tolist() for length in lengths])
    expected, cache = reference.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    expected = [expected.numpy()]

    def after_prefill():
        for listed, index in kept:
            same_lists(executor.exposed(listed), cache.caches[index].indices.numpy())

    found = run(executor, batch, 0, after_prefill=after_prefill)
    logits, stored = [found.logits[0]], found.cache_lengths
    for step in range(STEPS):
        tokens = generator.integers(2, 97, len(lengths))
        logits.append(executor.decode(tokens, batch.prompt_lengths + step, stored + step).copy())
        expected.append(reference.decode(torch.from_numpy(tokens), cache).numpy())
        for listed, index in read:
            if (selected := cache.caches[index].selected) is not None:
                same_lists(executor.exposed(listed), selected.numpy())
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.array(logits) / scale, np.array(expected) / scale, atol=1e-5, rtol=0)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", TAKING_TURNS)
@settings(max_examples=3, derandomize=True)
@given(turns=st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=2), seed=st.integers(0, 9))
def test_turns_are_the_references(name, program, turns, seed):
    made = program(name)
    executor, reference = TorchExecutor(made, device="cpu"), reference_of(made)
    generator = np.random.default_rng(seed)
    prompts, positions = generator.integers(2, 97, (2, 90)), np.array([90, 20])
    executor.allocate(3)
    prefilled = executor.prefill(prompts, positions)
    for row in range(2):
        executor.insert(prefilled, row, row + 1)
    _, cache = reference.prefill(torch.from_numpy(prompts), torch.from_numpy(positions))
    stored = prefilled.cache_lengths
    for counts in map(np.array, turns):
        if (stored + counts > np.array(made.capacities)[:, None]).any() and not made.parameters.evicts_on_turns:
            break
        block = generator.integers(2, 97, (2, counts.max()))
        found = executor.extend(1, block, counts, positions, stored)
        logits = reference.extend(torch.from_numpy(block), torch.from_numpy(counts), cache)
        np.testing.assert_allclose(found.logits, logits.numpy(), atol=2e-4)
        stored, positions = found.cache_lengths, positions + counts
        for site, layer in zip(cache_sites(made.model, made.parameters), cache.caches, strict=True):
            held = np.minimum(stored[site.cache], site.parameters.capacity - site.parameters.spare_slots)
            np.testing.assert_array_equal(held, layer.lengths.numpy())
    assert all((buffer[0] == buffer[0].flat[0]).all() for buffer in executor.buffers.values()), "another row changed"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_rows_answer_alone_as_in_a_batch(name, program):
    executor = TorchExecutor(program(name), device="cpu")
    generator = np.random.default_rng(7)
    requests = [Request(generator.integers(2, 97, n).tolist(), max_new_tokens=8) for n in (200, 30, 7)]
    together = Session(executor, None, 3).generate(requests)
    for request, expected in zip(requests, together, strict=True):
        assert Session(executor, None, 1).generate([request])[0].token_ids == expected.token_ids


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKING_DRAFTS)
def test_drafts_change_no_answer(name, program, monkeypatch):
    monkeypatch.setattr("kvc_trt.runtime.session.drafting.Payoff", Always)
    made = replace(program(name), draft=program(name).decode, draft_tokens=3)
    executor = TorchExecutor(made, device="cpu")
    phrase = np.random.default_rng(5).integers(2, 97, 20).tolist()
    requests = [Request(phrase * 8, max_new_tokens=24, ignore_eos=True), Request(phrase * 2, max_new_tokens=10)]
    expected = Session(executor, None, 2).generate(requests)
    session = Session(executor, None, 2, speculation=Speculation())
    assert [output.token_ids for output in session.generate(requests)] == [output.token_ids for output in expected]
    assert session.timings.draft_runs > 0


@pytest.mark.parametrize("name", without_kernels())
def test_a_row_goes_on_from_a_stored_context_bit_for_bit(name, program, tmp_path):
    made, executor = program(name), partial(TorchExecutor, device="cpu")
    running, restored = (session_of(made, executor=executor) for _ in range(2))
    prompt, options = np.random.default_rng(3).integers(2, 97, 200).tolist(), {"ignore_eos": True, "keep_logits": True}
    (row,) = running.add([Request(prompt, 8, **options)])
    steps(running, 3)
    stored = through_a_file(running.take(row), made, tmp_path)
    (again,) = restored.add([Request([], 8, context=stored, **options)])
    assert [seen[again] for seen in steps(restored, 4)] == [seen[row] for seen in steps(running, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", without_kernels())
def test_a_prefill_stays_below_its_bound(name, program):
    made = program(name)
    decoder = TorchExecutor(made, device="cpu").decoder
    batch = batch_of([np.random.default_rng(n).integers(2, 97, n).tolist() for n in (256, 250, 9)])
    with LiveBytes() as live:
        decoder.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    assert live.most <= memory.prefill_bound(made, 3, 256, itemsize=4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["quest", "sparq", "h2o", "tova", "streaming-llm", "keydiff", "expected-attention"])
def test_a_16_bit_cache_stays_near_the_reference(name, precision, program):
    """The reference's caches are float32, so of rounding this coarse only the prompt's logits can be judged."""
    made = program(name, precision)
    executor, reference = TorchExecutor(made, device="cpu"), reference_of(made)
    batch = batch_of([np.random.default_rng(1).integers(2, 97, n).tolist() for n in (250, 40)])
    found = run(executor, batch, STEPS)
    expected, _ = reference.prefill(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.prompt_lengths))
    assert np.abs(found.logits[0] - expected.numpy()).max() <= 1e-3 * max(1.0, np.abs(expected.numpy()).max())
    assert np.isfinite(found.logits).all()
    kinds = {name.partition(".")[0]: buffer.dtype.name for name, buffer in executor.buffers.items()}
    assert kinds["k_cache"] == {"fp16": "float16", "bf16": "bfloat16"}[precision]


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "rocketkv-mt", "expected-attention-hybrid"])
def test_operators_with_a_kernel_call_it(name, program, emulation, monkeypatch):
    """Checks policies that have kernels for some of their operators only."""
    made = program(name)
    batch = batch_of([np.random.default_rng(2).integers(2, 97, n).tolist() for n in (200, 40)])
    expected = run(TorchExecutor(made, device="cpu"), batch, STEPS)
    called, compute = [], type(emulation).compute

    def counting(self, operator, *arguments, **options):
        called.append(operator.name)
        return compute(self, operator, *arguments, **options)

    monkeypatch.setattr(type(emulation), "compute", counting)
    with use_library(emulation.path):
        found = run(TorchExecutor(made), batch, STEPS, tokens=expected.tokens)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
    steps = [name for name in called if name.endswith(("DenseAttention", "HybridAttention"))]
    assert len(steps) == STEPS * made.model.num_hidden_layers


def test_the_path_is_named_once_when_an_engine_is_opened(program, caplog):
    device_module.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            TorchExecutor(program("quest"), device="cpu")
        TorchExecutor(program("rocketkv"), device="cpu")
    said = "quest: selection and attention run as PyTorch operations, no kernel of ours"
    assert [record.message for record in caplog.records if "PyTorch operations" in record.message] == [said]


def test_every_policy_is_on_one_of_the_paths(program):
    """Kernels for all of it, for its steps, for its eviction, between other operations, or none."""
    paths = {name: policy_path(program(name).model, program(name).parameters) for name in EVERY}
    kinds = {name: path and (path.eviction, path.steps, path.plain_steps) for name, path in paths.items()}
    assert {kinds[name] for name in ("full", "rocketkv", "snapkv++", "hybrid", "snapkv-gqa", "pyramidkv")} == {None}
    assert {kinds[name] for name in ("keydiff", "expected-attention", "expected-attention-hybrid")} == {
        (False, True, True)
    }
    assert {kinds[name] for name in ("quest", "sparq")} == {(True, False, False)}
    assert {kinds[name] for name in ("snapkv", "rocketkv-mt")} == {(True, True, False)}
    evicting = ("streaming-llm", "sliding-window", "h2o", "tova", "duo-attention")
    assert {kinds[name] for name in evicting} == {(False, False, False)}
