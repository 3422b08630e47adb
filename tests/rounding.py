"""Compares two executors' numbers for the same inputs: equal but for rounding, whatever processor rounds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvc_trt.operators.fp8_bounds import LARGEST, values_of
from tests.close_bounds import may_be_of_close

NO_TOKENS = {"f": float(np.finfo(np.float32).max), "i": float(LARGEST)}
"""Magnitude of the bounds of a page without tokens, by the kind of their type."""


def assert_close(found: ArrayLike, expected: ArrayLike, tolerance: float = 1e-5, name: str = "") -> None:
    """Assert that differences are at most `tolerance` times the largest expected magnitude, at least 1, as in verify.

    Each addition rounds relative to what has been added up so far, so the rounding of a sum grows with its terms, and
    elements of a tensor that are near 0 carry that of the large ones. float32 rounds by 2^-24: 1e-5 are 168 such
    roundings of the largest element, 2e-6 are 34. Integers are equal, those of int8 (bounds in fp8) within the same
    tolerance as rounded numbers.
    """
    here, wanted = np.asarray(found), np.asarray(expected)
    assert here.shape == wanted.shape, f"{name}: {here.shape}, expected {wanted.shape}"
    if wanted.dtype.kind != "f" and wanted.dtype != np.int8:
        np.testing.assert_array_equal(here, wanted, err_msg=name)
        return
    numbers = np.abs((values_of(wanted) if wanted.dtype == np.int8 else wanted).astype(np.float64))
    known = ~(numbers >= NO_TOKENS[wanted.dtype.kind])
    bar = tolerance * np.nanmax(numbers, where=known, initial=1.0)
    if wanted.dtype == np.int8:
        assert may_be_of_close(here, wanted, bar), name
        return
    np.testing.assert_array_equal(here[~known], wanted[~known], err_msg=name)
    np.testing.assert_allclose(here[known], wanted[known], rtol=0, atol=bar, err_msg=name)
