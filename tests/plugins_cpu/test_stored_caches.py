"""Native steps over caches that have a format: the reference's codes, bit for bit, and the bodies' attention."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.models.cache_formats import CACHE_FORMATS, VECTOR_FORMATS
from kvc_trt.operators.attention.dense_attention import DENSE_ATTENTION
from kvc_trt.operators.schema import CACHE_FORMAT
from kvc_trt.operators.shapes import HeadShape, Layout
from tests.graph.small_models import SingleNode, normal
from tests.plugins_cpu.libraries import ANY_INSTRUCTIONS, use_at_most
from tests.plugins_cpu.native_node import NativeNode
from tests.rounding import assert_close
from tests.stored_tables import FORMATS, parts_of, stored

LARGEST = np.finfo(np.float32).max


@cache
def nodes(library: Path, form: str, size: int, threads: int = 1) -> tuple[SingleNode, NativeNode]:
    """KvcDenseAttention over caches of that format, by its body and by the library."""
    body = DENSE_ATTENTION.body(Layout(HeadShape(None, None, size), cache_format=CACHE_FORMATS[form]))
    attributes = {"dense_until": 0, CACHE_FORMAT.name: CACHE_FORMATS[form].code}
    return SingleNode(body, attributes), NativeNode(body, attributes, library, threads)


def inputs(form: str, lengths: list[int], heads: int, kv_heads: int, size: int, capacity: int, seed: int = 0):
    """Return a step of rows with that many entries; slots past them hold zeros."""
    rows = len(lengths)
    used = (np.arange(capacity) < np.array(lengths)[:, None])[:, None, :, None]
    keys, values = (normal(seed + i, rows, kv_heads, capacity, size) for i in (3, 4))
    caches = {name: np.where(used, part, 0).astype(part.dtype) for name, part in parts_of(keys, values, form).items()}
    new = {"k_new": normal(seed + 1, rows, kv_heads, size), "v_new": normal(seed + 2, rows, kv_heads, size)}
    return {"query": normal(seed, rows, heads, size), **new, **caches, "cache_lengths": np.array(lengths)}


def check(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert_close(found.pop("output"), expected["output"], 2e-6)
    for name, array in found.items():
        np.testing.assert_array_equal(array.view(np.uint8), expected[name].view(np.uint8), err_msg=name)


@pytest.mark.pairwise
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "capacity", "lengths"),
    [
        (8, 2, 16, 64, [5, 0, 63]),
        (9, 3, 64, 2500, [2400, 1200]),  # groups of three, several parts
        (4, 4, 20, 40, [39]),  # a head size that fills no whole vectors, one group of int4
        (14, 2, 128, 2060, [1023, 1024, 2047, 2059]),  # both sides of the border between parts
        (2, 1, 256, 40, [39]),
    ],
)
def test_native_results_equal_the_bodys(
    library: Path, instructions: str, threads: int, form: str, heads: int, kv_heads: int, size: int, capacity: int,
    lengths: list[int],
) -> None:  # fmt: skip
    body, native = nodes(library, form, size, threads)
    arrays = inputs(form, lengths, heads, kv_heads, size, capacity)
    check(native.named(arrays), body.named(arrays))


@settings(max_examples=60)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.integers(0, 47), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 50).map(lambda half: 2 * half),
    st.integers(0, 1000),
    ANY_INSTRUCTIONS,
)
def test_random_shapes_equal_the_body(
    library: Path, form: str, lengths: list[int], group: int, kv_heads: int, size: int, seed: int, instructions: str
) -> None:
    use_at_most(library, instructions)
    body, native = nodes(library, form, size)
    arrays = inputs(form, lengths, group * kv_heads, kv_heads, size, 48, seed)
    check(native.named(arrays), body.named(arrays))


def check_stored(library: Path, form: str, vectors: np.ndarray) -> None:
    """A step appends each of the `vectors` [n,D] to an empty row; what stands there is what the reference stores."""
    step = inputs(form, [0] * len(vectors), 1, 1, vectors.shape[1], 2)
    _, native = nodes(library, form, vectors.shape[1])
    found = native.named({**step, "k_new": vectors[:, None], "v_new": vectors[:, None]})
    own = CACHE_FORMATS[form]
    for table, vector in (("k", own.keys), ("v", own.values)):
        names = (f"{table}_cache_out", f"{table}_scale_out", f"{table}_minimum_out")
        for name, part in zip(names, stored(vectors, vector), strict=False):
            slots = found[name][:, 0]
            np.testing.assert_array_equal(slots[:, 0].view(np.uint8), part.view(np.uint8), err_msg=name)
            assert not slots[:, 1].view(np.uint8).any()


@pytest.mark.parametrize("form", VECTOR_FORMATS)
@pytest.mark.parametrize("size", [8, 24, 32, 64, 96])
def test_vectors_of_any_magnitude_are_stored_as_the_reference_stores_them(
    library: Path, instructions: str, form: str, size: int
) -> None:
    spread = np.exp(np.random.default_rng(size).uniform(-86, 86, (1000, 1)))
    check_stored(library, form, (normal(size, 1000, size) * spread).astype(np.float32))


@pytest.mark.parametrize("form", VECTOR_FORMATS)
def test_unusual_vectors_are_stored_as_the_reference_stores_them(library: Path, instructions: str, form: str) -> None:
    zero, one = np.zeros(32, np.float32), np.ones(32, np.float32)
    alone = [
        np.where(np.arange(32) == place, value, one).astype(np.float32)
        for place, value in ((3, np.nan), (31, np.inf), (0, -np.inf), (5, 1e30), (7, LARGEST), (9, -LARGEST), (2, -0.0))
    ]
    whole = [zero, -zero, one, -one, 1e-45 * one, -1e-40 * one, 70000 * one, LARGEST * one]
    exponents = np.arange(-126, 127)
    edges = np.concatenate([np.ldexp(mantissa, exponents) for mantissa in (1.0, 1.75)]).astype(np.float32)
    beside = np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, LARGEST)])
    shares = np.ldexp(1.0, -np.arange(32) // 2) * np.array([1, -1] * 16)
    halves = np.arange(32) * np.float32(0.5) - 8  # between two codes: to the even one
    edges = (beside[:, None] * shares).astype(np.float32)
    check_stored(library, form, np.stack([*alone, *whole, halves, halves * 8, *edges]).astype(np.float32))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spoiled", ["k_new", "v_new"])
def test_a_token_that_is_not_finite_makes_its_own_heads_nan(
    library: Path, instructions: str, form: str, spoiled: str
) -> None:
    body, native = nodes(library, form, 32)
    arrays = inputs(form, [3, 30], 4, 2, 32, 40)
    arrays[spoiled][0, 1, 5] = np.inf
    found, expected = native.named(arrays), body.named(arrays)
    assert np.isnan(found["output"][0, 2:]).all()
    assert np.isfinite(found["output"][0, :2]).all()
    assert np.isfinite(found["output"][1]).all()
    check(found, expected)


@pytest.mark.parametrize("form", FORMATS)
def test_threads_do_not_change_a_bit(library: Path, instructions: str, form: str) -> None:
    arrays = inputs(form, [1290, 77], 6, 2, 48, 1300)
    one, two = (nodes(library, form, 48, threads)[1].named(arrays) for threads in (1, 2))
    np.testing.assert_array_equal(one["output"], two["output"])


@pytest.mark.parametrize(
    ("size", "message"), [(258, "expected a head size in 1..256, found 258"), (31, "expected an even head size")]
)
def test_a_head_size_that_no_format_has_is_refused(library: Path, size: int, message: str) -> None:
    _, native = nodes(library, "int4", size)
    arrays = inputs("int4", [3], 1, 1, 32, 8)
    for name, array in arrays.items():
        if name != "cache_lengths":
            widths = {32: size, 16: size // 2, 1: 1}
            arrays[name] = np.zeros((*array.shape[:-1], widths[array.shape[-1]]), array.dtype)
    with pytest.raises(Exception, match=message):
        native.named(arrays)
