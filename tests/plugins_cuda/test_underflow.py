"""Kernels on queries so long that most softmax weights are below float32's normal range: the reference's choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_trt.kernels.library import KernelLibrary
from kvc_trt.methods.hybrid import channel_choices, page_scores
from kvc_trt.methods.rankings.rounding import SMALLEST_NORMAL
from kvc_trt.methods.snapkv_plus_plus import window_scores
from tests.plugins_cuda.cases import DTYPES, FP8, compact_case, step_case
from tests.plugins_cuda.checks import check_compact, check_hybrid

LENGTHENED = 200.0
"""Logits of random vectors reach a few units; with queries this many times as long, differences reach hundreds."""


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_tokens_are_kept_although_their_weights_underflow(
    library: KernelLibrary, dtype: torch.dtype, pool: int
) -> None:
    case = compact_case(lengths=[150, 90], size=64, window=2, budget=120, pool=pool, dtype=dtype, seed=4)
    case.q_window.mul_(LENGTHENED)
    queries, keys = case.q_window.double().numpy(), case.k.double().numpy()
    scores = window_scores(queries[0, :2], keys[0, 0], pool).pooled
    assert 0 < np.sort(scores)[-(120 - 2)] < SMALLEST_NORMAL, "the budget has room for weights that underflow"
    check_compact(library, case)


@pytest.mark.parametrize("dtype", DTYPES)
@FP8
def test_pages_of_a_step_are_selected_although_their_weights_underflow(
    library: KernelLibrary, fp8: bool, dtype: torch.dtype
) -> None:
    case = step_case(lengths=[199, 80], size=64, top_r=24, top_k=120, dtype=dtype, seed=5, fp8=fp8)
    case.query.mul_(LENGTHENED)
    query, keys = case.query[0, :2].double().numpy(), case.k_cache[0, 0, :199].double().numpy()
    scores = page_scores(query, keys, case.page_size, next(channel_choices(query, 24)), fp8_bounds=fp8).token_weight
    assert 0 < np.sort(scores)[-120 // 4] < SMALLEST_NORMAL, "the list has room for weights that underflow"
    check_hybrid(library, case)
