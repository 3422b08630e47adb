"""Both graphs together: against the reference decoder, in place, with neighbours, within the budget."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.engine.program import build_twin_decode, build_twin_prefill
from kvc_trt.graph.rewrites.expose import expose, index_lists
from kvc_trt.graph.rewrites.prune import prune
from tests.graph.rolling import STEPS, check_layers, reference_roll, roll
from tests.graph.small_models import EVICTING, FAMILIES, POLICIES, QUERY_AGNOSTIC, open_session, prompts_of

FAMILIES_AND_POLICIES = [(family, "rocketkv") for family in FAMILIES] + [
    ("llama3.1", policy) for policy in (*POLICIES, *QUERY_AGNOSTIC) if policy != "rocketkv"
]
FAMILIES_AND_POLICIES += [(family, "expected-attention-hybrid") for family in ("longchat", "qwen2", "qwen3", "yarn")]


@pytest.mark.parametrize(("family", "policy"), FAMILIES_AND_POLICIES)
def test_logits_and_every_index_equal_the_reference(make_engine, family, policy):
    engine = make_engine(policy, model=FAMILIES[family], skip_layers=1)
    prompts = prompts_of(250, 7, 130, 33)
    runs = zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True)
    for step, (result, (logits, cache)) in enumerate(runs):
        np.testing.assert_allclose(result["logits"], logits.numpy(), atol=1e-4)
        check_layers(engine, result, cache, step)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16"])
def test_reduced_precision_follows_the_reference_on_its_own_weights(make_engine, precision):
    """The kernels round activations (int8) or store half floats: near, not equal."""
    engine = make_engine("full", precision, FAMILIES["qwen2"])
    prompts = prompts_of(60, 130)
    for result, (logits, _) in zip(roll(engine, prompts), reference_roll(engine, prompts), strict=True):
        error = np.abs(result["logits"] - logits.numpy()).max() / np.abs(logits.numpy()).max()
        assert error < (0.02 if precision == "fp16" else 0.1)


@pytest.mark.parametrize("policy", [*EVICTING, *QUERY_AGNOSTIC])
def test_long_prompts_are_compressed_and_short_ones_are_not(make_engine, policy):
    engine = make_engine(policy)
    results = list(roll(engine, prompts_of(250, 20)))
    assert (results[0]["cache_lengths"][:, 0] == engine.parameters.prompt_budget).all()
    assert (results[0]["cache_lengths"][:, 1] == 20).all()
    if engine.parameters.reads_a_part:
        assert ((results[-1]["selected.0"][0] >= 0).sum(-1) == engine.parameters.top_k).all()


def test_a_row_does_not_depend_on_its_neighbours(make_engine):
    engine = make_engine("rocketkv")
    prompts = prompts_of(200, 90, 5)
    together = [result["logits"] for result in roll(engine, prompts)]
    for row in range(3):
        tokens = np.random.default_rng(1).integers(2, 97, (STEPS, 3))[:, row : row + 1]
        result = engine.prefill(prompts[row : row + 1])
        np.testing.assert_allclose(result["logits"][0], together[0][row], atol=1e-5)
        lengths, position = result["cache_lengths"], np.array([len(prompts[row])])
        for step in range(STEPS):
            result = engine.decode(tokens[step], position + step, lengths + step, result)
            np.testing.assert_allclose(result["logits"][0], together[step + 1][row], atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("policy", ["rocketkv", "hybrid", "snapkv++", "snapkv-gqa", *QUERY_AGNOSTIC])
def test_a_batch_within_the_budget_is_bit_identical_to_the_dense_twin(make_engine, policy, precision):
    engine = make_engine(policy, precision, skip_layers=1)
    twin = make_engine(
        engine.parameters.keeping_everything(), precision,
        prefill=lambda *arguments, **keywords: build_twin_prefill(engine.model, engine.parameters, **keywords),
        decode=lambda *arguments, **keywords: build_twin_decode(engine.model, engine.parameters, **keywords),
    )  # fmt: skip
    prompts = prompts_of(20, 1, 12)
    for ours, dense in zip(roll(engine, prompts), roll(twin, prompts), strict=True):
        np.testing.assert_array_equal(ours["logits"], dense["logits"])


def test_full_capacity_can_be_used_to_the_last_slot(make_engine):
    engine = make_engine("rocketkv", skip_layers=1)
    list(roll(engine, prompts_of(250), steps=8))


def test_state_is_updated_in_place(make_engine):
    """One buffer as input and output; results equal those of separate buffers."""
    import onnxruntime

    engine = make_engine("rocketkv", skip_layers=1)
    prompts = prompts_of(200, 40)
    expected = list(roll(engine, prompts))
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


def test_pruning_changes_no_result_and_drops_the_lists(make_engine):
    engine = make_engine("rocketkv", skip_layers=1)
    inputs = {"input_ids": np.full((1, 256), 5), "prompt_lengths": np.array([200])}
    whole, pruned = (open_session(m, engine.directory) for m in (engine.prefill_model, prune(engine.prefill_model)))
    for ours, theirs in zip(whole.run(None, inputs), pruned.run(None, inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    bodies = {body.name: body for body in prune(engine.decode_model).functions}
    assert "selected" not in bodies["KvcHybridAttention"].output
    assert len(bodies["KvcHybridAttention"].node) < len(
        next(body.node for body in engine.decode_model.functions if body.name == "KvcHybridAttention")
    )
    exposed = prune(expose(engine.decode_model, ["selected.1"]))
    assert "selected" in {body.name: body for body in exposed.functions}["KvcHybridAttention"].output


def test_lists_that_do_not_exist_cannot_be_exposed(make_engine):
    engine = make_engine("rocketkv", skip_layers=1)
    assert index_lists(engine.prefill_model) == ["indices.1", "indices.2"]
    assert index_lists(engine.decode_model) == ["selected.1", "selected.2"]
    with pytest.raises(ValueError, match=r"selected\.0"):
        expose(engine.decode_model, ["selected.0"])


def test_one_long_prompt_changes_nothing_of_what_short_ones_keep(make_engine):
    """Scores are computed for the whole batch once one row needs them: rows that fit keep everything all the same."""
    engine = make_engine("expected-attention")
    short = prompts_of(3, 20, 24)
    alone, together = engine.prefill(short), engine.prefill([*short, *prompts_of(200)])
    for name in ("k_cache.0", "v_cache.0", "indices.0"):
        np.testing.assert_array_equal(alone[name], together[name][:3])
