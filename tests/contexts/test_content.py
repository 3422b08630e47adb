"""A context with NaN or an infinity is refused by the name of the tensor, wherever it comes from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.contexts import file as context_file
from kvc_trt.contexts.content import impossible
from kvc_trt.contexts.file import read_context, write_context
from kvc_trt.contexts.handoff import largest_handoff, read_handoff, write_handoff
from kvc_trt.errors import HandoffRefused, InputError
from tests.contexts.conftest import packing_without_graphs, random_context

NOT_FINITE = (np.nan, -np.nan, np.inf, -np.inf)


def with_number(context, name, place, number):
    """The context with another number at a place (a share of the tensor)."""
    tensor = context.tensors[name].copy()
    tensor.reshape(-1)[int(place * tensor.size)] = number
    return replace(context, tensors={**context.tensors, name: tensor})


@given(
    policy=st.sampled_from(["full", "rocketkv", "sparq", "h2o"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    tokens=st.integers(1, 256),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_the_tensor_is_named(policy, dtype, tokens, seed, data):
    context = random_context(packing_without_graphs(policy, dtype), tokens, seed)
    assert impossible(context) is None
    floats = [name for name, tensor in context.tensors.items() if tensor.dtype.kind != "i"]
    name, place = data.draw(st.sampled_from(floats)), data.draw(st.floats(0, 1, exclude_max=True))
    number = data.draw(st.sampled_from(NOT_FINITE))
    assert impossible(with_number(context, name, place, number)) == f"tensor {name} holds NaN or infinities"
    largest = np.nextafter(np.array(np.inf, context.tensors[name].dtype), np.array(0, context.tensors[name].dtype))
    for number in (largest, -largest, 0.0, -0.0):
        assert impossible(with_number(context, name, place, number)) is None


@pytest.mark.parametrize("place", [0, 0.5, 1 - 2**-50])
def test_a_place_anywhere_in_a_long_tensor_is_found(place):
    context = random_context(packing_without_graphs("full"), 1, 0)
    tensor = np.zeros((3, 50_001), np.float32)
    context = replace(context, tensors={"k.0": tensor})
    assert impossible(context) is None
    assert impossible(with_number(context, "k.0", place, np.nan)) == "tensor k.0 holds NaN or infinities"


def test_logits_may_forbid_tokens_and_not_all_of_them():
    context = random_context(packing_without_graphs("full"), 4, 0)
    some = context.logits.copy()
    some[:3] = -np.inf
    assert impossible(replace(context, logits=some)) is None
    for number in (np.nan, np.inf):
        some[5] = number
        assert impossible(replace(context, logits=some)) == "tensor logits holds no finite number to draw a token by"
    assert impossible(replace(context, logits=np.full_like(some, -np.inf))) is not None


@pytest.fixture
def poisoned():
    return with_number(random_context(packing_without_graphs("rocketkv"), 20, 0), "k.0", 0.3, np.nan)


def test_a_file_with_nan_in_keys_is_refused(poisoned, tmp_path, monkeypatch):
    with monkeypatch.context() as writing:
        writing.setattr(context_file, "impossible", lambda context: None, raising=False)
        write_context(tmp_path / "context", poisoned)
    with pytest.raises(InputError, match=r"context: tensor k\.0 holds NaN or infinities") as caught:
        read_context(tmp_path / "context", packing_without_graphs("rocketkv"))
    assert "kvc-trt verify" in caught.value.hint


def test_no_such_file_is_written(poisoned, tmp_path):
    with pytest.raises(InputError, match=r"tensor k\.0 holds NaN or infinities"):
        write_context(tmp_path / "context", poisoned)
    assert not (tmp_path / "context").exists()


def test_a_handoff_with_nan_in_keys_is_refused(poisoned):
    packing = packing_without_graphs("rocketkv")
    content = np.zeros(largest_handoff(packing), np.uint8)
    handoff = write_handoff(poisoned, packing, content)
    with pytest.raises(HandoffRefused, match=r"the handoff: tensor k\.0 holds NaN or infinities"):
        read_handoff(handoff, packing, content)
