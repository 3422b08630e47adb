"""Requests of many callers over one session: order, fairness, failures that stay alone. No wall clock decides here."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError, UnsupportedEnvironment
from kvc_trt.runtime import Request, Sampling, Session
from kvc_trt.runtime.admission import MemoryPlan
from kvc_trt.runtime.scheduler import Scheduler
from tests.runtime.fake_executor import EMPTY, FakeExecutor, FakePacking, FakeTurnExecutor
from tests.runtime.slicing_executor import Clock, FakeSlicingExecutor

BROKEN, NOT_A_NUMBER = FakeSlicingExecutor.BROKEN, FakeSlicingExecutor.NOT_A_NUMBER


def scheduler(rows=2, executor=None, **options):
    """One without a thread: the test takes each turn."""
    clock = Clock()
    return Scheduler(Session(executor or FakeSlicingExecutor(clock), None, rows), clock=clock, **options)


def context_of(tokens):
    maker = Session(FakeExecutor(), None, 1, packing=FakePacking(FakeExecutor()))
    (row,) = maker.add([Request(tokens, keep_logits=True)])
    return maker.take(row)


def finish(one):
    while one.advance():
        pass


def tokens_alone(request):
    return Session(FakeExecutor(), None, 1).generate([request])[0].token_ids


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
    with pytest.raises(RuntimeError, match="second slice"):
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


def test_what_can_never_fit_is_refused_where_it_is_made():
    one = scheduler()
    with pytest.raises(InputError, match="continuation: 30 tokens do not fit after 40 tokens, found room for 10"):
        one.submit(Request([1] * 40, continuation_token_ids=[2] * 30))
    stored = context_of([3] * 30)
    one = Scheduler(Session(FakeSlicingExecutor(), None, 1, packing=FakePacking(FakeExecutor())))
    with pytest.raises(InputError, match="prompt: 21 tokens do not fit after 30 tokens"):
        one.submit(Request([7] * 21, context=stored))
    assert one.metrics()["submitted"] == 0


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


def test_a_session_that_is_in_use_is_refused():
    executor = FakeTurnExecutor()
    session = Session(executor, None, 1)
    (row,) = session.add([Request([1], max_new_tokens=1, stay=True)])
    session.step()  # it waits for a turn now
    with pytest.raises(ValueError, match=r"a scheduler needs an idle session, found rows .* waiting .0"):
        Scheduler(session)
    session.remove(row)
    one = Scheduler(session)
    session.add([Request([1])])
    with pytest.raises(ValueError, match="a scheduler needs an idle session"):
        one.start()


def test_no_more_rows_run_than_were_asked_for():
    one = scheduler(rows=3, max_rows=1)
    tickets = [one.submit(Request([i], max_new_tokens=3)) for i in (1, 2, 3)]
    while one.advance():
        assert one.metrics()["running"] <= 1
    assert all(ticket.done for ticket in tickets)
    with pytest.raises(ValueError, match="max_rows must be at least 1, found 0"):
        scheduler(max_rows=0)


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
        joining = one._loop.joining
        taken = 100 * len(one._loop.running) + (0 if joining is None else 100 + 10 * joining.ticket.prompt_tokens)
        assert taken <= limit
    assert all(ticket.done for ticket in tickets)


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
def test_whatever_others_do_an_answer_is_that_of_its_request_alone(actions, rows, seed):
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
        except RuntimeError:
            assert BROKEN in request.prompt_token_ids
        except InputError:
            assert request.prompt_token_ids[-1] == NOT_A_NUMBER
    metrics = one.metrics()
    assert one.session.free == rows
    assert metrics["submitted"] == len(submitted) == sum(metrics["ended"].values())
    assert (metrics["waiting"], metrics["joining"], metrics["running"]) == (0, 0, 0)
    order = one.session.executor.order
    assert (metrics["slices"], metrics["steps"]) == (order.count("slice"), order.count("step"))


def test_a_stored_context_joins_in_one_slice():
    request = Request([7, 8], context=context_of([3] * 30), max_new_tokens=4)
    expected = Session(FakeExecutor(), None, 1, packing=FakePacking(FakeExecutor())).generate([request])[0]
    one = Scheduler(Session(FakeSlicingExecutor(), None, 2, packing=FakePacking(FakeExecutor())))
    ticket = one.submit(request)
    finish(one)
    assert ticket.result(0) == expected
    assert one.metrics()["slices"] == 1
    assert one.metrics()["kept_tokens"] == 0


def test_metrics_count_what_happened():
    one = scheduler(rows=1)
    one.submit(Request([1] * 20, max_new_tokens=3))
    finish(one)
    found = one.metrics()
    assert (found["submitted"], found["prompt_tokens"], found["generated_tokens"]) == (1, 20, 3)
    # Of two caches, one keeps 12 of the 20 prompt tokens, and one all.
    assert (found["kept_tokens"], found["evicted_tokens"]) == (32, 8)
    assert found["seconds_waiting"]["sum"] == 0
    assert found["seconds_to_first_token"]["sum"] == 5  # of the fake clock: five slices
    assert (found["seconds_per_token"]["count"], found["seconds_per_token"]["sum"]) == (2, 2)
    assert found["stall_seconds"]["count"] == 0


def test_metrics_count_a_shared_prefix_once():
    executor = FakeSlicingExecutor(budget=40)
    one = Scheduler(Session(executor, None, 1, packing=FakePacking(executor), prefix_bytes=1 << 20))
    for prompt in ([1] * 20, [*[1] * 20, 2, 3]):
        one.submit(Request(prompt, max_new_tokens=1))
        finish(one)
    found = one.metrics()
    assert (found["prompt_tokens"], found["kept_tokens"], found["evicted_tokens"]) == (22, 40, 0)


def test_metrics_of_a_policy_that_keeps_the_whole_cache_count_no_eviction():
    executor = FakeSlicingExecutor()
    executor.limits = replace(executor.limits, keeps_whole=True)
    one = scheduler(executor=executor)
    one.submit(Request([1] * 20, max_new_tokens=1))
    finish(one)
    assert (one.metrics()["kept_tokens"], one.metrics()["evicted_tokens"]) == (40, 0)


def test_stalls_are_slices_that_rows_waited_for():
    one = scheduler(rows=2)
    one.submit(Request([1], max_new_tokens=10))
    one.advance()
    one.submit(Request([2] * 8, max_new_tokens=1))
    finish(one)
    stalls = one.metrics()["stall_seconds"]
    assert (stalls["count"], stalls["sum"], stalls["largest"]) == (2, 2.0, 1.0)


def test_an_executor_that_cannot_cut_runs_one_slice():
    one = scheduler(executor=FakeExecutor())
    ticket = one.submit(Request([1] * 30, max_new_tokens=4))
    finish(one)
    assert ticket.result(0).token_ids == tokens_alone(Request([1] * 30, max_new_tokens=4))
    assert one.metrics()["slices"] == 1


def test_threads_share_one_scheduler():
    session = Session(FakeSlicingExecutor(), None, 3)
    requests = [Request([i % 40] * (1 + i % 30), max_new_tokens=1 + i % 8) for i in range(24)]
    found = {}
    with Scheduler(session, queue_limit=30) as one:

        def ask(i):
            found[i] = [event.token_id for event in one.submit(requests[i])]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert session.executor.prepared == 1
    assert [tuple(found[i]) for i in range(len(requests))] == [tokens_alone(request) for request in requests]


def test_asyncio_callers_follow_their_requests():
    async def ask(one, request):
        return [event.token_id async for event in one.stream(request)]

    async def all_of(one, requests):
        tickets = [one.submit(request) for request in requests]
        streamed = await asyncio.gather(*(ask(one, request) for request in requests))
        return streamed, [await ticket.answer() for ticket in tickets]

    requests = [Request([i] * (i + 1), max_new_tokens=6) for i in range(6)]
    with Scheduler(Session(FakeSlicingExecutor(), None, 3)) as one:
        streamed, outputs = asyncio.run(all_of(one, requests))
    expected = [tokens_alone(request) for request in requests]
    assert [tuple(ids) for ids in streamed] == expected
    assert [output.token_ids for output in outputs] == expected


def test_a_stream_that_is_left_ends_its_request():
    async def leave(one):
        events = one.stream(Request([1], max_new_tokens=10))
        async for _ in events:
            break
        await events.aclose()
        await one.submit(Request([2], max_new_tokens=2)).answer()

    with Scheduler(Session(FakeSlicingExecutor(), None, 1)) as one:
        asyncio.run(leave(one))
    ended = one.metrics()["ended"]
    assert ended["length"] + ended.get("cancelled", 0) == 2


def test_close_ends_what_is_there_and_drain_answers_it():
    for drain in (False, True):
        one = Scheduler(Session(FakeSlicingExecutor(), None, 1))
        tickets = [one.submit(Request([i], max_new_tokens=3)) for i in range(4)]
        one.close(drain=drain)
        assert all(ticket.done for ticket in tickets)
        assert one.metrics()["ended"] == ({"length": 4} if drain else {"cancelled": 4})
        with pytest.raises(Busy, match="closed"):
            one.submit(Request([1]))


def test_waiting_with_a_timeout_leaves_the_request_running():
    one = scheduler()
    ticket = one.submit(Request([1], max_new_tokens=2))
    with pytest.raises(TimeoutError):
        ticket.result(0)
    finish(one)
    assert len(ticket.result(0).token_ids) == 2


def test_an_error_of_the_schedulers_own_leaves_nobody_waiting():
    one = Scheduler(Session(FakeSlicingExecutor(), None, 1))

    def broken():
        raise AssertionError("a mistake in the scheduler")

    one._loop._run_slice = broken
    ticket = one.submit(Request([1]))
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        one.start()
        with pytest.raises(AssertionError, match="a mistake"):
            ticket.result(60)
        one.close()
    finally:
        threading.excepthook = hook
