"""Stored vectors as arrays of NumPy are read as the reference reads them, and page bounds of either are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt import reference
from kvc_trt.methods.base.isolated_runs import page_bounds, rebuild_bounds, stored_page_bounds
from kvc_trt.models.cache_formats import CACHE_FORMATS, VECTOR_FORMATS
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.cached_vectors import CachedVectors, cached_vectors
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from tests.stored_tables import FORMATS, parts_of, stored, unpacked

SPREADS = (1e-30, 1e-4, 1.0, 1e4, 1e30)


def vectors_of(seed: int, size: int, *shape: int) -> np.ndarray:
    """Vectors of different sizes; some are 0, some have a NaN or an infinity."""
    random = np.random.default_rng(seed)
    made = random.standard_normal((*shape, size)) * random.choice(SPREADS, (*shape, 1))
    made[random.random(shape) < 0.1] = 0
    lost = random.random(shape) < 0.1
    made[lost, 0] = random.choice([np.nan, np.inf, -np.inf], int(lost.sum()))
    return made.astype(np.float32)


@given(form=st.sampled_from(sorted(VECTOR_FORMATS)), size=st.sampled_from([2, 6, 32, 64, 96]), seed=st.integers(0, 999))
def test_values_are_those_of_the_reference_to_the_bit(form, size, seed):
    vectors = vectors_of(seed, size, 2, 7)
    found = CachedVectors(tuple(stored(vectors, VECTOR_FORMATS[form])), VECTOR_FORMATS[form])
    expected = reference.store(torch.from_numpy(vectors), format=form).values().numpy()
    assert found.values().dtype == np.float32
    np.testing.assert_array_equal(found.values(), expected)
    np.testing.assert_array_equal(np.signbit(found.values()), np.signbit(expected))
    np.testing.assert_array_equal(found.codes(), unpacked(found.parts[0], VECTOR_FORMATS[form]))
    two = found.map(lambda part: part[:, 2:4])
    np.testing.assert_array_equal(two.values(), expected[:, 2:4])


def test_exact_vectors_are_what_they_are():
    vectors = np.arange(48, dtype=np.float16).reshape(2, 3, 8)
    exact = CachedVectors((vectors,))
    assert exact.values() is exact.codes() is vectors


@pytest.mark.parametrize("form", FORMATS)
def test_a_caches_keys_and_values_are_found_by_name(form):
    keys, values = vectors_of(1, 32, 1, 2, 5), vectors_of(2, 32, 1, 2, 5)
    state = {**parts_of(keys, values, form), "bounds": np.zeros(3)}
    for tensor, exact, vector in (
        (K_CACHE, keys, CACHE_FORMATS[form].keys), (V_CACHE, values, CACHE_FORMATS[form].values)
    ):  # fmt: skip
        found = cached_vectors(state, tensor, CACHE_FORMATS[form]).values()
        expected = reference.store(torch.from_numpy(exact), format=vector.name).values().numpy()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int8", "float32", "float16", "bfloat16"])
@given(
    form=st.sampled_from(sorted(VECTOR_FORMATS)), seed=st.integers(0, 999), page_size=st.integers(1, 7),
    stored_before=st.integers(0, 12), new=st.integers(1, 12), kept=st.integers(0, 12),
)  # fmt: skip
def test_bounds_after_slots_were_dropped_are_those_of_what_is_left(
    dtype, form, seed, page_size, stored_before, new, kept
):
    keys = np.random.default_rng(seed).standard_normal((1, 2, 24, 6)).astype(np.float32)
    parts = CachedVectors(tuple(stored(keys, VECTOR_FORMATS[form])), VECTOR_FORMATS[form])
    kind, fp8 = numpy_dtype(dtype), dtype == "int8"

    def expected(count):
        read = parts.values() if fp8 else parts.values().astype(kind)
        return page_bounds(read, np.array([count]), page_size, fp8=fp8)[0]

    left = stored_before + min(kept, new)
    bounds = stored_page_bounds(parts, np.array([stored_before + new]), page_size, kind)[0]
    np.testing.assert_array_equal(bounds, expected(stored_before + new))
    rebuild_bounds(parts.map(lambda part: part[0]), bounds, range(left, stored_before + new), page_size)
    np.testing.assert_array_equal(bounds, expected(left))
    assert not np.signbit(bounds[bounds == 0]).any(), "codes are often 0, and executors differ in the sign of a maximum"
