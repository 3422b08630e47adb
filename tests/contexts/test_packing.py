"""A row's state becomes a context's tensors and comes back bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.registry import open_engine
from kvc_trt.contexts.packing import context_bytes, fingerprint_of, recorded
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.every_policy import EVERY, parameters_of
from tests.small_model import SMALL


@pytest.mark.parametrize("policy", EVERY)
def test_every_state_tensor_is_either_carried_or_rebuilt(policy):
    packing = packing_without_graphs(policy)
    context = random_context(packing, 100, seed=0)
    row = dict(packing.unpack(context))
    tensors = {tensor.name: tensor for _, tensors in packing._caches for tensor in tensors.values()}
    assert row.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (str(row[name].dtype), row[name].shape) == (tensor.dtype, tensor.shape)


@given(policy=st.sampled_from(EVERY), tokens=st.integers(1, 256), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_unpacked_and_packed_again_is_the_same(policy, tokens, seed):
    packing = packing_without_graphs(policy)
    context = random_context(packing, tokens, seed)
    again = packing.pack(dict(packing.unpack(context)), context.cache_lengths, tokens)
    assert again.keys() == context.tensors.keys()
    for name, tensor in context.tensors.items():
        assert again[name].tobytes() == tensor.tobytes()


def test_packed_state_besides_keys_and_values():
    def kinds(policy):
        packing = packing_without_graphs(policy)
        layout = packing.layout([9] * len(packing.limits.capacities), 9)
        return {name.partition(".")[0] for name in layout} - {"k", "v"}

    assert kinds("full") == kinds("quest") == kinds("hybrid") == kinds("streaming-llm") == set()
    assert kinds("rocketkv") == kinds("keydiff") == {"slot_positions"}
    assert kinds("rocketkv-mt") == {"k_whole", "v_whole"}
    assert kinds("sparq") == {"value_sum"}
    assert kinds("h2o") == {"scores", "slot_positions"}
    assert kinds("tova") == {"slot_positions"}


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


def test_empty_slots_hold_the_fill_value():
    packing = packing_without_graphs("rocketkv")
    context = random_context(packing, 10, seed=0)
    row = dict(packing.unpack(context))
    assert not row["k_cache.0"][:, 10:].any()
    lowest = np.finfo(np.float32).min
    assert (row["bounds.0"][..., -1] == lowest).all()


def test_the_fingerprint_of_an_engine(tiny_engine, tiny_arguments, tmp_path):
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
    for policy in EVERY:
        packing = packing_without_graphs(policy)
        context = random_context(packing, 100, seed=0)
        state = [tensor for _, tensors in packing._caches for tensor in tensors.values()]
        parameters = parameters_of(policy)
        assert context_bytes(SMALL, parameters, state, context.cache_lengths, 100) == context.nbytes


def test_packings_know_the_tokens_kept_and_read():
    packings = {policy: packing_without_graphs(policy) for policy in EVERY}
    kept = {policy for policy, packing in packings.items() if packing.keeps_every_token}
    assert kept == {"full", "quest", "quest-matched", "sparq", "hybrid", "rocketkv-mt"}
    assert [policy for policy in kept if packings[policy].reads_everything] == ["full"]


def test_contexts_of_before_fp8_bounds_and_formats_still_fit():
    """The digest of older parameters does not include the fields that came later."""
    parameters, later = parameters_of("hybrid"), {"fp8_bounds": True, "kv_cache": "int8"}
    assert set(recorded(parameters)) == {field.name for field in dataclasses.fields(parameters)} - set(later)
    for name, value in later.items():
        assert recorded(dataclasses.replace(parameters, **{name: value}))[name] == value
