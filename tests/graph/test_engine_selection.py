"""Engines that read a part of the cache by rules of their own: Quest and SparQ."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.engine.program import build_twin_decode, build_twin_prefill
from kvc_trt.graph.rewrites.prune import prune
from tests.graph.rolling import STEPS, check_layers, reference_roll, roll
from tests.graph.small_models import FAMILIES, LLAMA, open_session, prompts_of
from tests.rounding import assert_close

POLICIES = ("quest", "quest-matched", "sparq")


@pytest.mark.parametrize(("family", "policy"), [("llama3.1", policy) for policy in POLICIES] + [("longchat", "quest")])
def test_logits_and_every_index_equal_the_reference(make_engine, family, policy):
    """Budget 64: rows of more than twice as much, of a little more, and of less."""
    engine = make_engine(policy, model=FAMILIES[family], skip_layers=1, token_budget=64)
    runs = zip(*(one(engine, prompts_of(250, 7, 130, 66, 62)) for one in (roll, reference_roll)), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)


@pytest.mark.parametrize("changes", [{"reallocate": False}, {"top_r": 1, "top_k": 100, "dense_until": 80}])
def test_settings_of_sparq_reach_the_graph(make_engine, changes):
    engine = make_engine("sparq", **changes)
    runs = zip(*(one(engine, prompts_of(120, 40), 2) for one in (roll, reference_roll)), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)


def test_quest_leaves_two_layers_dense_and_lists_per_query_head(make_engine):
    engine = make_engine("quest")
    result = list(roll(engine, prompts_of(250), 1))[-1]
    assert [tensor.layer for tensor in engine.state if tensor.name.startswith("bounds")] == [2]
    assert result["selected.2"].shape == (1, LLAMA.num_attention_heads, 32)
    assert ((result["selected.2"] >= 0).sum(-1) == 16 + 251 - 240).all()  # one whole page and the newest


def test_sparq_stores_keys_twice_and_the_sum_of_the_values(make_engine):
    engine = make_engine("sparq")
    for length, result in enumerate(roll(engine, prompts_of(250)), 250):
        np.testing.assert_array_equal(result["channels.1"], result["k_cache.1"].transpose(0, 1, 3, 2))
        assert_close(result["value_sum.1"], result["v_cache.1"].sum(axis=2))
        assert result["k_cache.1"][0, 0, :length].any(-1).all()
        assert not result["k_cache.1"][0, 0, length:].any()
    assert ((result["selected.0"] >= 0).sum(-1) == 32 // 2 + 1).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_within_the_budget_is_bit_identical_to_the_dense_twin(make_engine, policy, precision):
    engine = make_engine(policy, precision, skip_layers=1)
    twin = make_engine(
        engine.parameters.keeping_everything(), precision,
        prefill=lambda *arguments, **keywords: build_twin_prefill(engine.model, engine.parameters, **keywords),
        decode=lambda *arguments, **keywords: build_twin_decode(engine.model, engine.parameters, **keywords),
    )  # fmt: skip
    for ours, dense in zip(*(roll(one, prompts_of(20, 1, 12)) for one in (engine, twin)), strict=True):
        np.testing.assert_array_equal(ours["logits"], dense["logits"])


@pytest.mark.parametrize("policy", ["quest", "sparq"])
def test_state_is_updated_in_place(make_engine, policy):
    """One buffer as input and output, as executors bind them; results equal those of separate buffers."""
    import onnxruntime

    engine = make_engine(policy, skip_layers=1)
    expected = list(roll(engine, prompts_of(200, 40)))
    session = open_session(prune(engine.decode_model), engine.directory)
    buffers = {tensor.name: expected[0][tensor.name].copy() for tensor in engine.state}
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in buffers.items()}
    binding = session.io_binding()
    for tensor in engine.state:
        binding.bind_ortvalue_input(tensor.name, values[tensor.name])
        binding.bind_ortvalue_output(tensor.aliased_output, values[tensor.name])
    binding.bind_output("logits")
    for step, tokens in enumerate(np.random.default_rng(1).integers(2, 97, (STEPS, 2))):
        arrays = [tokens, np.array([200, 40]) + step, expected[0]["cache_lengths"] + step]
        for name, array in zip(("token", "positions", "cache_lengths"), arrays, strict=True):
            binding.bind_cpu_input(name, array)
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(binding.get_outputs()[-1].numpy(), expected[step + 1]["logits"])
    for tensor in engine.state:
        assert values[tensor.name].data_ptr() == buffers[tensor.name].ctypes.data
        np.testing.assert_array_equal(values[tensor.name].numpy(), expected[-1][tensor.name])
