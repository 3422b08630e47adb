"""Prompts of several lengths in one prefill."""

from __future__ import annotations

import numpy as np

from kvc_trt.operators import PROMPT_BLOCK
from kvc_trt.runtime.session.batch import batch_of


def test_prompts_are_padded_on_the_right_to_whole_blocks():
    batch = batch_of([[1, 2, 3, 4, 5], [6]], block=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0, 0]]
    assert (batch.prompt_lengths.tolist(), len(batch)) == ([5, 1], 2)
    assert batch.rows() == [[1, 2, 3, 4, 5], [6]]


def test_a_block_is_the_graphs_own_where_none_is_given():
    assert batch_of([[7]]).input_ids.shape == (1, PROMPT_BLOCK)
    assert batch_of([[7]]).input_ids.dtype == np.int64
