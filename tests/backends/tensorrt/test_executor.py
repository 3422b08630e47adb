"""Parts of the executor that need neither a GPU nor a fake of one (`test_greedy_step.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.opening import open_engine
from kvc_trt.backends.tensorrt.running.buffers import StagedRows
from kvc_trt.backends.tensorrt.running.executor import TensorRtExecutor


@given(st.integers(1, 12).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows), st.integers(0, rows))))
def test_rows_that_join_in_order_arrive_whole(sizes):
    """Buffers of `rows` rows, `count` prompts prefilled into the last ones while `active` rows decode."""
    rows, count, active = sizes
    active = min(active, rows - count)
    buffers = np.array([*range(active), *[-1] * (rows - active)])
    staged = StagedRows(rows - count, count)
    buffers[staged.first :] = 100 + np.arange(count)
    for index in range(count):
        source = staged.take(index, active + index)
        if source is not None:
            buffers[active + index] = buffers[source]
    assert buffers[: active + count].tolist() == [*range(active), *(100 + index for index in range(count))]


def test_a_row_whose_place_was_taken_is_refused():
    staged = StagedRows(first=4, count=4)
    assert staged.take(0, 0) == 4
    assert staged.take(3, 5) == 7
    with pytest.raises(ValueError, match="prefilled row 1 was overwritten"):
        staged.take(1, 1)
    assert staged.take(2, 6) is None
    with pytest.raises(ValueError, match="the prefill had 4 rows"):
        staged.take(4, 0)


def test_before_anything_is_loaded_the_limits_are_known(tiny_engine):
    executor = TensorRtExecutor(open_engine(tiny_engine))
    assert executor.limits.max_input_len == 256
    assert executor.limits.capacities == (executor.program.parameters.capacity,) * 2
    assert executor.runs == 0
    with pytest.raises(ValueError, match="no rows are allocated"):
        executor.state_bytes()
