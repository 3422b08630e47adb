"""Synthetic caches are what a prefill of that length could have left behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.backends.onnxruntime.program import engine_program, twin_program
from kvc_trt.profile.subject import DecodeRun, open_subject, random_prompts, twin_for


@pytest.mark.parametrize("context", [1, 63, 200, 512])
def test_entries_bounds_and_padding(engine, context):
    torch = pytest.importorskip("torch")
    from kvc_trt.reference import page_bounds

    subject = open_subject("engine", engine_program(engine), 1)
    DecodeRun(subject, 2, context)
    parameters, buffers = engine.parameters, subject.executor.buffers
    kept = min(context, parameters.prompt_budget)
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
    subject = open_subject("engine", engine_program(engine), 1)
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
    subject = open_subject("dense", twin, 1)
    assert subject.prefill_seconds(random_prompts(2, 100, engine.model.vocab_size)) > 0
    assert DecodeRun(subject, 2, 100).step_seconds() > 0


def test_prompts_are_seeded():
    assert (random_prompts(2, 9, 50) == random_prompts(2, 9, 50)).all()
    assert random_prompts(2, 9, 50).max() < 50
