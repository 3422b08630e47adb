"""A context that no engine can have written, with NaN above all, is refused by the name of the tensor."""

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
from kvc_trt.models.cache_formats import CACHE_FORMATS, VECTOR_FORMATS
from tests.contexts.conftest import packing_without_graphs, random_context
from tests.stored_tables import stored

NOT_FINITE = (np.nan, -np.nan, np.inf, -np.inf)


def with_number(context, name, place, number):
    """Return the context with another number at a place (a share of the tensor)."""
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
def test_a_tensor_with_non_finite_numbers_is_named(policy, dtype, tokens, seed, data):
    context = random_context(packing_without_graphs(policy, dtype), tokens, seed)
    assert impossible(context) is None
    floats = [name for name, tensor in context.tensors.items() if tensor.dtype.kind != "i"]
    name, place = data.draw(st.sampled_from(floats)), data.draw(st.floats(0, 1, exclude_max=True))
    number = data.draw(st.sampled_from(NOT_FINITE))
    assert impossible(with_number(context, name, place, number)) == f"tensor {name} holds NaN or infinities"
    largest = np.nextafter(np.array(np.inf, context.tensors[name].dtype), np.array(0, context.tensors[name].dtype))
    for number in (largest, -largest, 0.0, -0.0):
        assert impossible(with_number(context, name, place, number)) is None


CODES_OF_8 = ("k", "v", "k_whole", "v_whole")
SCALES, MINIMA = (tuple(f"{kind}{end}" for kind in CODES_OF_8) for end in ("_scale", "_minimum"))
NAN, NO_SCALE = "NaN or infinities", "scales that are not above 0"
IMPOSSIBLE = {
    "int8": [
        (CODES_OF_8, -128, "code -128"),
        (SCALES, np.nan, NAN), (SCALES, -np.nan, NAN), (SCALES, np.inf, NAN), (SCALES, -np.inf, NAN),
        (SCALES, 0.0, NO_SCALE), (SCALES, -0.0, NO_SCALE), (SCALES, -1.0, NO_SCALE), (SCALES, -6e-8, NO_SCALE),
    ],
    "fp8": [
        (CODES_OF_8, 127, "codes of NaN"), (CODES_OF_8, -1, "codes of NaN"),
        (SCALES, -1, NAN), (SCALES, -2, "exponents beyond"), (SCALES, -8, "exponents beyond"),
    ],
    "int4": [
        (SCALES, np.nan, NAN), (SCALES, 0.0, NO_SCALE), (SCALES, -1.0, NO_SCALE),
        (MINIMA, np.nan, NAN), (MINIMA, -np.inf, NAN), (MINIMA, -0.0, "minima of -0"),
    ],
}  # fmt: skip
POSSIBLE = {
    "int8": [(CODES_OF_8, -127), (CODES_OF_8, 127), (SCALES, 6e-8), (SCALES, 65504.0)],
    "fp8": [(CODES_OF_8, 126), (CODES_OF_8, -2), (CODES_OF_8, -128), (SCALES, -10), (SCALES, 0)],
    "int4": [(CODES_OF_8, -128), (CODES_OF_8, -1), (SCALES, 6e-8), (MINIMA, 0.0), (MINIMA, -65504.0)],
}
"""The largest numbers that a vector's parts can hold, and numbers next to impossible ones."""


@pytest.mark.parametrize("form", IMPOSSIBLE)
@given(tokens=st.integers(1, 256), seed=st.integers(0, 9), data=st.data())
def test_impossible_codes_are_refused_by_tensor(form, tokens, seed, data):
    context = random_context(packing_without_graphs("rocketkv-mt", kv_cache=form), tokens, seed)
    assert impossible(context) is None

    def edited(kinds, number):
        names = [name for name in context.tensors if name.partition(".")[0] in kinds]
        name = data.draw(st.sampled_from(names))
        return name, impossible(with_number(context, name, data.draw(st.floats(0, 1, exclude_max=True)), number))

    kinds, number, said = data.draw(st.sampled_from(IMPOSSIBLE[form]))
    name, problem = edited(kinds, number)
    assert problem is not None
    assert problem.startswith(f"tensor {name} holds {said}")
    assert edited(*data.draw(st.sampled_from(POSSIBLE[form])))[1] is None


