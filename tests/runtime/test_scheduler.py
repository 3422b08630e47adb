"""Requests of many callers over one session: order, fairness, ends. No wall clock decides here."""

from __future__ import annotations

import itertools

import pytest

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError, RequestFailed
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.fake_executor import FakeExecutor, FakePacking, FakeTurnExecutor
from tests.runtime.scheduling import context_of, finish, scheduler, tokens_alone
from tests.runtime.slicing_executor import FakeSlicingExecutor


def test_answers_are_those_of_the_session_alone():
    one = scheduler()
    requests = [Request([seed] * length, max_new_tokens=5) for seed, length in ((1, 3), (2, 40), (3, 17), (4, 9))]
    tickets = [one.submit(request) for request in requests]
    finish(one)
    assert [ticket.result(0).token_ids for ticket in tickets] == [tokens_alone(request) for request in requests]
    assert [len(list(ticket)) for ticket in tickets] == [5] * 4


def test_a_running_row_waits_at_most_one_slice_between_two_steps():
    one = scheduler(rows=3)
    first = one.submit(Request([1], max_new_tokens=22))
    one.advance()
    for length in (40, 33):
        one.submit(Request([5] * length, max_new_tokens=10))
    while not first.done:
        one.advance()
    order = one.session.executor.order
    while_running = order[order.index("step") :]
    assert while_running.count("slice") == 10 + 9
    assert all(len(list(group)) == 1 for what, group in itertools.groupby(while_running) if what == "slice")


def test_without_running_rows_slices_follow_one_another():
    one = scheduler()
    one.submit(Request([5] * 40, max_new_tokens=1))
    finish(one)
    assert one.session.executor.order == ["slice"] * 10


def test_first_come_first_served_and_priorities_first():
    one = scheduler(rows=1)
    low, other_low, high = (
        one.submit(Request([i + 1], max_new_tokens=1), priority=priority) for i, priority in enumerate((0, 0, 5))
    )
    ended = []
    while one.advance():
        ended += [ticket for ticket in (low, other_low, high) if ticket.done and ticket not in ended]
    assert ended == [high, low, other_low]


def test_a_higher_priority_does_not_end_what_has_begun():
    one = scheduler(rows=1)
    low = one.submit(Request([1] * 12, max_new_tokens=3))
    one.advance()
    high = one.submit(Request([2], max_new_tokens=1), priority=9)
    while not low.done:
        assert not high.done
        one.advance()
    finish(one)
    assert high.done


def test_a_full_queue_says_busy_and_keeps_nothing():
    one = scheduler(rows=1, queue_limit=2)
    for _ in range(2):
        one.submit(Request([1], max_new_tokens=1))
    with pytest.raises(Busy, match=r"busy: 2 requests wait, which is the queue's limit"):
        one.submit(Request([1], max_new_tokens=1))
    assert one.metrics()["refused"] == 1
    one.advance()
    one.submit(Request([1], max_new_tokens=1))
    finish(one)
    assert one.metrics()["ended"] == {"length": 3}


def test_a_full_queue_refuses_no_turn():
    """A turn has a row already, and no second one may wait for it."""
    one = scheduler(rows=2, queue_limit=1)
    kept = one.submit(Request([1], max_new_tokens=1, stay=True))
    finish(one)
    one.submit(Request([1], max_new_tokens=1))
    with pytest.raises(Busy):
        one.submit(Request([1], max_new_tokens=1))
    turn = one.ask(kept, [2], max_new_tokens=1)
    assert one.metrics()["waiting"] == 2
    with pytest.raises(InputError, match="another turn waits"):
        one.ask(kept, [2], max_new_tokens=1)
    finish(one)
    assert turn.done


def test_an_invalid_request_is_refused_where_it_is_made():
    one = scheduler()
    for request in (
        Request([]),
        Request([1] * 41),
        Request([999]),
        Request([1], max_new_tokens=0),
    ):
        with pytest.raises(InputError):
            one.submit(request)
    assert one.advance() is False


def test_a_deadline_in_the_past_is_refused():
    one = scheduler()
    with pytest.raises(DeadlineMissed, match=r"2\.000 seconds ago"):
        one.submit(Request([1]), deadline=one.clock() - 2)
    with pytest.raises(DeadlineMissed):
        one.submit(Request([1]), deadline=one.clock())
    assert one.advance() is False


