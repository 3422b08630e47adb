"""Bounds of one row's pages in PyTorch are those that NumPy makes of the same keys; in fp8 of infinite ones too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.backends.torch.model.bounds import rebuild_bounds, stays_in_page
from kvc_trt.kernels.ops import kvc
from kvc_trt.methods.base.isolated_runs import page_bounds

VALUES = np.array([-np.inf, -7e4, -1.3, -1e-6, -0.0, 0.0, 1e-6, 1.1, 2.5, 6e4, np.inf], np.float32)
SLOTS = 24


@pytest.mark.parametrize("fp8", [False, True])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), page_size=st.integers(1, 7), stored=st.integers(0, 12), new=st.integers(1, 12),
    kept=st.integers(0, 12),
)  # fmt: skip
def test_raised_and_rebuilt_bounds_are_those_of_the_keys(fp8, seed, page_size, stored, new, kept):
    keys = np.random.default_rng(seed).choice(VALUES if fp8 else VALUES[1:-1], (2, SLOTS, 3))

    def expected(count):
        return page_bounds(keys[None], np.array([count]), page_size, fp8=fp8)[0]

    bounds = torch.from_numpy(expected(stored))
    given = torch.from_numpy(keys[None, :, stored : stored + new]), bounds[None]
    kvc.raise_bounds(*given, torch.tensor([stored]), torch.tensor([new]), page_size=page_size, fp8_bounds=int(fp8))
    np.testing.assert_array_equal(bounds, expected(stored + new))
    left = stored + min(kept, new)
    dropped = range(left, stored + new)
    rebuild_bounds(torch.from_numpy(keys[:, stays_in_page(dropped, page_size)]), bounds, dropped, page_size)
    np.testing.assert_array_equal(bounds, expected(left))
