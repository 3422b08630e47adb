"""Lists on equal inputs, judged by the rankings of RocketKV's two stages: the form that tests of operators need."""

from __future__ import annotations

import numpy as np

from kvc_trt.methods.base.constants import PoolKind
from kvc_trt.methods.hybrid import ByPages
from kvc_trt.methods.rankings.ranking import Prompts, Step
from kvc_trt.methods.snapkv_plus_plus import ByWindow
from kvc_trt.verify.rankings.index_lists import IndexComparison, compare_kept, compare_read


def compare_compaction(
    q_window: np.ndarray, keys: np.ndarray, prompt_lengths: np.ndarray, expected: np.ndarray, actual: np.ndarray,
    *, pool_kernel: int, pool_kind: PoolKind = "max", truncates: bool = False,
) -> IndexComparison:  # fmt: skip
    """Kept prompt positions `actual` [B, G, >=C] against the reference's `expected` [B, G, C]."""
    prompts = Prompts((q_window,), keys, keys, prompt_lengths)
    return compare_kept(ByWindow(pool_kernel, pool_kind=pool_kind), prompts, expected, actual, truncates=truncates)


def compare_selection(
    query: np.ndarray, keys: np.ndarray, lengths: np.ndarray, expected: np.ndarray, actual: np.ndarray,
    *, page_size: int, top_r: int, fp8_bounds: bool = False, recent: int = 0, truncates: bool = False,
) -> IndexComparison:  # fmt: skip
    """Tokens read by one step, `actual` [B, G, .] against the reference's `expected`."""
    ranking = ByPages(page_size, top_r, fp8_bounds, recent)
    return compare_read(ranking, Step(query, keys, lengths), expected, actual, truncates=truncates)
