"""Turns in PyTorch: the reference's logits, choices and caches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvc_trt.backends.torch.executor import TorchExecutor
from kvc_trt.backends.torch.model.prompt_attention import PLAN_BUCKET, bucketed, prefill_attention, turn_attention
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.graph.state import cache_sites
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.methods.base.registry import method
from kvc_trt.operators.fp8_bounds import codes_of
from kvc_trt.reference.model.decoder import ReferenceDecoder
from tests.close_bounds import may_be_of_close

POLICIES = (
    "full", "hybrid", "rocketkv", "snapkv++", "rocketkv, a skipped layer", "snapkv-gqa", "hybrid, bounds in fp8",
    "rocketkv, bounds in fp8",
)  # fmt: skip


def executor_of(make_program, policy: str) -> TorchExecutor:
    lengths = {"max_input_len": 400, "max_output_len": 300 if policy.startswith(("full", "hybrid")) else 8}
    return TorchExecutor(make_program(policy, turns=True, **lengths), device="cpu")


def test_all_logits_are_those_of_every_token(make_program):
    last = executor_of(make_program, "rocketkv")
    every = TorchExecutor(replace(last.program, all_logits=True), device="cpu")
    prompts, block = (
        np.random.default_rng(1).integers(2, 97, (1, 90)),
        np.random.default_rng(2).integers(2, 97, (1, 12)),
    )

    def after(executor, count):
        executor.allocate(1)
        prefilled = executor.prefill(prompts, np.array([90]))
        executor.insert(prefilled, 0, 0)
        return executor.extend(0, block[:, :count], np.array([count]), np.array([90]), prefilled.cache_lengths)

    found = after(every, 12)
    assert found.all_logits.shape == (1, 12, every.limits.vocab_size)
    np.testing.assert_array_equal(found.all_logits[:, -1], found.logits)
    for count in (1, 5, 12):
        np.testing.assert_allclose(found.all_logits[:, count - 1], after(last, count).logits, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_equal_the_reference(policy, make_program):
    executor = executor_of(make_program, policy)
    program = executor.program
    decoder = ReferenceDecoder(
        program.model, EngineWeights(program.weight_file),
        method=method(program.parameters), parameters=program.parameters,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    prompts, lengths = generator.integers(2, 97, (2, 90)), np.array([90, 20])
    executor.allocate(3)
    prefilled = executor.prefill(prompts, lengths)
    for row in range(2):
        executor.insert(prefilled, row, row + 1)
    _, cache = decoder.prefill(torch.from_numpy(prompts), torch.from_numpy(lengths))
    positions, stored = lengths, prefilled.cache_lengths
    for turn in ((50, 3), (1, 140)):
        block, counts = generator.integers(2, 97, (2, max(turn))), np.array(turn)
        found = executor.extend(1, block, counts, positions, stored)
        logits = decoder.extend(torch.from_numpy(block), torch.from_numpy(counts), cache)
        np.testing.assert_allclose(found.logits, logits.numpy(), atol=2e-4)
        positions, stored = positions + counts, found.cache_lengths
        for site, layer in zip(cache_sites(program.model, program.parameters), cache.caches, strict=True):
            np.testing.assert_array_equal(stored[site.cache], layer.lengths.numpy())
            np.testing.assert_allclose(executor.buffers[f"k_cache.{site.name}"][1:], layer.keys.numpy(), atol=2e-4)
            if site.parameters.evicts_on_turns:
                kept = executor.buffers[f"slot_positions.{site.name}"][1:, :, : layer.indices.shape[2]]
                np.testing.assert_array_equal(kept, layer.indices.numpy())
            if site.parameters.has_pages:
                page_max = layer.page_max.numpy().transpose(0, 1, 3, 2)
                size = page_max.shape[2]
                bounds = executor.buffers[f"bounds.{site.name}"][1:, :, :size, : page_max.shape[3]]
                used = np.isfinite(page_max)
                if site.parameters.fp8_bounds:
                    assert may_be_of_close(bounds[used], codes_of(page_max[used]), 2e-4)
                else:
                    np.testing.assert_allclose(bounds[used], page_max[used], atol=2e-4)
        assert all((buffer[0] == buffer[0].flat[0]).all() for buffer in executor.buffers.values())


def test_steps_after_a_turn_equal_the_reference(make_program):
    executor = executor_of(make_program, "rocketkv")
    program = executor.program
    decoder = ReferenceDecoder(
        program.model, EngineWeights(program.weight_file),
        method=method(program.parameters), parameters=program.parameters,
    )  # fmt: skip
    generator = np.random.default_rng(1)
    prompts, lengths = generator.integers(2, 97, (1, 90)), np.array([90])
    executor.allocate(1)
    prefilled = executor.prefill(prompts, lengths)
    executor.insert(prefilled, 0, 0)
    _, cache = decoder.prefill(torch.from_numpy(prompts), torch.from_numpy(lengths))
    stored, positions = prefilled.cache_lengths, lengths
    for _ in range(2):
        block, counts = generator.integers(2, 97, (1, 40)), np.array([40])
        stored = executor.extend(0, block, counts, positions, stored).cache_lengths
        decoder.extend(torch.from_numpy(block), torch.from_numpy(counts), cache)
        positions = positions + 40
        for token in generator.integers(2, 97, (4, 1)):
            found = executor.decode(token, positions, stored).copy()
            expected = decoder.decode(torch.from_numpy(token), cache)
            np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)
            stored, positions = stored + 1, positions + 1


def test_an_engine_without_turns_refuses(make_program):
    executor = TorchExecutor(make_program("full"), device="cpu")
    executor.allocate(1)
    one = np.array([1])
    with pytest.raises(ValueError, match="no extend graph"):
        executor.extend(0, one[None], one, one, np.zeros((3, 1), np.int64))


@pytest.mark.parametrize(("stored", "count"), [(0, 1), (7, 1), (0, 9), (5, 8), (40, 17)])
def test_attention_of_a_turn_by_blocks_is_that_under_one_mask(stored, count, monkeypatch):
    monkeypatch.setattr("kvc_trt.backends.torch.model.prompt_attention.TURN_BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, count, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, stored + count, 16, generator=generator)
    places = torch.arange(stored + count)
    scores = query @ keys.repeat_interleave(3, 1).transpose(2, 3) / 4
    scores = scores.masked_fill(places > places[stored:, None], -torch.inf)
    expected = scores.softmax(-1) @ values.repeat_interleave(3, 1)
    torch.testing.assert_close(turn_attention(query, keys, values, [stored], [count]), expected, atol=1e-5, rtol=0)


def test_attention_of_rows_together_is_that_of_each_row(monkeypatch):
    """Whatever comes after a row's end."""
    monkeypatch.setattr("kvc_trt.backends.torch.model.prompt_attention.TURN_BLOCK", 4)
    stored, counts = [0, 11, 5, 30], [9, 3, 9, 1]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, 9, 16, generator=generator)
    keys, values = torch.randn(2, 4, 2, 39, 16, generator=generator)
    found = turn_attention(query, keys, values, stored, counts)
    for row, (before, count) in enumerate(zip(stored, counts, strict=True)):
        one, end = slice(row, row + 1), before + count
        given = query[one, :, :count], keys[one, :, :end], values[one, :, :end]
        expected = turn_attention(*given, [before], [count])
        torch.testing.assert_close(found[one, :, :count], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("policy", "kv_cache"),
    [
        *((policy, "auto") for policy in POLICIES),
        *itertools.product(["hybrid", "rocketkv", "snapkv++"], ["int8", "int4"]),
    ],
)
def test_a_turn_of_rows_together_is_that_of_each_row(policy, kv_cache, make_program):
    """Rows of very different lengths: the same entries and codes, and logits to rounding, also after a second turn."""
    program = executor_of(make_program, policy).program
    if kv_cache != "auto":
        lengths = {"max_input_len": 400, "max_output_len": program.parameters.max_output_len}
        program = make_program(policy, turns=True, kv_cache=kv_cache, **lengths)
    together, alone = (TorchExecutor(program, device="cpu") for _ in range(2))
    generator = np.random.default_rng(5)
    prompts, lengths = generator.integers(2, 97, (3, 90)), np.array([90, 20, 55])
    prefilled = together.prefill(prompts, lengths)
    for executor in (together, alone):
        executor.allocate(3)
        for row in range(3):
            executor.insert(prefilled, row, row)
    positions, stored = lengths, prefilled.cache_lengths
    for counts in (np.array([40, 1, 7]), np.array([3, 60, 33])):
        block = generator.integers(2, 97, (3, counts.max()))
        found = together.extend(0, block, counts, positions, stored)
        after = []
        for row, count in enumerate(counts):
            given = block[row : row + 1, :count], counts[row : row + 1], positions[row : row + 1]
            expected = alone.extend(row, *given, stored[:, row : row + 1])
            np.testing.assert_allclose(found.logits[row], expected.logits[0], atol=1e-4)
            after.append(expected.cache_lengths)
        np.testing.assert_array_equal(found.cache_lengths, np.concatenate(after, axis=1))
        for name, buffer in alone.buffers.items():
            if np.issubdtype(buffer.dtype, np.integer):
                np.testing.assert_array_equal(together.buffers[name], buffer, err_msg=name)
            else:
                np.testing.assert_allclose(together.buffers[name], buffer, atol=1e-4, err_msg=name)
        positions, stored = positions + counts, found.cache_lengths