@pytest.mark.parametrize("kind", CODES_OF_8)
@given(code=st.sampled_from([0x77, 0x78, 0x7E, -9, -8, -2]), exponent=st.sampled_from([-10, -9]), data=st.data())
def test_an_fp8_vector_that_reads_back_as_infinity_is_refused(kind, code, exponent, data):
    """Code 0x78 is 256, and byte 247 is 2^120; codes from -8 on are those with the sign."""
    context = random_context(packing_without_graphs("rocketkv-mt", kv_cache="fp8"), 20, 0)
    codes, exponents = context.tensors[f"{kind}.1"].copy(), context.tensors[f"{kind}_scale.1"].copy()
    head, token, channel = (data.draw(st.integers(0, size - 1)) for size in codes.shape)
    codes[head, token] = 0x77
    codes[head, token, channel], exponents[head, token] = code, exponent
    problem = impossible(
        replace(context, tensors={**context.tensors, f"{kind}.1": codes, f"{kind}_scale.1": exponents})
    )
    beyond = exponent == -9 and code & 0x7F >= 0x78
    assert problem == (f"tensor {kind}.1 holds numbers beyond any float32" if beyond else None)


def test_keys_in_int8_and_values_in_int4_are_told_apart():
    context = random_context(packing_without_graphs("full", kv_cache="k8v4"), 20, 0)
    assert impossible(context) is None
    assert impossible(with_number(context, "v.1", 0.5, -128)) is None
    assert impossible(with_number(context, "k.1", 0.5, -128)) == "tensor k.1 holds code -128"
    assert impossible(with_number(context, "v_minimum.1", 0.5, -0.0)) == "tensor v_minimum.1 holds minima of -0"


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
@given(seed=st.integers(0, 99), spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 3e38]), data=st.data())
def test_finite_vectors_are_never_stored_as_impossible_codes(form, seed, spread, data):
    vectors = (np.random.default_rng(seed).standard_normal((2, 5, 16)).clip(-1, 1) * spread).astype(np.float32)
    vectors[:, 1] = vectors[:, 1, :1]  # all channels alike
    vectors[:, 2] = 0
    context = context_of_keys(vectors, form)
    assert impossible(context) is None
    vectors[0, 3, data.draw(st.integers(0, 15))] = data.draw(st.sampled_from(NOT_FINITE))
    assert impossible(context_of_keys(vectors, form)) == "tensor k_scale.0 holds NaN or infinities"


def context_of_keys(vectors, form):
    """Return a context of one cache with these keys, [G,n,D]."""
    context = random_context(packing_without_graphs("full"), 1, 0)
    parts = zip(("k.0", "k_scale.0", "k_minimum.0"), stored(vectors, VECTOR_FORMATS[form]), strict=False)
    return replace(context, tensors=dict(parts))


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


PACKINGS = {form: packing_without_graphs("rocketkv", kv_cache=form) for form in CACHE_FORMATS}


@pytest.fixture(params=CACHE_FORMATS)
def packing(request):
    return PACKINGS[request.param]


@pytest.fixture
def poisoned(packing):
    """A context with a key that is not finite, as its format stores it."""
    form = packing.fingerprint.kv_cache
    name = "k.0" if form == "auto" else "k_scale.0"
    return with_number(random_context(packing, 20, 0), name, 0.3, -1 if form == "fp8" else np.nan)


HOLDS_NAN = r"tensor k(_scale)?\.0 holds NaN or infinities"


def test_a_file_with_nan_in_keys_is_refused(packing, poisoned, tmp_path, monkeypatch):
    with monkeypatch.context() as writing:
        writing.setattr(context_file, "impossible", lambda context: None, raising=False)
        write_context(tmp_path / "context", poisoned)
    with pytest.raises(InputError, match=f"context: {HOLDS_NAN}") as caught:
        read_context(tmp_path / "context", packing)
    assert "kvc-trt verify" in caught.value.hint


def test_a_context_with_nan_in_keys_is_not_written(poisoned, tmp_path):
    with pytest.raises(InputError, match=HOLDS_NAN):
        write_context(tmp_path / "context", poisoned)
    assert not (tmp_path / "context").exists()


def test_a_handoff_with_nan_in_keys_is_refused(packing, poisoned):
    content = np.zeros(largest_handoff(packing), np.uint8)
    handoff = write_handoff(poisoned, packing, content)
    with pytest.raises(HandoffRefused, match=f"the handoff: {HOLDS_NAN}"):
        read_handoff(handoff, packing, content)