@pytest.mark.parametrize("after", range(8))
def test_a_deadline_ends_a_request_wherever_it_is(after):
    """Each slice and each step takes a second of the fake clock."""
    one = scheduler(rows=1)
    other = one.submit(Request([7], max_new_tokens=2))
    late = one.submit(Request([1] * 12, max_new_tokens=9), deadline=one.clock() + after + 0.5)
    finish(one)
    with pytest.raises(DeadlineMissed, match="before the answer was whole"):
        late.result(0)
    assert other.result(0).token_ids == tokens_alone(Request([7], max_new_tokens=2))
    assert (one.session.free, one.session.executor.open_prefills) == (1, 0)
    assert one.metrics()["ended"] == {"length": 1, "deadline": 1}


def test_a_request_that_ends_in_time_is_not_late():
    one = scheduler()
    ticket = one.submit(Request([1], max_new_tokens=1), deadline=one.clock() + 60)
    finish(one)
    one.clock.now += 100
    one.advance()
    assert len(ticket.result(0).token_ids) == 1


@pytest.mark.parametrize("turns", range(7))
def test_cancel_frees_the_row_at_any_moment(turns):
    """While it waits, in the midst of its prefill, and while it runs."""
    one = scheduler(rows=1)
    ticket = one.submit(Request([1] * 12, max_new_tokens=9))
    for _ in range(turns):
        one.advance()
    ticket.cancel()
    one.advance()
    assert (one.session.free, one.session.executor.open_prefills) == (1, 0)
    with pytest.raises(Cancelled):
        ticket.result(0)
    with pytest.raises(Cancelled):
        list(ticket)
    following = one.submit(Request([2, 3], max_new_tokens=3))
    finish(one)
    assert following.result(0).token_ids == tokens_alone(Request([2, 3], max_new_tokens=3))


def test_cancelling_what_has_ended_changes_nothing():
    one = scheduler()
    ticket = one.submit(Request([1], max_new_tokens=2))
    finish(one)
    ticket.cancel()
    one.advance()
    assert len(ticket.result(0).token_ids) == 2
    assert one.metrics()["ended"] == {"length": 1}


def test_requests_that_can_never_fit_are_refused_on_submission():
    one = scheduler()
    with pytest.raises(InputError, match="continuation: 30 tokens do not fit after 40 tokens, found room for 10"):
        one.submit(Request([1] * 40, continuation_token_ids=[2] * 30))
    stored = context_of([3] * 30)
    one = Scheduler(Session(FakeSlicingExecutor(), None, 1, packing=FakePacking(FakeExecutor())))
    with pytest.raises(InputError, match="prompt: 21 tokens do not fit after 30 tokens"):
        one.submit(Request([7] * 21, context=stored))
    assert one.metrics()["submitted"] == 0


def test_a_session_that_is_in_use_is_refused():
    executor = FakeTurnExecutor()
    session = Session(executor, None, 1)
    (row,) = session.add([Request([1], max_new_tokens=1, stay=True)])
    session.step()  # it waits for a turn now
    with pytest.raises(InputError, match=r"a scheduler needs an idle session, found rows .* waiting .0"):
        Scheduler(session)
    session.remove(row)
    one = Scheduler(session)
    session.add([Request([1])])
    with pytest.raises(InputError, match="a scheduler needs an idle session"):
        one.start()


def test_no_more_rows_run_than_were_asked_for():
    one = scheduler(rows=3, max_rows=1)
    tickets = [one.submit(Request([i], max_new_tokens=3)) for i in (1, 2, 3)]
    while one.advance():
        assert one.metrics()["running"] <= 1
    assert all(ticket.done for ticket in tickets)
    with pytest.raises(ValueError, match="max_rows must be at least 1, found 0"):
        scheduler(max_rows=0)


def test_a_stored_context_joins_in_one_slice():
    request = Request([7, 8], context=context_of([3] * 30), max_new_tokens=4)
    expected = Session(FakeExecutor(), None, 1, packing=FakePacking(FakeExecutor())).generate([request])[0]
    one = Scheduler(Session(FakeSlicingExecutor(), None, 2, packing=FakePacking(FakeExecutor())))
    ticket = one.submit(request)
    finish(one)
    assert ticket.result(0) == expected
    assert one.metrics()["slices"] == 1
    assert one.metrics()["kept_tokens"] == 0


