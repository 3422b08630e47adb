"""Turns of a session over an executor without a model: the tokens fed, the start of a new answer, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import NoTurns
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from kvc_trt.runtime.session.session import Session
from tests.runtime.fake_executor import FakeExecutor, FakePacking, FakeTurnExecutor


def opened(**options) -> tuple[Session, FakeTurnExecutor]:
    executor = FakeTurnExecutor(max_output_len=40, **options)
    return Session(executor, None, 3), executor


def test_a_turn_follows_what_was_not_fed_yet_and_begins_a_new_answer():
    session, executor = opened()
    first, second = session.add([Request([5, 6, 7], max_new_tokens=9), Request([1] * 20, max_new_tokens=9)])
    session.step()
    said = next(event for event in session.sample() if event.row == second).token_id
    session.turn(second, [40, 41], max_new_tokens=2)
    assert executor.turns == [(1, [said, 40, 41], 21)]
    events = [event for _ in range(2) for event in session.step() if event.row == second]
    assert [event.output is None for event in events] == [True, False]
    output = events[-1].output
    assert output.token_ids == tuple(event.token_id for event in events)
    assert (output.prompt_token_ids, output.finish_reason, output.logical_length) == ((40, 41), "length", 25)
    assert output.physical_lengths == (13, 25)
    assert session.rows == (first,)
    assert session.timings.turn_tokens == 3


def test_queued_tokens_go_with_the_turn():
    session, executor = opened()
    (row,) = session.add([Request([5, 6, 7])])
    session.extend(row, [8, 9])
    session.turn(row, [10])
    assert executor.turns == [(0, [8, 9, 10], 3)]
    assert len(session.sample()) == 1


def test_a_turn_does_not_change_other_rows():
    def tokens(turn: bool) -> list[int]:
        session, _ = opened()
        rows = session.add([Request([5, 6, 7], max_new_tokens=6), Request([1] * 20, max_new_tokens=30)])
        found = []
        for number in range(6):
            if turn and number == 3:
                session.turn(rows[1], [9] * 7)
            found += [event.token_id for event in session.step() if event.row == rows[0]]
        return found

    assert tokens(turn=True) == tokens(turn=False)


@pytest.mark.parametrize(
    ("ids", "budget", "message"),
    [
        ([], None, "row 0: the turn is empty"),
        ([50], None, "token 0 is 50, expected an id from 0 to 49"),
        ([1], 0, "max_new_tokens must be at least 1, found 0"),
        ([1] * 41, None, "a turn of 41 tokens, expected at most 40"),
        ([1] * 61, None, "a turn of 61 tokens after 20 ends at position 81, expected at most 80"),
    ],
)
def test_bad_turns_are_refused_and_change_nothing(ids, budget, message):
    session, executor = opened()
    (row,) = session.add([Request([1] * 20, max_new_tokens=3)])
    before = [buffer.copy() for buffer in executor.buffers]
    with pytest.raises(InputError, match=message) as error:
        session.turn(row, ids, budget)
    assert "ends at position" not in message or "--max-conversation-len" in (error.value.hint or "")
    for buffer, held in zip(executor.buffers, before, strict=True):
        np.testing.assert_array_equal(buffer, held)
    assert len([event for _ in range(3) for event in session.step()]) == 3


def test_a_cache_that_keeps_everything_needs_slots():
    session, executor = opened()
    executor.limits = replace(executor.limits, max_sequence_len=1000)
    (row,) = session.add([Request([1] * 40)])
    session.turn(row, [2] * 39)
    with pytest.raises(InputError, match="cache 1 keeps every token, holds 79 and has 80 slots") as error:
        session.turn(row, [2] * 2)
    assert "--max-conversation-len" in (error.value.hint or "")
    session.turn(row, [2])


def test_executors_without_turns_say_why():
    session, executor = opened()
    executor.limits = replace(executor.limits, no_turns=NoTurns("the reason", "what to do"))
    (row,) = session.add([Request([1])])
    with pytest.raises(InputError, match="row 0: the reason") as error:
        session.turn(row, [1])
    assert error.value.hint == "what to do"
    plain = Session(FakeExecutor(), None, 1)
    (row,) = plain.add([Request([1])])
    with pytest.raises(InputError, match="this executor takes no turns"):
        plain.turn(row, [1])


def test_text_of_a_new_answer_begins_anew(letters):
    executor = FakeTurnExecutor(vocab_size=27, max_output_len=40)
    session = Session(executor, letters, 1)
    (row,) = session.add([Request([1, 2, 3], max_new_tokens=30)])
    session.step()
    session.turn(row, [4], max_new_tokens=2)
    events = [event for _ in range(2) for event in session.step()]
    assert events[-1].output.text == "".join(event.text for event in events)


def conversation(session, row, turns) -> list[int]:
    """Answer, turn, answer: the tokens of one row that stays."""
    said = []
    for turn in [None, *turns]:
        if turn is not None:
            session.turn(row, turn)
        output = None
        while output is None:
            for event in session.step():
                if event.row == row:
                    said.append(event.token_id)
                    output = event.output
    return said


TURNS = ([7] * 3, [8], [9] * 5)


def test_a_row_that_stays_waits_while_others_come_and_go():
    """The tokens of the row that stays are those of a session of its own."""
    staying = Request([5, 6, 7], max_new_tokens=3, stay=True)
    alone, _ = opened()
    (row,) = alone.add([staying])
    expected = conversation(alone, row, TURNS)
    session, _ = opened()
    others = {}
    first, row, third = session.add([Request([1, 2], max_new_tokens=2), staying, Request([3], max_new_tokens=5)])
    said, turns, joined = [], list(TURNS), 0
    while turns or row in session.rows:
        if row not in session.rows and len(session.rows) < 2:
            session.turn(row, turns.pop(0))
        elif session.free and joined < 4:
            session.add([Request([10 + joined], max_new_tokens=2 + joined)])
            joined += 1
        for event in session.step():
            (said if event.row == row else others.setdefault(event.row, [])).append(event.token_id)
    assert said == expected
    while session.rows:
        for event in session.step():
            others.setdefault(event.row, []).append(event.token_id)
    for identity, prompt, count in [(first, [1, 2], 2), (third, [3], 5)]:
        plain, _ = opened()
        assert tuple(others[identity]) == plain.generate([Request(prompt, max_new_tokens=count)])[0].token_ids
    assert session.free == 2
    session.remove(row)
    assert session.free == 3


@pytest.mark.parametrize("first_leaves", [0, 1, 2])
def test_rows_that_wait_keep_what_they_have_when_others_leave(first_leaves):
    session, executor = opened()
    rows = session.add([Request([i] * 4, max_new_tokens=1, stay=True) for i in range(3)])
    session.step()
    assert session.rows == ()
    assert session.free == 0
    session.remove(rows[first_leaves])
    (late,) = session.add([Request([20] * 4, max_new_tokens=1, stay=True)])
    session.step()
    left = [i for i in range(3) if i != first_leaves]
    for i in left:
        session.turn(rows[i], [30 + i])
        held = {int(buffer[session._slots.place(session._slots.find(rows[i]))][0]) for buffer in executor.buffers}
        assert held == {i}
    assert set(session.rows) == {rows[i] for i in left}
    session.turn(late, [33])
    assert len(session.rows) == 3


def test_a_waiting_row_takes_no_queued_tokens_and_is_not_idle():
    session, _ = opened()
    (row,) = session.add([Request([1], max_new_tokens=1, stay=True)])
    session.step()
    with pytest.raises(ValueError, match="row 0 waits for a turn"):
        session.extend(row, [3])
    with pytest.raises(InputError, match=r"grows while it is idle, found rows \(\), waiting \(0,\), joining 0"):
        session.grow(4)
    with pytest.raises(InputError, match="generate needs an idle session"):
        session.generate([Request([1])])
    session.executor.limits = replace(session.executor.limits, no_turns=NoTurns("the reason"))
    with pytest.raises(InputError, match="the reason"):
        session.add([Request([1], stay=True)])


def test_generate_ends_its_rows_so_it_refuses_one_that_stays():
    session, _ = opened()
    with pytest.raises(InputError, match=r"prompt 1: a row that stays for its next turn joins by Session\.add"):
        session.generate([Request([1]), Request([2], stay=True)])
    assert session.free == session.max_batch_size


def test_a_context_of_a_waiting_row_has_its_own_logits():
    executor = FakeTurnExecutor(max_output_len=40)
    session = Session(executor, None, 2, packing=FakePacking(executor))
    staying, _ = session.add([Request([5] * 6, max_new_tokens=2, stay=True), Request([1] * 8, max_new_tokens=9)])
    session.step()
    session.step()
    before = session.take(staying)
    for _ in range(3):
        session.step()
    after = session.take(staying)
    np.testing.assert_array_equal(after.logits, before.logits)
    assert (after.token_digest, after.cache_lengths) == (before.token_digest, before.cache_lengths)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_turn_that_fails_half_way_ends_its_row_and_no_other(error):
    def broken(first_row, *rest):
        executor.buffers[0][first_row] = 0
        raise error

    session, executor = opened()
    first, second = session.add([Request([5, 6, 7], max_new_tokens=3), Request([1] * 20, max_new_tokens=3)])
    session.step()
    executor.extend = broken
    with pytest.raises(error):
        session.turn(second, [40])
    assert session.rows == (first,)
    with pytest.raises(ValueError, match="row 1 is not in the session"):
        session.turn(second, [40])
    tokens = [event.token_id for _ in range(2) for event in session.step()]
    (alone,) = opened()[0].generate([Request([5, 6, 7], max_new_tokens=3)])
    assert list(alone.token_ids[1:]) == tokens


def test_a_step_that_fails_ends_the_rows_that_it_was_for():
    def broken(*_):
        raise MemoryError

    session, executor = opened()
    staying, _ = session.add([Request([5], max_new_tokens=1, stay=True), Request([1], max_new_tokens=9)])
    session.sample()
    executor.decode = broken
    with pytest.raises(MemoryError):
        session.advance()
    assert (session.rows, session.free) == ((), 2)
    session.turn(staying, [7], max_new_tokens=1)
    assert len(session.sample()) == 1


class TestLoading:
    """The graph of turns is loaded where turns are needed, and nowhere else."""

    def test_a_session_does_not_load_turns_unasked(self):
        session, executor = opened()
        session.generate([Request([1, 2, 3], max_new_tokens=2)])
        assert executor.turns_loaded == 0

    def test_a_session_that_shares_prefixes_reads_what_follows_them_as_turns(self):
        executor = FakeTurnExecutor(max_output_len=40)
        Session(executor, None, 1, packing=FakePacking(executor), prefix_bytes=1 << 20)
        assert executor.turns_loaded == 1

    @pytest.mark.parametrize("conversations", [True, False])
    def test_a_scheduler_loads_turns_when_it_starts(self, conversations):
        session, executor = opened()
        with Scheduler(session, conversations=conversations):
            assert executor.turns_loaded == int(conversations)

    def test_executors_without_turns_load_nothing(self):
        executor = FakeTurnExecutor()
        executor.limits = replace(executor.limits, no_turns=NoTurns("the reason"))
        for one in (executor, FakeExecutor()):
            Session(one, None, 1).load_turns()
        assert executor.turns_loaded == 0


class TestAllLogits:
    def opened(self):
        session, executor = opened()
        executor.limits = replace(executor.limits, all_logits=True)
        return session, executor

    def test_turn_logits_cover_the_new_tokens_and_the_answer_follows(self):
        session, executor = self.opened()
        (row,) = session.add([Request([5, 6, 7], max_new_tokens=9)])
        said = session.sample()[0].token_id
        logits = session.turn_logits(row, [40, 41, 42], max_new_tokens=1)
        assert executor.turns == [(0, [said, 40, 41, 42], 3)]
        assert logits.shape == (3, executor.limits.vocab_size)
        assert logits[:2].argmax(-1).tolist() == [40, 41]
        (event,) = session.sample()
        assert event.token_id == logits[2].argmax()

    def test_an_engine_without_all_logits_names_the_build_option(self):
        session, _ = opened()
        (row,) = session.add([Request([5])])
        with pytest.raises(
            InputError, match="row 0: the engine returns logits only after the last token of a turn"
        ) as error:
            session.turn_logits(row, [1])
        assert "--all-logits" in error.value.hint
        session.turn(row, [1])  # nothing has happened to it

    def test_a_turn_that_does_not_fit_changes_nothing(self):
        session, executor = self.opened()
        (row,) = session.add([Request([5])])
        with pytest.raises(InputError, match="a turn of 41 tokens"):
            session.turn_logits(row, [1] * 41)
        assert executor.turns == []
