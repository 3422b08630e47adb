"""A row's state becomes a context's tensors and comes back bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.opening import open_engine
from kvc_trt.contexts.packing import context_bytes, fingerprint_of, recorded, recorded_model
from kvc_trt.engine.manifest import digest_of
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS
from kvc_trt.models.config import FeedForward, ModelDescription
from kvc_trt.models.presets import load_preset
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.every_format import in_formats
from tests.every_policy import EVERY, parameters_of
from tests.small_model import SMALL


@pytest.mark.parametrize(("policy", "kv_cache"), [*((policy, AUTO) for policy in EVERY), *in_formats(EVERY)])
def test_every_state_tensor_is_either_carried_or_rebuilt(policy, kv_cache):
    packing = packing_without_graphs(policy, kv_cache=kv_cache)
    context = random_context(packing, 100, seed=0)
    row = dict(packing.unpack(context))
    tensors = {tensor.name: tensor for _, tensors in packing._caches for tensor in tensors.values()}
    assert row.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (str(row[name].dtype), row[name].shape) == (tensor.dtype, tensor.shape)


@given(
    policy=st.sampled_from(EVERY), kv_cache=st.sampled_from(tuple(CACHE_FORMATS)), tokens=st.integers(1, 256),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_packing_an_unpacked_context_gives_the_same_bytes(policy, kv_cache, tokens, seed):
    packing = packing_without_graphs(policy, kv_cache=kv_cache)
    context = random_context(packing, tokens, seed)
    again = packing.pack(dict(packing.unpack(context)), context.cache_lengths, tokens)
    assert again.keys() == context.tensors.keys()
    for name, tensor in context.tensors.items():
        assert again[name].tobytes() == tensor.tobytes()


def test_each_policy_packs_its_own_state_besides_keys_and_values():
    def kinds(policy, kv_cache=AUTO):
        packing = packing_without_graphs(policy, kv_cache=kv_cache)
        layout = packing.layout([9] * len(packing.limits.capacities), 9)
        return {name.partition(".")[0] for name in layout} - {"k", "v"}

    assert kinds("full") == kinds("quest") == kinds("hybrid") == kinds("streaming-llm") == set()
    assert kinds("rocketkv") == kinds("keydiff") == {"slot_positions"}
    assert kinds("rocketkv-mt") == {"k_whole", "v_whole"}
    assert kinds("sparq") == {"value_sum"}
    assert kinds("h2o") == {"scores", "slot_positions"}
    assert kinds("tova") == {"slot_positions"}
    assert kinds("hybrid", "int8") == kinds("quest", "fp8") == {"k_scale", "v_scale"}
    assert kinds("sparq", "k8v4") == {"k_scale", "v_scale", "v_minimum", "value_sum"}
    of_keys = {"k_scale", "k_minimum", "k_whole_scale", "k_whole_minimum"}
    of_values = {name.replace("k", "v", 1) for name in of_keys}
    assert kinds("rocketkv-mt", "int4") == {"k_whole", "v_whole", *of_keys, *of_values}


def test_a_copy_does_not_change_with_the_row():
    packing = packing_without_graphs("h2o")
    context = random_context(packing, 100, seed=0)
    row = {name: array.copy() for name, array in packing.unpack(context)}
    packed = packing.pack(row, context.cache_lengths, 100)
    for array in row.values():
        array[:] = 0
    for name, tensor in context.tensors.items():
        assert packed[name].tobytes() == tensor.tobytes()


def test_state_stored_by_position_is_cut_to_the_text():
    packing = packing_without_graphs("rocketkv-mt")
    context = random_context(packing, 100, seed=0)
    assert context.tensors["k_whole.2"].shape == context.tensors["v_whole.2"].shape == (2, 100, 16)
    row = dict(packing.unpack(context))
    assert row["k_whole.2"].shape == (2, 272, 16)
    assert not row["k_whole.2"][:, 100:].any()
    context = random_context(packing_without_graphs("rocketkv-mt", kv_cache="int4"), 100, seed=0)
    found = {name: context.tensors[f"{name}.2"].shape for name in ("k_whole", "k_whole_scale", "v_whole_minimum")}
    assert found == {"k_whole": (2, 100, 8), "k_whole_scale": (2, 100, 1), "v_whole_minimum": (2, 100, 1)}


def test_state_stored_by_slot_is_cut_to_the_slots_in_use():
    """Only keys and values in contexts of `auto`, so that those of earlier versions still fit."""
    for policy, names in (("rocketkv", {"slot_positions"}), ("h2o", {"slot_positions", "scores"})):
        for kv_cache in CACHE_FORMATS:
            packing = packing_without_graphs(policy, kv_cache=kv_cache)
            layout = packing.layout([9] * len(packing.limits.capacities), 9)
            slots = {name.partition(".")[0]: shape[1] for name, (_, shape) in layout.items()}
            whole = packing.limits.capacities[0] if kv_cache == AUTO else 9
            assert {name: slots.pop(name) for name in names} == dict.fromkeys(names, whole)
            assert set(slots.values()) == {9}
    packing = packing_without_graphs("h2o", kv_cache="int8")
    row = dict(packing.unpack(random_context(packing, 9, seed=0)))
    assert (row["slot_positions.0"][:, 9:] == -1).all()


def test_empty_slots_hold_the_fill_value():
    packing = packing_without_graphs("rocketkv")
    context = random_context(packing, 10, seed=0)
    row = dict(packing.unpack(context))
    assert not row["k_cache.0"][:, 10:].any()
    lowest = np.finfo(np.float32).min
    assert (row["bounds.0"][..., -1] == lowest).all()


def test_the_fingerprint_depends_on_weights_model_and_policy(tiny_engine, tiny_arguments, tmp_path):
    from kvc_trt.cli.main import run

    first = fingerprint_of(open_engine(tiny_engine))
    assert first.model_name == "tiny (fp32 weights)"
    assert first.policy_name == "rocketkv, token budget 32"
    assert run([*tiny_arguments, "--set", "page_size=8", "-o", str(tmp_path / "other")]) == 0
    other = fingerprint_of(open_engine(tmp_path / "other"))
    assert (first.weights, first.model) == (other.weights, other.model)
    assert first.parameters != other.parameters
    assert first.engine != other.engine
    assert first.compatibility != other.compatibility
    assert run([*tiny_arguments, "--backend", "torch", "--weights", "fp32", "-o", str(tmp_path / "torch")]) == 0
    torch = fingerprint_of(open_engine(tmp_path / "torch"))
    assert torch.engine != first.engine
    assert torch.compatibility == first.compatibility


def test_the_bytes_of_a_context_are_known_beforehand():
    for number, policy in enumerate(EVERY):
        kv_cache = tuple(CACHE_FORMATS)[number % len(CACHE_FORMATS)]
        packing = packing_without_graphs(policy, kv_cache=kv_cache)
        context = random_context(packing, 100, seed=0)
        state = [tensor for _, tensors in packing._caches for tensor in tensors.values()]
        parameters = parameters_of(policy, kv_cache=kv_cache)
        assert context_bytes(SMALL, parameters, state, context.cache_lengths, 100) == context.nbytes


def test_packings_know_the_tokens_kept_and_read():
    packings = {policy: packing_without_graphs(policy) for policy in EVERY}
    kept = {policy for policy, packing in packings.items() if packing.keeps_every_token}
    assert kept == {"full", "quest", "quest-matched", "sparq", "hybrid", "rocketkv-mt"}
    assert [policy for policy in kept if packings[policy].reads_everything] == ["full"]


def test_digests_of_older_parameters_have_not_changed():
    """The digest of older parameters leaves out the fields that came later; these digests are in such files."""
    written = {"hybrid": "a98a3c8c63d67435", "h2o": "1a48b6281aecc8d4", "full": "ae20cc5fae2cb780"}
    assert {policy: digest_of(recorded(parameters_of(policy)))[:16] for policy in written} == written
    parameters = parameters_of("hybrid")
    later = {
        "fp8_bounds": True, "kv_cache": "int8", "by_length": True, "long_prompt": 9, "short_pool_kernel": 3,
        "pool_kind": "avg", "prompt_share": 0.2, "squeeze_cap": 3.5, "layer_windows": (64, 0),
        "linear_layers": (0,),
    }  # fmt: skip
    assert set(recorded(parameters)) == {field.name for field in dataclasses.fields(parameters)} - set(later)
    for name, value in later.items():
        assert recorded(dataclasses.replace(parameters, **{name: value}))[name] == value


def test_digests_of_older_models_have_not_changed():
    """The digest of a model with Llama's parts is the same as before models had parts; these digests are in such
    files."""
    written = {"llama3.1-8b": "5afc9f1c94159e57", "qwen3-8b": "4a2582e03b712625", "retrieval-tiny": "3dc07d59c75c1599"}
    assert {name: digest_of(recorded_model(load_preset(name).config))[:16] for name in written} == written
    biased = dataclasses.replace(SMALL, description=ModelDescription(feed_forward=FeedForward(bias=True)))
    assert digest_of(recorded_model(biased)) != digest_of(recorded_model(SMALL))