def test_an_executor_that_cannot_cut_runs_one_slice():
    one = scheduler(executor=FakeExecutor())
    ticket = one.submit(Request([1] * 30, max_new_tokens=4))
    finish(one)
    assert ticket.result(0).token_ids == tokens_alone(Request([1] * 30, max_new_tokens=4))
    assert one.metrics()["slices"] == 1


def test_close_ends_all_requests_and_drain_answers_them():
    for drain in (False, True):
        one = Scheduler(Session(FakeSlicingExecutor(), None, 1))
        tickets = [one.submit(Request([i], max_new_tokens=3)) for i in range(4)]
        one.close(drain=drain)
        assert all(ticket.done for ticket in tickets)
        assert one.metrics()["ended"] == ({"length": 4} if drain else {"cancelled": 4})
        with pytest.raises(Busy, match="closed"):
            one.submit(Request([1]))


def test_a_ticket_keeps_what_the_caches_hold_of_its_prompt():
    executor = FakeExecutor()
    one = Scheduler(Session(executor, None, 2, packing=FakePacking(executor)))
    ticket = one.submit(Request([3] * 20, max_new_tokens=4, keep_context=True))
    other = one.submit(Request([3] * 20, max_new_tokens=4))
    finish(one)
    assert other.context is None
    assert (ticket.context.logical_length, ticket.result(0).token_ids) == (20, tokens_alone(other.request))
    again = Session(FakeExecutor(), None, 1, packing=FakePacking(FakeExecutor()))
    (output,) = again.generate([Request([], max_new_tokens=4, context=ticket.context)])
    assert output.token_ids == ticket.result(0).token_ids


def test_a_context_that_cannot_be_kept_is_an_error_of_its_request_alone():
    one = scheduler()  # its session has no packing
    ticket, other = one.submit(Request([1], keep_context=True)), one.submit(Request([2], max_new_tokens=2))
    finish(one)
    with pytest.raises(RequestFailed, match="packing"):
        ticket.result(0)
    assert other.result(0).token_ids == tokens_alone(other.request)
    assert one.session.free == 2


def test_a_stopped_request_returns_its_tokens_with_the_next_one():
    one = scheduler()
    request, other = Request([1, 2, 3], max_new_tokens=20), Request([7] * 5, max_new_tokens=20)
    short, whole = one.submit(request), one.submit(other)
    while len(short._events) < 3:
        one.advance()
    short.finish()
    one.advance()
    output = short.result(0)
    assert output.finish_reason == "interrupted"
    assert output.token_ids == tokens_alone(request)[:4]
    assert [event.token_id for event in short] == list(output.token_ids)
    assert len(output.physical_lengths) > 0
    finish(one)
    assert whole.result(0).token_ids == tokens_alone(other)
    assert one.session.free == 2
    assert one.metrics()["ended"] == {"interrupted": 1, "capacity": 1}
    short.finish()
    assert short.result(0) is output


def test_a_row_that_stays_waits_for_a_turn_when_its_answer_is_finished():
    one = scheduler(executor=FakeTurnExecutor())
    ticket = one.submit(Request([1, 2, 3], max_new_tokens=20, stay=True))
    one.advance()
    ticket.finish()
    finish(one)
    assert ticket.result(0).finish_reason == "interrupted"
    again = one.ask(ticket, [4, 5], max_new_tokens=2)
    finish(one)
    assert len(again.result(0).token_ids) == 2


def test_an_executor_that_fails_to_move_a_finished_row_ends_its_rows():
    one = scheduler()
    tickets = [one.submit(Request([seed], max_new_tokens=20)) for seed in (1, 2)]
    while not all(ticket._events for ticket in tickets):
        one.advance()

    def fail(*_):
        raise RuntimeError("the device is gone")

    one.session.executor.move = fail
    tickets[0].finish()
    finish(one)
    with pytest.raises(RequestFailed, match="the device is gone"):
        tickets[0].result(0)
    assert one.session.rows == ()
