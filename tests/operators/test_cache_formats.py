"""Bodies that store vectors in a format, and that read them back, against the reference: every bit."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest
from onnx import TensorProto, helper

from kvc_trt.graph import IR_VERSION
from kvc_trt.models.cache_formats import AUTO, CACHE_FORMATS, VECTOR_FORMATS
from kvc_trt.operators import OPSET
from kvc_trt.operators.cache_formats import write_codes, write_read, write_stored
from kvc_trt.operators.emitter import Emitter
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import CACHE_FORMAT
from tests.graph.small_models import normal, open_session
from tests.stored_tables import FORMATS, read_back, stored, unpacked

LARGEST = np.finfo(np.float32).max


@cache
def session(form: str):
    """Return a session that stores FLOAT vectors: their parts, what is read, and one code for each channel."""
    emit, vector = Emitter(), VECTOR_FORMATS[form]
    parts = write_stored(emit, "vectors", vector)
    outputs = [*parts, write_read(emit, parts, vector), emit.Identity(write_codes(emit, parts[0], vector))]
    given = helper.make_tensor_value_info("vectors", TensorProto.FLOAT, None)
    graph = helper.make_graph(emit.nodes, "stored", [given], [helper.make_empty_tensor_value_info(o) for o in outputs])
    return open_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION))


def check(form: str, vectors: np.ndarray) -> None:
    *parts, read, codes = session(form).run(None, {"vectors": vectors})
    vector = VECTOR_FORMATS[form]
    expected = stored(vectors, vector)
    for found, wanted in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))
    np.testing.assert_array_equal(read, read_back(vectors, vector))
    np.testing.assert_array_equal(codes, unpacked(expected[0], vector))


@pytest.mark.parametrize("form", VECTOR_FORMATS)
@pytest.mark.parametrize("size", [8, 24, 32, 64, 96])
def test_vectors_of_any_magnitude_are_stored_as_the_reference_stores_them(form, size):
    spread = np.exp(np.random.default_rng(size).uniform(-86, 86, (3, 2, 300, 1)))
    check(form, (normal(size, 3, 2, 300, size) * spread).astype(np.float32))


@pytest.mark.parametrize("form", VECTOR_FORMATS)
def test_unusual_vectors_are_stored_as_the_reference_stores_them(form):
    zero, one = np.zeros(32, np.float32), np.ones(32, np.float32)
    alone = [
        np.where(np.arange(32) == place, value, one).astype(np.float32)
        for place, value in ((3, np.nan), (31, np.inf), (0, -np.inf), (5, 1e30), (7, LARGEST), (9, -LARGEST), (2, -0.0))
    ]
    whole = [zero, -zero, one, -one, 1e-45 * one, -1e-40 * one, 70000 * one, LARGEST * one]
    check(form, np.stack([*alone, *whole])[None, None])


@pytest.mark.parametrize("form", VECTOR_FORMATS)
def test_numbers_beside_powers_of_two_and_beside_the_largest_of_an_exponent(form):
    """A logarithm may take them for those on the other side."""
    exponents = np.arange(-126, 127, dtype=np.float64)
    edges = np.concatenate([np.ldexp(mantissa, exponents.astype(int)) for mantissa in (1.0, 1.75)]).astype(np.float32)
    beside = np.stack([np.nextafter(edges, 0), edges, np.nextafter(edges, LARGEST)])
    shares = np.ldexp(1.0, -np.arange(16)) * np.array([1, -1] * 8)
    check(form, (beside[..., None] * shares).astype(np.float32)[None])


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_auto_changes_no_operator(operator):
    """Calls in the graphs of older engines are the calls of `auto`."""
    assert operator.in_format(CACHE_FORMATS[AUTO]) is operator
    assert CACHE_FORMAT not in operator.attributes
    added = {part.name for part in operator.in_format(CACHE_FORMATS["int4"]).tensors} - {
        tensor.name for tensor in operator.tensors
    }
    assert all(re.search("_(scale|minimum)(_out)?$", name) for name in added)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("operator", [one for one in OPERATORS.values() if one.stores], ids=lambda one: one.name)
def test_no_two_tensors_of_an_operator_have_one_name(operator, form):
    names = [tensor.name for tensor in operator.in_format(CACHE_FORMATS[form]).tensors]
    assert len(names) == len(set(names))
