"""Admission by memory: rows and the prefill that runs never take more than there is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Request
from kvc_trt.runtime.scheduler.admission import MemoryPlan
from tests.runtime.scheduling import scheduler


def plan(limit, row_bytes=100):
    return MemoryPlan(limit, row_bytes, prefill_bytes=lambda tokens: 10.0 * tokens)


def test_a_request_that_does_not_fit_alone_is_refused_with_the_numbers():
    one = scheduler(memory=plan(400))
    with pytest.raises(InputError, match=r"a prompt of 40 tokens needs 500 B .* at most 400 B"):
        one.submit(Request([1] * 40))
    one.submit(Request([1] * 30))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(500, 900))
def test_rows_and_the_prefill_never_take_more_than_the_memory(lengths, limit):
    one = scheduler(rows=8, memory=plan(limit))
    tickets = [one.submit(Request([1] * length, max_new_tokens=6)) for length in lengths]
    while one.advance():
        joining = one._worker.joining
        taken = 100 * len(one._worker.running) + (0 if joining is None else 100 + 10 * joining.ticket.prompt_tokens)
        assert taken <= limit
    assert all(ticket.done for ticket in tickets)
