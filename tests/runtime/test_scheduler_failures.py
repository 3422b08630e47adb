"""A failure in a scheduler ends its own request: the other answers are those of a run without it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError, RequestFailed, UnsupportedEnvironment
from kvc_trt.runtime import Request, Sampling, Session
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.choking_tokenizer import ChokingTokenizer
from tests.runtime.fake_executor import EMPTY, FakeExecutor, FakePacking, FakeTurnExecutor
from tests.runtime.scheduling import context_of, finish, scheduler, tokens_alone
from tests.runtime.slicing_executor import FakeSlicingExecutor

BROKEN, NOT_A_NUMBER = FakeSlicingExecutor.BROKEN, FakeSlicingExecutor.NOT_A_NUMBER


def test_logits_that_are_not_finite_end_their_own_request():
    one = scheduler(rows=3)
    good, bad, other = (one.submit(Request(ids, max_new_tokens=6)) for ids in ([1, 2], [3, NOT_A_NUMBER], [4] * 9))
    finish(one)
    with pytest.raises(InputError, match="not finite"):
        bad.result(0)
    assert good.result(0).token_ids == tokens_alone(Request([1, 2], max_new_tokens=6))
    assert other.result(0).token_ids == tokens_alone(Request([4] * 9, max_new_tokens=6))


def test_a_slice_that_fails_ends_its_own_request():
    one = scheduler(rows=2)
    good = one.submit(Request([1, 2], max_new_tokens=6))
    bad = one.submit(Request([BROKEN] * 9))
    other = one.submit(Request([4] * 9, max_new_tokens=3))
    finish(one)
    with pytest.raises(RequestFailed, match=r"request 1 failed: RuntimeError: .the second slice fails"):
        bad.result(0)
    assert good.result(0).token_ids == tokens_alone(Request([1, 2], max_new_tokens=6))
    assert other.result(0).token_ids == tokens_alone(Request([4] * 9, max_new_tokens=3))
    assert one.metrics()["ended"] == {"length": 2, "failed": 1}


def test_a_continuation_that_does_not_fit_ends_its_own_request():
    one = scheduler()
    bad = one.submit(Request([1] * 20, continuation_token_ids=[2] * 20))
    good = one.submit(Request([1, 2], max_new_tokens=4))
    finish(one)
    with pytest.raises(InputError, match="do not fit"):
        bad.result(0)
    assert len(good.result(0).token_ids) == 4


def test_a_tokenizer_that_fails_at_a_token_ends_the_request_alone_that_drew_it():
    prompts = [[1, 2], [3, 5, 7], [4] * 9]
    expected = [tokens_alone(Request(ids, max_new_tokens=6)) for ids in prompts]
    only = next(token for token in expected[1] if token not in {*expected[0], *expected[2]})
    with Scheduler(Session(FakeExecutor(), ChokingTokenizer(only), 3)) as one:
        tickets = [one.submit(Request(ids, max_new_tokens=6)) for ids in prompts]
        with pytest.raises(InputError, match="cannot write these tokens as text"):
            tickets[1].result(10)
        assert [tickets[i].result(10).token_ids for i in (0, 2)] == [expected[0], expected[2]]
        shown = [event.token_id for event in tickets[1]._events]
        assert shown == [*expected[1][: expected[1].index(only)]]
        assert one.submit(Request(prompts[0], max_new_tokens=6)).result(10).token_ids == expected[0]
        assert (one.session.rows, one.session.free) == ((), 3)


def test_without_a_scheduler_it_is_the_error_of_the_run_and_leaves_an_idle_session():
    expected = tokens_alone(Request([1, 2], max_new_tokens=6))
    session = Session(FakeExecutor(), ChokingTokenizer(expected[3]), 2)
    with pytest.raises(InputError, match="cannot write these tokens as text"):
        session.generate([Request([1, 2], max_new_tokens=6), Request([1, 2], max_new_tokens=6)])
    assert session.rows == ()
    assert session.generate([Request([1, 2], max_new_tokens=2)])[0].token_ids == expected[:2]


class FailingRest(FakeTurnExecutor):
    """Turns fail half-way through their caches."""

    def extend(self, first_row, input_ids, lengths, positions, cache_lengths):
        self.buffers[0][first_row] = EMPTY
        raise UnsupportedEnvironment("this machine has too little memory for the run")


def test_a_row_whose_rest_cannot_be_read_leaves_and_the_others_go_on():
    executor = FailingRest(max_output_len=40)
    one = Scheduler(Session(executor, None, 3, packing=FakePacking(executor)))
    good = one.submit(Request([1, 2], max_new_tokens=6))
    one.advance()
    bad = one.submit(Request([7, 8], context=context_of([3] * 30)))
    finish(one)
    with pytest.raises(UnsupportedEnvironment):
        bad.result(0)
    expected = Session(FakeTurnExecutor(max_output_len=40), None, 1).generate([Request([1, 2], max_new_tokens=6)])[0]
    assert good.result(0).token_ids == expected.token_ids
    assert (one.session.rows, one.session.free) == ((), 3)
    assert one.metrics()["ended"] == {"length": 1, "failed": 1}


def test_a_step_that_fails_ends_the_rows_in_it_and_no_others():
    class Failing(FakeSlicingExecutor):
        def decode(self, tokens, positions, cache_lengths):
            if self.runs == 1:
                self.runs += 1
                raise UnsupportedEnvironment("this machine has too little memory for the run")
            return super().decode(tokens, positions, cache_lengths)

    one = scheduler(rows=1, executor=Failing())
    lost, later = (one.submit(Request([i], max_new_tokens=4)) for i in (1, 2))
    finish(one)
    with pytest.raises(UnsupportedEnvironment):
        lost.result(0)
    assert later.result(0).token_ids == tokens_alone(Request([2], max_new_tokens=4))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 20),
            st.sampled_from([1, 2, 3, BROKEN, NOT_A_NUMBER]),
            st.integers(-1, 1),
            st.sampled_from([None, None, 3.0, 15.0]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(ACTIONS, st.integers(1, 4), st.integers(0, 100))
def test_other_requests_never_change_an_answer(actions, rows, seed):
    one = scheduler(rows=rows, queue_limit=8)
    submitted = []
    for action in actions:
        if action[0] == "submit":
            _, length, token, priority, after = action
            ids = [(seed + i) % 40 for i in range(length)] + [token]
            sampling = Sampling(temperature=0.7, seed=seed) if length % 2 else Sampling()
            request = Request(ids, max_new_tokens=1 + length % 7, sampling=sampling)
            try:
                deadline = None if after is None else one.clock() + after
                submitted.append((request, one.submit(request, priority=priority, deadline=deadline)))
            except Busy:
                assert len(one._waiting.queue) == 8
        elif action[0] == "cancel" and submitted:
            submitted[action[1] % len(submitted)][1].cancel()
        elif action[0] == "turn":
            for _ in range(action[1]):
                one.advance()
    finish(one)
    for request, ticket in submitted:
        assert ticket.done
        try:
            assert ticket.result(0).token_ids == tokens_alone(request)
        except (Cancelled, DeadlineMissed):
            continue
        except RequestFailed:
            assert BROKEN in request.prompt_token_ids
        except InputError:
            assert request.prompt_token_ids[-1] == NOT_A_NUMBER
    metrics = one.metrics()
    assert one.session.free == rows
    assert metrics["submitted"] == len(submitted) == sum(metrics["ended"].values())
    assert (metrics["waiting"], metrics["joining"], metrics["running"]) == (0, 0, 0)
    order = one.session.executor.order
    assert (metrics["slices"], metrics["steps"]) == (order.count("slice"), order.count("step"))


def test_an_error_of_the_schedulers_own_leaves_nobody_waiting_and_the_next_is_answered():
    one = Scheduler(Session(FakeSlicingExecutor(), None, 1))
    reads = one._worker._run_slice

    def broken():
        one._worker._run_slice = reads
        raise AssertionError("a mistake in the scheduler")

    one._worker._run_slice = broken
    ticket = one.submit(Request([1]))
    one.start()
    with pytest.raises(RequestFailed, match="AssertionError: 'a mistake in the scheduler'"):
        ticket.result(60)
    assert one.submit(Request([1], max_new_tokens=3)).result(60).token_ids == tokens_alone(Request([1], 3))
    one.close()
    assert one.session.free == 1
