"""Synthetic caches could be the result of a prefill of that length."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.program import engine_program, twin_program
from kvc_trt.graph.build import build_decode, build_prefill
from kvc_trt.graph.state import cache_sites, state_tensors
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.operators.cached_vectors import cached_vectors
from kvc_trt.operators.fp8_bounds import values_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.policies import available, resolve
from kvc_trt.profile.profiled_engine import DecodeRun, open_profiled, random_prompts, twin_for
from kvc_trt.profile.traffic import entries_by_cache


@pytest.mark.parametrize("context", [1, 63, 200, 512])
def test_a_synthetic_cache_has_entries_bounds_and_zero_padding(engine, context):
    torch = pytest.importorskip("torch")
    from kvc_trt.reference import page_bounds

    subject = open_profiled("engine", engine_program(engine), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    DecodeRun(subject, 2, context)
    parameters, buffers = engine.parameters, subject.executor.buffers
    kept = parameters.kept_of(context)
    size = engine.model.head_size
    for layer in range(engine.model.num_hidden_layers):
        keys, bounds = buffers[f"k_cache.{layer}"], buffers[f"bounds.{layer}"]
        assert np.count_nonzero(keys[:, :, :kept]) == keys[:, :, :kept].size
        assert not keys[:, :, kept:].any()
        lengths = torch.full((2,), kept)
        low, high = page_bounds(torch.from_numpy(keys), lengths, parameters.page_size)
        filled = -(-kept // parameters.page_size)
        np.testing.assert_array_equal(bounds[:, :, :size, :filled].transpose(0, 1, 3, 2), high[:, :, :filled].numpy())
        np.testing.assert_array_equal(bounds[:, :, size:, :filled].transpose(0, 1, 3, 2), -low[:, :, :filled].numpy())
        empty = bounds[:, :, :, filled:]
        assert (empty == np.finfo(np.float32).min).all()


def test_a_run_starts_again_before_the_cache_is_full(engine):
    subject = open_profiled("engine", engine_program(engine), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    run = DecodeRun(subject, 1, engine.parameters.max_input_len)
    seconds = [run.step_seconds() for _ in range(engine.parameters.max_output_len + 3)]
    assert all(second > 0 for second in seconds)
    assert subject.executor.runs == len(seconds)


def test_a_twin_for_a_shorter_prompt_has_shorter_caches(engine):
    program = engine_program(engine)
    assert {tensor.shape[1] for tensor in twin_program(program).state} == {544}
    twin = twin_for(program, 100)
    assert {tensor.shape[1] for tensor in twin.state} == {132}
    assert twin.parameters.policy == "full"
    subject = open_profiled("dense", twin, OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    assert subject.prefill_seconds(random_prompts(2, 100, engine.model.vocab_size)) > 0
    assert DecodeRun(subject, 2, 100).step_seconds() > 0


_WITH_ENGINES = [name for name, *_ in available() if not name.startswith("exact-topk")]


@pytest.mark.parametrize("policy", _WITH_ENGINES)
@pytest.mark.parametrize("context", [40, 512])
def test_caches_of_every_policy_can_be_filled_and_stepped(engine, policy, context):
    settings = {"model": engine.model, "token_budget": 128, "max_input_len": 512, "max_output_len": 8}
    if policy == "duo-attention":  # a layer with two caches of unlike size
        scores = [[1.0] + [0.0] * (engine.model.num_key_value_heads - 1)] * engine.model.num_hidden_layers
        settings |= {"token_budget": 256, "sinks": 4, "recent": 60, "head_scores": scores}
    subject = open_profiled(
        policy, _program(engine, resolve(policy, **settings)), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32")
    )
    caches = {tensor.cache for tensor in subject.program.state}
    if policy == "duo-attention":
        assert len(caches) > engine.model.num_hidden_layers
    assert DecodeRun(subject, 2, context).step_seconds() > 0


@pytest.mark.parametrize(
    ("policy", "kv_cache"), list(zip(_WITH_ENGINES, itertools.cycle(["int8", "int4", "fp8", "k8v4"]), strict=False))
)
def test_caches_in_a_format_are_filled_with_what_is_stored(engine, policy, kv_cache):
    torch = pytest.importorskip("torch")
    from kvc_trt.reference import page_bounds

    settings = {"model": engine.model, "token_budget": 128, "max_input_len": 512, "max_output_len": 8}
    if policy == "duo-attention":
        settings["token_budget"] = 640  # no head retrieves
    parameters = resolve(policy, **settings, kv_cache=kv_cache)
    subject = open_profiled(
        policy, _program(engine, parameters), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32")
    )
    run, buffers = DecodeRun(subject, 2, 300), subject.executor.buffers
    last = cache_sites(engine.model, parameters)[-1].name
    state = {name.partition(".")[0]: array for name, array in buffers.items() if name.endswith(f".{last}")}
    kept = entries_by_cache(engine.model, parameters, 300)[-1]
    for tensor in (K_CACHE, V_CACHE):
        stored = cached_vectors(state, tensor, parameters.cache_format)
        assert all(not part[:, :, kept:].any() for part in stored.parts)
        assert 0.9 < stored.values()[:, :, :kept].std() < 1.3
    if "bounds" in state:
        keys = torch.from_numpy(cached_vectors(state, K_CACHE, parameters.cache_format).values())
        low, high = page_bounds(keys, torch.full((2,), kept), parameters.page_size, fp8=True)
        size, pages = engine.model.head_size, low.shape[2]
        found = values_of(state["bounds"])[:, :, :, :pages].transpose(0, 1, 3, 2)
        filled = -(-kept // parameters.page_size)
        np.testing.assert_array_equal(found[:, :, :filled, :size], high[:, :, :filled].numpy())
        np.testing.assert_array_equal(found[:, :, :filled, size:], -low[:, :, :filled].numpy())
    assert run.step_seconds() > 0


def test_heavy_hitters_know_the_position_of_every_entry(engine):
    parameters = resolve("h2o", model=engine.model, token_budget=64, max_input_len=512, max_output_len=8)
    subject = open_profiled("h2o", _program(engine, parameters), OnnxRuntimeBenchmark(RunOptions(threads=1), "float32"))
    DecodeRun(subject, 1, 512)
    positions, scores = (subject.executor.buffers[f"{kind}.0"] for kind in ("slot_positions", "scores"))
    assert positions.shape[-1] == 65
    assert (positions[:, :, :64] == np.arange(64)).all()
    assert (positions[:, :, 64:] == -1).all()
    assert (scores[:, :, :64] > 0).all()


def _program(engine, parameters):
    weights = GraphWeights(engine.weight_file)
    return dataclasses.replace(
        engine_program(engine),
        parameters=parameters,
        state=state_tensors(engine.model, parameters, "float32"),
        prefill=lambda: build_prefill(engine.model, parameters, weights=weights),
        decode=lambda: build_decode(engine.model, parameters, weights=weights),
    )


def test_random_prompts_follow_their_seed():
    assert (random_prompts(2, 9, 50) == random_prompts(2, 9, 50)).all()
    assert random_prompts(2, 9, 50).max() < 50
