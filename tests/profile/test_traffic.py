"""Bytes that a step reads, against the golden budget table; stored bytes, against the engine's own state list."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.graph.state import state_tensors
from kvc_trt.models.presets import load_preset
from kvc_trt.policies import describe, resolve
from kvc_trt.profile.planning.placement import on_one_gpu
from kvc_trt.profile.traffic import (
    cache_bytes,
    entries_cached,
    full_cache_bytes,
    full_state_bytes,
    full_step_bytes,
    linear_bytes,
    row_traffic,
)

LLAMA = load_preset("llama3.1-8b").config

# S, t, N, traffic in pairs with the adaptive and with the even split (head size 128)
TRAFFIC = [
    (16384, 256, 128, 254.7, 256.0),
    (16384, 512, 128, 508.6, 508.6),
    (32768, 256, 128, 254.4, 255.3),
    (32768, 512, 128, 509.5, 512.0),
    (96000, 256, 128, 255.8, 255.8),
    (131072, 512, 128, 511.5, 512.0),
    (131072, 4096, 128, 4069.3, 4069.3),
    (32768, 512, 512, 509.5, 512.0),
    (2048, 256, 512, 256.0, 256.0),
]


def parameters_of(policy, sequence, budget, output=128, **overrides):
    return resolve(
        policy,
        model=LLAMA,
        token_budget=budget,
        max_input_len=sequence - output,
        max_output_len=output,
        **overrides,
    )


def pairs_with(parameters, entries):
    """Return the pairs that a compressed layer reads with `entries` tokens cached, all but one of them generated."""
    traffic = row_traffic(LLAMA, parameters, 2, 1, entries - 1)
    assert traffic.entries == entries
    return traffic.pairs


@pytest.mark.parametrize(("sequence", "budget", "output", "adaptive", "even"), TRAFFIC)
def test_pairs_read_match_the_golden_table(sequence, budget, output, adaptive, even):
    for split, expected in (("adaptive", adaptive), ("even", even)):
        parameters = parameters_of("rocketkv", sequence, budget, output, split=split, by_length=False)
        found = pairs_with(parameters, parameters.capacity)
        # The table divides capacity by page size without rounding up: at most one page more.
        assert expected - 0.06 <= found <= expected + 0.06 + parameters.top_r / (2 * LLAMA.head_size)


@given(
    policy=st.sampled_from([one.name for one in describe()]),
    sequence=st.integers(600, 40_000),
    budget=st.integers(256, 600),
    skip=st.integers(0, 3),
    batch=st.integers(1, 4),
)
def test_modelled_cache_is_the_state_that_is_allocated(policy, sequence, budget, skip, batch):
    parameters = parameters_of(policy, sequence, budget, 64, skip_layers=skip)
    for dtype, itemsize in (("float32", 4), ("float16", 2)):
        allocated = batch * sum(tensor.bytes_per_row() for tensor in state_tensors(LLAMA, parameters, dtype))
        assert batch * cache_bytes(LLAMA, parameters, itemsize).total == allocated


def test_short_rows_read_everything_and_long_ones_their_budget():
    parameters = parameters_of("rocketkv", 32768, 512)
    read = [pairs_with(parameters, entries) for entries in (1, 512, 513, parameters.capacity)]
    assert read[:2] == [1, 512]
    assert read[2] < 512
    assert read[3] <= 512
    denser = dataclasses.replace(parameters, dense_until=2000)
    assert pairs_with(denser, 2000) == 2000


def test_skipped_layers_keep_and_read_the_whole_row():
    parameters = parameters_of("rocketkv", 32768, 512, skip_layers=2)
    assert entries_cached(parameters, 0, 30000, 10) == 30010
    assert entries_cached(parameters, 2, 30000, 10) == parameters.kept_of(30000) + 10 < parameters.prompt_budget
    assert entries_cached(parameters, 2, 100, 10) == 110
    traffic = row_traffic(LLAMA, parameters, 2, 30000, 10)
    compressed = parameters_of("rocketkv", 32768, 512)
    rest = row_traffic(LLAMA, compressed, 2, 30000, 10)
    assert traffic.bytes == pytest.approx(2 * 30010 * 4096 + rest.bytes * 30 / 32)


def test_a_full_cache_is_read_whole():
    parameters = parameters_of("full", 32768, 512)
    assert row_traffic(LLAMA, parameters, 2, 32640, 128).bytes == full_cache_bytes(LLAMA, 32768, 2) == 2**32


def test_where_every_layer_slides_a_row_is_read_as_one_of_them():
    model = load_preset("gemma-3-12b").config
    sliding = dataclasses.replace(model.description, attention=(model.attention(0),) * model.num_hidden_layers)
    model = dataclasses.replace(model, description=sliding)
    parameters = resolve("full", model=model, token_budget=None, max_input_len=8192, max_output_len=128)
    traffic = row_traffic(model, parameters, 2, 8192)
    assert (traffic.entries, traffic.pairs) == (1024, 1024)


def test_a_step_reads_and_writes_the_state_of_linear_layers():
    model = load_preset("qwen3.5-9b").config
    state = linear_bytes(model, 2)
    parameters = resolve("full", model=model, token_budget=None, max_input_len=8064, max_output_len=128)
    moved = row_traffic(model, parameters, 2, 8064, 128).bytes
    assert moved == full_cache_bytes(model, 8192, 2) + 2 * state == full_step_bytes(model, 8192, 2)
    assert full_state_bytes(model, 8192, 2) == moved - state


def test_a_plan_counts_the_state_of_linear_layers_on_both_sides():
    model = load_preset("qwen3.5-9b").config
    parameters = resolve("rocketkv", model=model, token_budget=512, max_input_len=8064, max_output_len=128)
    sides = on_one_gpu(model, parameters, "bf16", turns=True).sides
    assert sides["full"].step.row_bytes == full_step_bytes(model, 8192, 2)
    assert sides["compressed"].step.row_bytes > 2 * linear_bytes(model, 2)
