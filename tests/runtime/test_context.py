"""Rows that are taken from a session as contexts, and rows that start from one."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from tests.runtime.fake_executor import FakeExecutor, FakeGreedyExecutor, FakePacking

PROMPT = list(range(20))


def session_of(rows=1, executor=FakeExecutor, **options):
    return Session(executor(**options), None, rows, packing=FakePacking())


@pytest.fixture
def context():
    session = session_of()
    (row,) = session.add([Request(PROMPT)])
    return session.take(row)


def answer(session, *requests):
    return [output.token_ids for output in session.generate(requests)]


TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=30)


@given(TOKENS, TOKENS)
def test_a_digest_goes_on_where_the_text_did(before, after):
    whole = extended_digest(NO_TOKENS, before + after)
    assert extended_digest(extended_digest(NO_TOKENS, before), after) == whole
    assert len(bytes.fromhex(whole)) == hashlib.sha256().digest_size


@given(TOKENS, TOKENS)
def test_different_texts_have_different_digests(one, other):
    assert (extended_digest(NO_TOKENS, one) == extended_digest(NO_TOKENS, other)) == (one == other)


@pytest.mark.parametrize("fed", [0, 1, 4])
def test_a_row_goes_on_from_wherever_it_was_taken(fed):
    session = session_of()
    (row,) = session.add([Request(PROMPT, 9)])
    tokens = [event.token_id for _ in range(fed) for event in session.step()]
    taken = session.take(row)
    assert taken.logical_length == 20 + fed
    assert taken.cache_lengths == (12 + fed, 20 + fed)
    assert taken.token_digest == extended_digest(NO_TOKENS, PROMPT + tokens)
    rest = [event.token_id for _ in range(9 - fed) for event in session.step()]
    executor = FakeExecutor()
    started = Session(executor, None, 1, packing=FakePacking()).generate([Request([], 9 - fed, context=taken)])[0]
    assert list(started.token_ids) == rest
    assert (started.prompt_token_ids, started.reused_tokens, started.logical_length) == ((), 20 + fed, 28)
    assert executor.prefills == 0


def test_a_sampled_token_that_was_not_fed_is_not_part_of_a_context():
    session = session_of()
    (row,) = session.add([Request(PROMPT)])
    session.sample()
    assert session.take(row).logical_length == 20
    assert session.take(row).token_digest == extended_digest(NO_TOKENS, PROMPT)


def test_queued_tokens_are_not_part_of_a_context():
    session = session_of()
    (row,) = session.add([Request(PROMPT, continuation_token_ids=[7, 8])])
    session.step()
    taken = session.take(row)
    assert taken.token_digest == extended_digest(NO_TOKENS, [*PROMPT, 7])
    assert answer(session_of(), Request([8], 3, context=taken)) == answer(
        session_of(), Request(PROMPT, 3, continuation_token_ids=[7, 8])
    )


def test_a_context_keeps_what_it_held_when_it_was_taken():
    session = session_of()
    (row,) = session.add([Request(PROMPT)])
    taken = session.take(row)
    before = {name: tensor.copy() for name, tensor in taken.tensors.items()}
    for _ in range(5):
        session.step()
    for name, tensor in taken.tensors.items():
        np.testing.assert_array_equal(tensor, before[name])


def test_many_rows_start_from_one_context_beside_rows_that_are_prefilled(context):
    requests = [
        Request([1], 4, context=context),
        Request([5] * 9, 6),
        Request([2, 3], 5, context=context),
        Request([], 4, context=context),
        Request([6] * 30, 3),
    ]
    alone = [answer(session_of(), request)[0] for request in requests]
    for rows in (1, 2, 5):
        assert answer(session_of(rows), *requests) == alone
    session = session_of(5)
    joined = session.add(requests)
    assert joined == (0, 1, 2, 3, 4)
    assert session.executor.prefills == 1
    assert set(session.rows) == set(joined)


def test_a_greedy_row_is_taken_if_it_keeps_its_logits():
    session = session_of(executor=FakeGreedyExecutor)
    (row,) = session.add([Request(PROMPT)])
    assert session.take(row).logical_length == 20
    session.step()
    with pytest.raises(ValueError, match="only its best token on the host; expected a request with keep_logits"):
        session.take(row)
    session = session_of(executor=FakeGreedyExecutor)
    (row,) = session.add([Request(PROMPT, keep_logits=True)])
    session.step()
    assert session.executor.asked == ["logits"]
    assert session.take(row).logical_length == 21


def test_what_does_not_fit_after_a_context_is_refused(context):
    session = session_of()
    with pytest.raises(InputError, match="11 tokens do not fit after 20 tokens, found room for 10"):
        session.generate([Request([1] * 11, 1, context=context)])
    assert session.rows == ()
    assert len(answer(session, Request([1] * 10, 1, context=context))[0]) == 1


def test_tokens_after_a_context_are_checked(context):
    with pytest.raises(InputError, match="token 1 is 50"):
        session_of().generate([Request([1, 50], context=context)])


def test_another_engines_context_is_refused_before_anything_runs(context):
    executor = FakeExecutor()
    session = Session(executor, None, 2, packing=FakePacking())
    foreign = replace(context, fingerprint=replace(context.fingerprint, weights="f" * 64))
    with pytest.raises(InputError, match="prompt 1: its context was made by an engine with other weights"):
        session.stream([Request([1]), Request([], context=foreign)])
    assert (executor.prefills, executor.runs, session.rows) == (0, 0, ())


def test_a_session_without_a_packing_says_so(context):
    session = Session(FakeExecutor(), None, 1)
    with pytest.raises(ValueError, match="without a packing"):
        session.generate([Request([], context=context)])
    (row,) = session.add([Request(PROMPT)])
    with pytest.raises(ValueError, match="without a packing"):
        session.take(row)


def test_logits_that_are_not_finite_are_an_error_of_the_row(context):
    broken = replace(context, logits=np.full_like(context.logits, np.nan))
    session = session_of(2)
    with pytest.raises(InputError, match="not finite after 20 tokens"):
        session.generate([Request([], context=broken)])
    assert session.rows == ()
