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


def session_of(rows=1, kind=FakeExecutor, *, prefix_bytes=0, **options):
    executor = kind(**options)
    return Session(executor, None, rows, packing=FakePacking(executor), prefix_bytes=prefix_bytes)


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
    other = session_of()
    started = other.generate([Request([], 9 - fed, context=taken)])[0]
    assert list(started.token_ids) == rest
    assert (started.prompt_token_ids, started.reused_tokens, started.logical_length) == ((), 20 + fed, 28)
    assert other.executor.prefills == 0


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
    session = session_of(kind=FakeGreedyExecutor)
    (row,) = session.add([Request(PROMPT)])
    assert session.take(row).logical_length == 20
    session.step()
    with pytest.raises(ValueError, match="only its next token on the host; expected a request with keep_logits"):
        session.take(row)
    session = session_of(kind=FakeGreedyExecutor)
    (row,) = session.add([Request(PROMPT, keep_logits=True)])
    session.step()
    assert session.executor.asked == ["logits"]
    assert session.take(row).logical_length == 21


def test_continuations_too_long_for_a_context_are_refused(context):
    session = session_of()
    with pytest.raises(InputError, match="11 tokens do not fit after 20 tokens, found room for 10") as slots:
        session.generate([Request([1] * 11, 1, context=context)])
    assert "--max-output-len" in (slots.value.hint or "")
    with pytest.raises(InputError, match="31 tokens do not fit after 20 tokens") as positions:
        session.generate([Request([1] * 31, 1, context=context)])
    assert "--max-conversation-len" in (positions.value.hint or "")
    assert session.rows == ()
    assert len(answer(session, Request([1] * 10, 1, context=context))[0]) == 1


def test_tokens_after_a_context_are_checked(context):
    with pytest.raises(InputError, match="token 1 is 50"):
        session_of().generate([Request([1, 50], context=context)])


def test_another_engines_context_is_refused_before_anything_runs(context):
    session = session_of(2)
    foreign = replace(context, fingerprint=replace(context.fingerprint, weights="f" * 64))
    with pytest.raises(InputError, match="prompt 1: its context was made by an engine with other weights"):
        session.stream([Request([1]), Request([], context=foreign)])
    assert (session.executor.prefills, session.executor.runs, session.rows) == (0, 0, ())


def test_a_session_without_a_packing_refuses_contexts(context):
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


PLENTY = 1 << 20


def taken_of(session, prompt):
    (row,) = session.add([Request(prompt)])
    context = session.take(row)
    session.remove(row)
    return context


def test_a_prompt_starts_from_the_longest_shared_text_it_begins_with():
    session = session_of(prefix_bytes=PLENTY)
    shared = {length: taken_of(session_of(), PROMPT[:length]) for length in (4, 17)}
    for context in shared.values():
        session.contexts.share(context)
    for prompt, reused in ((PROMPT, 17), (PROMPT[:17], 17), (PROMPT[:16], 4), ([*PROMPT[:10], 49], 4)):
        (found,) = session.generate([Request(prompt, 3)])
        assert (found.reused_tokens, found.prompt_token_ids) == (reused, tuple(prompt))
        assert [found.token_ids] == answer(session_of(), Request(prompt[reused:], 3, context=shared[reused]))
    assert session.executor.prefills == 0
    (fresh,) = session.generate([Request([49, *PROMPT], 3)])
    assert (fresh.reused_tokens, session.executor.prefills) == (0, 1)


def test_rows_of_one_batch_start_from_what_fits_each_of_them():
    session = session_of(3, prefix_bytes=PLENTY)
    session.contexts.share(taken_of(session_of(), PROMPT[:15]))
    own = taken_of(session_of(), [7] * 30)
    outputs = session.generate([Request(PROMPT, 3), Request([1, 2], 3), Request([5], 3, context=own)])
    assert [output.reused_tokens for output in outputs] == [15, 0, 30]
    assert session.executor.prefills == 1


def test_no_answer_is_shorter_because_of_a_shared_text():
    """After it, the rest of the prompt takes the slots of the answer: 10 of them in this engine."""
    session = session_of(prefix_bytes=PLENTY)
    session.contexts.share(taken_of(session_of(), PROMPT[:16]))
    for new, reused in ((7, 16), (8, 0)):
        (found,) = session.generate([Request(PROMPT, new)])
        assert (len(found.token_ids), found.finish_reason, found.reused_tokens) == (new, "length", reused)


def test_prompts_are_shared_by_themselves_only_where_nothing_is_lost():
    for budget, reused in ((40, 20), (12, 0)):
        session = session_of(prefix_bytes=PLENTY, budget=budget)
        first, again, longer = (session.generate([Request(prompt, 3)])[0] for prompt in (PROMPT, PROMPT, [*PROMPT, 5]))
        assert [one.reused_tokens for one in (first, again, longer)] == [0, reused, reused]
        assert first.token_ids == again.token_ids
        assert [longer.token_ids] == answer(session_of(budget=budget), Request([*PROMPT, 5], 3))


def test_a_session_without_bytes_shares_nothing():
    session = session_of(budget=40)
    assert [session.generate([Request(PROMPT, 2)])[0].reused_tokens for _ in range(2)] == [0, 0]
    with pytest.raises(InputError, match="does not fit in 0 B"):
        session.contexts.share(taken_of(session_of(), PROMPT))


def test_a_prompt_larger_than_the_table_is_answered_and_not_shared():
    session = session_of(prefix_bytes=1, budget=40)
    session.executor.read_row = None  # not even copied
    assert [session.generate([Request(PROMPT, 2)])[0].reused_tokens for _ in range(2)] == [0, 0]
    assert len(session.contexts.prefixes) == 0


def test_a_prompt_that_memory_is_missing_for_is_answered_and_not_shared():
    def too_large(row):
        raise MemoryError

    session = session_of(prefix_bytes=PLENTY, budget=40)
    session.executor.read_row = too_large
    assert [session.generate([Request(PROMPT, 2)])[0].reused_tokens for _ in range(2)] == [0, 0]


def test_nothing_runs_where_one_of_many_does_not_fit_after_its_context(context):
    session = session_of()
    with pytest.raises(InputError, match="prompt 1: 11 tokens do not fit after 20 tokens"):
        session.generate([Request([1], 2, context=context), Request([2] * 11, 2, context=context)])
    assert session.executor.runs == 0


def test_another_engines_context_is_not_shared(context):
    session = session_of(prefix_bytes=PLENTY)
    foreign = replace(context, fingerprint=replace(context.fingerprint, model="f" * 64))
    with pytest.raises(InputError, match="the context is of model fake; this engine has fake"):
        session.contexts.share(foreign)
