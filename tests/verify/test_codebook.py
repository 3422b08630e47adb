"""The vectors of a case: what a cache gives back, the codes behind it, and codes that stand for none of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.models.cache_formats import VECTOR_FORMATS
from kvc_trt.verify.codes.codebook import Codebook
from kvc_trt.verify.codes.parts import stored_parts, unpacked
from tests.stored_tables import read_back, stored

forms = st.sampled_from(list(VECTOR_FORMATS.values()))
sizes = st.sampled_from([8, 24, 32, 64])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@given(form=forms, size=sizes, tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_codes_of_stored_vectors_are_found_by_their_values(form, size, tokens, seed):
    exact = normal(seed, 2, tokens, size)
    book = Codebook(form, size)
    read = book.store(exact)
    np.testing.assert_array_equal(read, read_back(exact, form))
    parts = book.parts(read)
    for found, expected in zip(parts, stored(exact, form), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(book.read(parts), read)
    np.testing.assert_array_equal(book.exact(read, np.float32), exact)
    np.testing.assert_array_equal(book.codes(read), unpacked(parts[0], form))
    np.testing.assert_array_equal(book.read_codes(book.codes(read)), read)


@given(form=forms, size=sizes, seed=st.integers(0, 99))
def test_free_slots_are_zeros_in_every_part(form, size, seed):
    exact = normal(seed, 3, size)
    exact[1] = 0
    book = Codebook(form, size)
    read = book.hold(exact)
    assert not read[1].any()
    assert not any(part[1].any() for part in book.parts(read))
    np.testing.assert_array_equal(book.read(book.parts(read)), read)


@pytest.mark.parametrize("name", VECTOR_FORMATS)
def test_an_operator_that_makes_codes_a_second_time_is_noticed(name):
    """Half of what a cache of a case holds would get other codes, and those stand for nothing."""
    form, book = VECTOR_FORMATS[name], Codebook(VECTOR_FORMATS[name], 32)
    read = book.hold(normal(3, 40, 32))
    assert not np.isnan(book.read(book.parts(read))).any()
    again = np.isnan(book.read(stored_parts(read, form))).all(axis=-1)
    assert again.sum() >= 10


@pytest.mark.parametrize("name", VECTOR_FORMATS)
def test_codes_of_no_vector_of_the_case_read_as_nan(name):
    book = Codebook(VECTOR_FORMATS[name], 32)
    parts = book.parts(book.store(normal(4, 6, 32)))
    for part in parts:
        part.view(np.uint8)[2, 0] ^= 1
        found = book.read(parts)
        assert np.isnan(found[2]).all()
        assert not np.isnan(np.delete(found, 2, axis=0)).any()
        part.view(np.uint8)[2, 0] ^= 1


def test_vectors_that_are_not_of_the_case_are_refused():
    book = Codebook(VECTOR_FORMATS["int8"], 8)
    book.store(normal(1, 3, 8))
    with pytest.raises(ValueError, match="2 of 2 vectors are not of this case"):
        book.parts(normal(2, 2, 8))
