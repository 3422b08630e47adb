"""Prefill and extend graphs whose cache has a format: what is kept is stored as the reference stores it, and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.graph.build import build_extend, build_prefill
from kvc_trt.graph.rewrites.expose import expose, index_lists
from kvc_trt.graph.state import state_tensors
from kvc_trt.graph.weights import GraphWeights, write_weights
from kvc_trt.methods.base.isolated_runs import page_bounds
from kvc_trt.models.cache_formats import CACHE_FORMATS
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.operators.tensors import K_CACHE, V_CACHE, updated
from tests import every_policy
from tests.graph.small_models import LLAMA, open_session, prompts_of
from tests.stored_tables import FORMATS, gathered, parts_of, read_back

OTHERS = ("hybrid", "streaming-llm", "keydiff", "expected-attention", "h2o", "tova", "snapkv", "snapkv++")
CASES = [(policy, form) for policy in ("full", "rocketkv") for form in FORMATS]
CASES += [(policy, form) for policy, form in zip(OTHERS, 2 * FORMATS, strict=True)]
TURNS = list(
    zip(
        ("full", "rocketkv", "keydiff", "expected-attention", "h2o", "tova", "snapkv", "hybrid"),
        2 * FORMATS,
        strict=True,
    )
)
TURNS += [("rocketkv-mt", "k8v4"), ("sparq", "int4")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    write_weights(LLAMA, RandomWeights(LLAMA, 0), path, weights="fp32", length=300)
    return path.parent, GraphWeights(path)


def parameters_of(policy):
    name, settings = every_policy.case(policy)
    return replace(policies.resolve(name, model=LLAMA, **settings), fp8_bounds=True)


def run(model, directory, inputs):
    session = open_session(expose(model, index_lists(model)), directory)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def prefilled(weights, parameters, *, turns=False):
    """Return the outputs of a prefill over two prompts, and their state tensors by name."""
    directory, opened = weights
    model = build_prefill(LLAMA, parameters, weights=opened, turns=turns)
    prompts = prompts_of(200, 31)
    padded = np.full((2, 256), 3)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    found = run(model, directory, {"input_ids": padded, "prompt_lengths": np.array([200, 31])})
    return found, {tensor.name: tensor for tensor in state_tensors(LLAMA, parameters, opened.dtype, turns=turns)}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), CASES)
def test_a_format_stores_the_tokens_that_auto_keeps(policy, form, weights):
    parameters = parameters_of(policy)
    exact, _ = prefilled(weights, parameters)
    found, state = prefilled(weights, replace(parameters, kv_cache=form))
    for name in ("logits", "cache_lengths", *(name for name in exact if name.startswith("indices."))):
        np.testing.assert_array_equal(found[name], exact[name])
    for layer in range(LLAMA.num_hidden_layers):
        keys, values = (exact[f"{tensor}.{layer}"] for tensor in ("k_cache", "v_cache"))
        lengths = np.minimum(exact["cache_lengths"][layer], keys.shape[2])
        used = (np.arange(keys.shape[2]) < lengths[:, None])[:, None, :, None]
        for part, expected in parts_of(keys, values, form).items():
            np.testing.assert_array_equal(found[f"{part}.{layer}"], np.where(used, expected, 0), strict=True)
            assert state[f"{part}.{layer}"].shape == expected.shape[1:]
            assert state[f"{part}.{layer}"].dtype == str(expected.dtype)
        if f"bounds.{layer}" in found:
            read = read_back(keys, CACHE_FORMATS[form].keys)
            bounds = page_bounds(read, lengths, parameters.page_size, fp8=True)
            np.testing.assert_array_equal(found[f"bounds.{layer}"], bounds)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("policy", "form"), TURNS)
def test_a_turn_stores_its_tokens_and_moves_the_others(policy, form, weights):
    """The first layer's keys and values depend on no cache: those of every token are what `full` keeps."""
    everything = after_turn(weights, parameters_of("full"))
    found = after_turn(weights, replace(parameters_of(policy), kv_cache=form))
    assert np.isfinite(found["logits"]).all()
    heads = found["k_cache_out.0"].shape[1] // LLAMA.num_key_value_heads
    keys, values = (np.repeat(everything[f"{name}_out.0"], heads, axis=1) for name in ("k_cache", "v_cache"))
    lengths = found["cache_lengths_out"][0]
    places = found.get("indices.0")
    if places is None:
        slots = np.arange(found["k_cache_out.0"].shape[2])
        places = np.broadcast_to(np.where(slots < lengths[:, None, None], slots, -1), (2, keys.shape[1], len(slots)))
    kept, used = [gathered(table, places) for table in (keys, values)], places[..., None] >= 0
    for part, expected in parts_of(*kept, form, (updated(K_CACHE), updated(V_CACHE))).items():
        np.testing.assert_array_equal(found[f"{part}.0"] * used, np.where(used, expected, 0), strict=True)
    if "bounds_out.0" in found:
        read = read_back(kept[0], CACHE_FORMATS[form].keys)
        bounds = page_bounds(read, lengths, parameters_of(policy).page_size, fp8=True)
        np.testing.assert_array_equal(found["bounds_out.0"], bounds)


def after_turn(weights, parameters):
    """Return the outputs of the extend graph after two prompts and turns of 9 and 30 tokens."""
    directory, opened = weights
    before, state = prefilled(weights, parameters, turns=True)
    block = {"input_ids": np.stack(prompts_of(30, 30, seed=1)), "lengths": np.array([9, 30])}
    places = {"positions": np.array([200, 31]), "cache_lengths": before["cache_lengths"]}
    model = build_extend(LLAMA, parameters, weights=opened)
    return run(model, directory, {**block, **places, **{name: before[name] for name in state}})