def test_a_turn_that_does_not_fit_is_refused_before_anything_runs(make_program, monkeypatch):
    executor = TorchExecutor(make_program("full", max_output_len=40, turns=True), device="cpu")
    executor.allocate(1)
    prefilled = executor.prefill(np.full((1, 30), 5), np.array([30]))
    executor.insert(prefilled, 0, 0)
    monkeypatch.setattr("kvc_trt.backends.torch.memory.free_bytes", lambda device: 1000)
    with pytest.raises(UnsupportedEnvironment, match=r"a turn of 1 x 8 tokens needs .*; this machine has 1000 B free"):
        executor.extend(0, np.full((1, 8), 3), np.array([8]), np.array([30]), prefilled.cache_lengths)


@pytest.mark.parametrize("length", [1, 255, 256, 300])
def test_padding_to_a_bucket_changes_no_prompts_attention(length):
    tables = torch.randn(3, 1, 2, length, 16, generator=torch.Generator().manual_seed(1))
    padded = [bucketed(table) for table in tables]
    assert {table.shape[2] for table in padded} == {-(-length // PLAN_BUCKET) * PLAN_BUCKET}
    expected = prefill_attention(*tables)
    torch.testing.assert_close(prefill_attention(*padded)[:, :, :length], expected, atol=1e-6, rtol=0)
