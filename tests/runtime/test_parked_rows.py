"""Conversations through a scheduler: rows that stay, the turns asked of them, and the end of both."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import Busy, Cancelled, DeadlineMissed, InputError, RequestFailed
from kvc_trt.runtime import Request, Session
from kvc_trt.runtime.scheduler.admission import MemoryPlan
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.fake_executor import FakeTurnExecutor
from tests.runtime.slicing_executor import Clock, FakeSlicingExecutor

STAYING = Request([5, 6, 7], max_new_tokens=3, stay=True)
TURNS = ([7] * 3, [8], [9] * 5)


class Executor(FakeSlicingExecutor, FakeTurnExecutor):
    """Slices and turns; a turn that holds the token `BROKEN` fails."""

    def extend(self, first_row, input_ids, lengths, positions, cache_lengths):
        self._ran("turn")
        if self.BROKEN in input_ids:
            raise RuntimeError("the turn fails")
        return super().extend(first_row, input_ids, lengths, positions, cache_lengths)


def scheduler(rows=2, **options):
    """One without a thread: the test advances it."""
    clock = Clock()
    return Scheduler(Session(Executor(clock, max_output_len=40), None, rows), clock=clock, **options)


def finish(one):
    while one.advance():
        pass


def answered(one, request=STAYING):
    ticket = one.submit(request)
    finish(one)
    return ticket


def alone(turns, request=STAYING):
    """Return the answers of a session in which nothing else happens."""
    session = Session(Executor(max_output_len=40), None, 1)
    (row,) = session.add([request])
    answers = []
    for turn in [None, *turns]:
        if turn is not None:
            session.turn(row, turn)
        said = []
        while session.rows:
            said += [event.token_id for event in session.step()]
        answers.append(tuple(said))
    return answers


def test_a_conversation_is_that_of_a_session_alone():
    one = scheduler()
    tickets = [answered(one)]
    for turn in TURNS:
        tickets.append(one.ask(tickets[-1], turn))
        one.submit(Request([1] * 9, max_new_tokens=4))
        finish(one)
    assert [ticket.result(0).token_ids for ticket in tickets] == alone(TURNS)
    assert one.metrics()["staying"] == 1
    assert one.metrics()["turns"] == 3


def test_a_turn_has_its_own_length_of_answer():
    one = scheduler()
    ticket = one.ask(answered(one), [8], max_new_tokens=7)
    finish(one)
    assert len(ticket.result(0).token_ids) == 7
    again = one.ask(ticket, [8])
    finish(one)
    assert len(again.result(0).token_ids) == 7


def test_a_running_row_waits_at_most_one_turn_or_slice():
    one = scheduler(rows=4)
    staying = [one.submit(Request([i], max_new_tokens=1, stay=True)) for i in (1, 2)]
    finish(one)
    running = one.submit(Request([3], max_new_tokens=25))
    one.advance()
    one.session.executor.order.clear()
    one.submit(Request([4] * 30, max_new_tokens=2))
    turns = [one.ask(ticket, [5] * 20) for ticket in staying]
    while not running.done:
        one.advance()
    order = one.session.executor.order
    assert order[:4] == ["turn", "step", "turn", "step"]
    assert all(len(list(group)) == 1 for what, group in itertools.groupby(order) if what != "step")
    assert all(turn.done for turn in turns)


def test_a_row_that_stays_counts_until_it_is_cancelled():
    one = scheduler(rows=1)
    staying = answered(one)
    waiting = one.submit(Request([1], max_new_tokens=1))
    finish(one)
    assert not waiting.done
    assert (one.metrics()["waiting"], one.metrics()["staying"]) == (1, 1)
    staying.cancel()
    finish(one)
    assert waiting.done
    assert one.session.free == 1
    assert staying.result(0).token_ids
    with pytest.raises(InputError, match="its row has left"):
        one.ask(staying, [1])


def test_a_row_leaves_after_a_while_without_a_turn():
    one = scheduler(rows=1, stay_seconds=30)
    staying = answered(one)
    one.clock.now += 29
    turn = one.ask(staying, [1])
    one.clock.now += 100  # it waits no more
    finish(one)
    assert turn.done
    one.clock.now += 29
    waiting = one.submit(Request([1], max_new_tokens=1))
    finish(one)
    assert not waiting.done
    one.clock.now += 2
    finish(one)
    assert waiting.done
    with pytest.raises(InputError, match="its row has left"):
        one.ask(turn, [1])
    with pytest.raises(ValueError, match="stay_seconds must be over 0"):
        scheduler(stay_seconds=0)


class TestBadTurns:
    def test_rows_that_are_not_parked_take_no_turn(self):
        one = scheduler()
        single = answered(one, Request([1], max_new_tokens=1))
        running = one.submit(STAYING)
        one.advance()
        for ticket, message in ((single, "its row does not stay"), (running, "is being answered")):
            with pytest.raises(InputError, match=message):
                one.ask(ticket, [1])
        finish(one)
        first = one.ask(running, [1])
        with pytest.raises(InputError, match=r"another turn waits for its row \(request 2\)"):
            one.ask(running, [2])
        finish(one)
        with pytest.raises(InputError, match="its row has left, or a later turn was answered since"):
            one.ask(running, [2])
        assert first.result(0).token_ids == alone([[1]])[1]

    @pytest.mark.parametrize(
        ("ids", "options", "error", "message"),
        [
            ([], {}, InputError, "the turn is empty"),
            ([50], {}, InputError, "token 0 is 50"),
            ([1] * 41, {}, InputError, "has 41 tokens, expected at most 40"),
            ([1], {"max_new_tokens": 0}, InputError, "max_new_tokens must be at least 1"),
            ([1], {"deadline": 1.0}, DeadlineMissed, "seconds ago"),
        ],
    )
    def test_impossible_turns_are_refused_when_asked(self, ids, options, error, message):
        one = scheduler()
        ticket = answered(one)
        with pytest.raises(error, match=message):
            one.ask(ticket, ids, **options)
        good = one.ask(ticket, [8])
        finish(one)
        assert good.result(0).token_ids == alone([[8]])[1]

    def test_a_turn_that_does_not_fit_fails_and_another_may_follow(self):
        one = scheduler()
        ticket = one.ask(answered(one), [1] * 38)
        finish(one)
        large = one.ask(ticket, [1] * 38)
        finish(one)
        with pytest.raises(InputError, match="ends at position"):
            large.result(0)
        good = one.ask(ticket, [8])
        finish(one)
        assert good.result(0).token_ids == alone([[1] * 38, [8]])[2]

    def test_a_turn_that_breaks_ends_its_conversation(self):
        one = scheduler()
        ticket = answered(one)
        broken = one.ask(ticket, [Executor.BROKEN])
        finish(one)
        with pytest.raises(RequestFailed, match="the turn fails"):
            broken.result(0)
        assert one.session.free == 2

    def test_a_turn_after_the_end_is_refused(self):
        one = scheduler()
        ticket = answered(one)
        one.close(drain=True)
        with pytest.raises(Busy, match="closed"):
            one.ask(ticket, [1])
        assert one.session.free == 2

    def test_a_turn_of_an_engine_without_turns_is_refused(self):
        one = Scheduler(Session(FakeSlicingExecutor(), None, 1))
        ticket = answered(one, Request([1], max_new_tokens=1, stay=True))
        turn = one.ask(ticket, [1])
        finish(one)
        with pytest.raises(InputError, match="takes no turns"):
            turn.result(0)


@pytest.mark.parametrize("advances", range(5))
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_ending_a_turn_ends_only_its_conversation(advances, how):
    one = scheduler(rows=2)
    other = one.submit(Request([1] * 9, max_new_tokens=30))
    ticket = one.submit(STAYING)
    while not ticket.done:
        one.advance()
    turn = one.ask(ticket, [7] * 3, deadline=one.clock() + 100)
    for _ in range(advances):
        one.advance()
    done = turn.done
    if how == "cancel":
        turn.cancel()
    else:
        one.clock.now += 100
    finish(one)
    if done:
        assert turn.result(0).token_ids == alone([[7] * 3])[1]
    else:
        with pytest.raises(Cancelled if how == "cancel" else DeadlineMissed):
            turn.result(0)
    assert one.session.free == (1 if done and how == "deadline" else 2)
    assert (
        other.result(0).token_ids
        == Session(FakeTurnExecutor(max_output_len=40), None, 1)
        .generate([Request([1] * 9, max_new_tokens=30)])[0]
        .token_ids
    )


def test_logits_of_a_turn_that_are_not_finite_end_it_alone():
    one = scheduler()
    ticket = answered(one)
    other = one.submit(Request([1, 2], max_new_tokens=20))
    one.advance()
    one.session.executor.poisoned = {len(STAYING.prompt_token_ids) + 3 + 4}
    turn = one.ask(ticket, [8] * 4)
    one.advance()
    one.session.executor.poisoned = set()
    finish(one)
    with pytest.raises(InputError, match="not finite"):
        turn.result(0)
    expected = Session(FakeTurnExecutor(max_output_len=40), None, 1)
    assert other.result(0).token_ids == expected.generate([Request([1, 2], max_new_tokens=20)])[0].token_ids
    assert one.session.free == 2


def test_rows_that_stay_and_turns_fit_the_memory():
    one = scheduler(rows=3, memory=MemoryPlan(1000, 100, lambda tokens: 10.0 * tokens))
    staying = [answered(one) for _ in range(2)]
    long = one.submit(Request([1] * 40, max_new_tokens=20))  # with two rows that stay: 3 x 100 + 400
    one.advance()
    turn = one.ask(staying[0], [1] * 35)  # 300 + 350 of its own, and 400 of the prompt that is being read
    one.advance()
    assert one._worker.joining is not None
    assert one.metrics()["turns"] == 0
    finish(one)
    assert turn.done
    assert long.done


def test_the_end_answers_the_turns_that_were_asked_and_gives_every_row_back():
    one = scheduler()
    ticket = answered(one)
    turn = one.ask(ticket, [8])
    waiting = [one.submit(Request([1], max_new_tokens=2)) for _ in range(3)]
    one.close(drain=True)
    assert turn.result(0).token_ids == alone([[8]])[1]
    assert all(one.done for one in waiting)
    assert one.session.free == 2
    other = scheduler()
    turn = other.ask(answered(other), [8])
    other.close()
    with pytest.raises(Cancelled):
        turn.result(0)
    assert other.session.free == 2


@settings(max_examples=40)
@given(
    actions=st.lists(
        st.sampled_from(["submit", "advance", "advance", "cancel", "bad turn", "good turn"]), min_size=5, max_size=40
    )
)
def test_other_requests_never_change_a_conversation(actions):
    one = scheduler(rows=3)
    tickets, turns, others = [one.submit(STAYING)], list(TURNS), []
    for number, action in enumerate(actions):
        if action == "submit":
            others.append(
                one.submit(Request([number % 40] * (1 + number % 20), max_new_tokens=4, stay=number % 2 == 0))
            )
        elif action == "cancel" and others:
            others[number % len(others)].cancel()
        elif "turn" in action:
            tokens = [Executor.BROKEN] if action == "bad turn" else [number % 40] * 4
            for other in tuple(others):
                with contextlib.suppress(InputError):  # of those that nothing can follow
                    others.append(one.ask(other, tokens))
        else:
            one.advance()
        if tickets[-1].done and turns:
            tickets.append(one.ask(tickets[-1], turns.pop(0)))
    for other in others:
        other.cancel()
    while turns or not tickets[-1].done:
        finish(one)
        if turns:
            tickets.append(one.ask(tickets[-1], turns.pop(0)))
    assert [ticket.result(0).token_ids for ticket in tickets] == alone(TURNS)


def test_a_thread_answers_turns_and_does_not_wait_for_ever():
    one = Scheduler(Session(Executor(max_output_len=40), None, 1))
    with one:
        ticket = one.submit(STAYING)
        answers = [ticket.result(30).token_ids]
        for turn in TURNS:
            ticket = one.ask(ticket, turn)
            answers.append(ticket.result(30).token_ids)
        waiting = one.submit(Request([1], max_new_tokens=1))
        ticket.cancel()
        waiting.result(30)
    assert answers == alone(TURNS)
