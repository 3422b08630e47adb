"""Sessions that speculate give the answers of plain ones, whatever is accepted, rejected, stopped or disturbed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.runtime import Request, Sampling, Scheduler, Session, Speculation
from kvc_trt.runtime.executor import NoDrafts
from kvc_trt.runtime.session import drafting
from tests.runtime.choking_tokenizer import ChokingTokenizer
from tests.runtime.fake_drafts import FakeDraftExecutor
from tests.runtime.fake_executor import FakeExecutor, FakePacking


class Always:
    """A balance that always lets drafts be checked."""

    def affords(self):
        return True

    def pays(self, rows, expected):
        return True

    def stepped(self, rows, seconds): ...
    def passed(self, rows, seconds): ...
    def spent(self, rows, seconds): ...
    def accepted(self, rows, tokens): ...


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(drafting, "Payoff", Always)


def opened(rows: int = 3, tokens: int | None = None, packing: bool = False, **options):
    executor = FakeDraftExecutor(**{"max_output_len": 40, **options})
    made = FakePacking(executor) if packing else None
    return Session(executor, None, rows, speculation=Speculation(tokens), packing=made), executor


REQUESTS = st.lists(
    st.builds(
        Request,
        st.lists(st.integers(0, 6), min_size=1, max_size=40),
        max_new_tokens=st.integers(1, 60),
        sampling=st.sampled_from([Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=5.0, seed=4)]),
        stop_token_ids=st.sampled_from([(), (3,), (5, 6)]),
        continuation_token_ids=st.lists(st.integers(0, 6), max_size=9),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.integers(1, 9), st.sets(st.integers(1, 90)), st.integers(1, 3), st.integers(1, 4))
def test_answers_are_those_of_a_session_without(requests, period, breaks, rows, tokens):
    options = {"max_output_len": 40, "period": period, "breaks": breaks}
    expected = Session(FakeDraftExecutor(**options), None, rows).generate(requests)
    session, _ = opened(rows, tokens, period=period, breaks=breaks)
    assert session.generate(requests) == expected


def test_a_step_is_one_run_that_gives_every_row_a_token():
    session, executor = opened(3, breaks={25, 26, 31})
    session.add([Request([first] * 20, max_new_tokens=25) for first in range(3)])
    while session.rows:
        rows, runs = session.rows, executor.runs
        events = session.step()
        assert {event.row for event in events} == set(rows)
        assert executor.runs - runs == (1 if session.rows else 0)


def test_a_text_that_repeats_itself_needs_fewer_runs():
    session, executor = opened(1, max_output_len=60)
    output = session.generate([Request([0] * 40, max_new_tokens=50)])[0]
    assert len(output.token_ids) == 50
    assert executor.runs < 25
    assert executor.passes == session.timings.draft_runs
    assert session.timings.decode_tokens == 49  # the last one is not fed
    assert session.timings.accepted_tokens > 25


def test_queued_tokens_are_drafts_of_themselves():
    session, executor = opened(1)
    (row,) = session.add([Request([1, 2, 3])])
    session.extend(row, range(10))
    while session.queued(row):
        session.advance()
    assert executor.runs == 2
    assert session.timings.accepted_tokens == 8
    plain = Session(FakeExecutor(max_output_len=40), None, 1)
    (same,) = plain.add([Request([1, 2, 3])])
    plain.extend(same, range(10))
    while plain.queued(same):
        plain.advance()
    assert session.stored(row) == plain.stored(same) == (13, (13, 13))


def test_near_the_end_of_a_cache_steps_are_plain():
    session, executor = opened(1, max_output_len=10)
    output = session.generate([Request([1] * 40, max_new_tokens=99)])[0]
    assert output.finish_reason == "capacity"
    assert executor.runs > executor.passes


def test_a_row_that_waits_or_takes_a_turn_holds_what_it_fed():
    def answers(speculate: bool):
        executor = FakeDraftExecutor(max_output_len=60, max_input_len=60)
        session = Session(executor, None, 2, speculation=Speculation() if speculate else None)
        first, second = session.add(
            [Request([0, 1, 2] * 5, max_new_tokens=21, stay=True), Request([3] * 9, max_new_tokens=40)]
        )
        found = {first: [], second: []}
        turns = [[4, 5], [6, 5, 4, 3]]
        while session.rows or turns:
            for event in session.sample():
                found[event.row].append(event.token_id)
            if first not in session.rows and turns:
                session.turn(first, turns.pop(), max_new_tokens=13)
                continue  # its answer begins with the next sample
            session.advance()
        return found

    assert answers(True) == answers(False)


@pytest.mark.parametrize("place", range(24, 32))
def test_a_turn_may_come_in_the_middle_of_a_draft(place):
    def conversation(speculate: bool, fed: int):
        executor = FakeDraftExecutor(max_output_len=60, breaks={25, 28})
        session = Session(executor, None, 1, speculation=Speculation() if speculate else None)
        (row,) = session.add([Request([0, 1, 2] * 5, max_new_tokens=60)])
        found = [event.token_id for event in session.sample()]
        while session.stored(row)[0] < fed:
            session.advance()
            found += [event.token_id for event in session.sample()]
        fed = session.stored(row)[0]
        session.turn(row, [8, 9], max_new_tokens=5)
        while session.rows:
            found += [event.token_id for event in session.step()]
        return fed, found

    fed, found = conversation(True, place)
    assert conversation(False, fed) == (fed, found)


def test_a_context_of_a_row_holds_what_it_fed():
    session, _ = opened(1, packing=True, budget=60)
    (row,) = session.add([Request([0, 1, 2] * 5, max_new_tokens=40, keep_logits=True)])
    while session.stored(row)[0] < 27:
        session.step()
    taken, (fed, _) = session.take(row), session.stored(row)
    assert {name: len(tokens) for name, tokens in taken.tensors.items()} == dict.fromkeys(("cache.0", "cache.1"), fed)
    assert taken.logical_length == fed
    rest = [event.token_id for _ in range(5) for event in session.step()]
    session.remove(row)
    session.add([Request([], context=taken, max_new_tokens=20)])
    again = [event.token_id for _ in range(6) for event in session.step()]
    assert again[:6] == rest[:6]


@pytest.mark.parametrize("poisoned", [14, 16, 17, 20])
def test_logits_that_are_not_finite_end_their_row_alone(poisoned):
    def answers(speculate: bool):
        executor = FakeDraftExecutor(max_output_len=60)
        executor.poisoned = {poisoned}
        session = Session(executor, None, 3, speculation=Speculation() if speculate else None)
        # The others begin after the place that is not finite.
        rows = session.add([Request([0, 1] * 5, max_new_tokens=30), *[Request([2] * 30, max_new_tokens=25)] * 2])
        found = {row: [] for row in rows}
        while session.rows:
            for row, error in session.failed.items():
                found[row].append(str(error))
                session.remove(row)
            for event in session.sample():
                found[event.row].append(event.token_id)
            session.advance()
        return found

    assert answers(True) == answers(False)
    assert "not finite" in str(answers(True)[0])


def test_a_tokenizer_that_fails_at_a_drafted_token_ends_its_row_alone():
    requests = [Request([0, 1] * 5, max_new_tokens=30), Request([2] * 30, max_new_tokens=2)]
    choking, other = Session(FakeDraftExecutor(max_output_len=60), None, 2).generate(requests)
    bad = next(token for token in choking.token_ids[2:] if token not in other.token_ids)
    session = Session(FakeDraftExecutor(max_output_len=60), ChokingTokenizer(bad), 3, speculation=Speculation())
    found = {row: [] for row in session.add(requests)}
    ended = {}
    while session.rows:
        events, failed = session.sample_each()
        for event in events:
            found[event.row].append(event.token_id)
        ended |= failed
        ended |= session.advance_each()
    assert [type(error) for error in ended.values()] == [InputError]
    assert "cannot write these tokens" in str(ended[0])
    assert found[1] == list(other.token_ids)
    assert bad not in found[0]


def test_a_scheduler_delivers_every_token():
    requests = [Request([first] * 20, max_new_tokens=25) for first in range(4)]
    expected = [
        output.token_ids for output in Session(FakeDraftExecutor(max_output_len=40), None, 2).generate(requests)
    ]
    session, executor = opened(2)
    scheduler = Scheduler(session)
    tickets = [scheduler.submit(request) for request in requests]
    while scheduler.advance():
        pass
    assert [ticket.result().token_ids for ticket in tickets] == expected
    assert [tuple(event.token_id for event in ticket) for ticket in tickets] == expected
    assert executor.passes > 0


class Failing(FakeDraftExecutor):
    """An executor whose second pass fails while a part of the caches is written, as when memory runs out."""

    def check_draft(self, tokens, positions, cache_lengths):
        checked = super().check_draft(tokens, positions, cache_lengths)
        if self.passes == 2:
            raise UnsupportedEnvironment("this machine has too little memory for the run")
        return checked


def test_a_pass_that_fails_ends_the_rows_in_it_and_no_others():
    executor = Failing(max_output_len=60)
    session = Session(executor, None, 4, speculation=Speculation())
    stays, *others = session.add(
        [Request([2] * 9, max_new_tokens=1, stay=True), *[Request([first] * 20, max_new_tokens=40) for first in (0, 1)]]
    )

    def step_on():
        while session.rows:
            session.step()

    with pytest.raises(UnsupportedEnvironment):
        step_on()
    assert executor.passes == 2
    assert (session.rows, session.free) == ((), 3)  # the row that waits was in no pass
    assert not any(session.holds(row) for row in others)
    session.turn(stays, [3, 4], max_new_tokens=20)
    said = [event.token_id for _ in range(30) if session.rows for event in session.step()]
    alone = Session(FakeDraftExecutor(max_output_len=60), None, 1)
    (row,) = alone.add([Request([2] * 9, max_new_tokens=1, stay=True)])
    alone.step()
    alone.turn(row, [3, 4], max_new_tokens=20)
    assert said == [event.token_id for _ in range(30) if alone.rows for event in alone.step()]


def test_a_scheduler_goes_on_after_a_pass_that_failed():
    scheduler = Scheduler(Session(Failing(max_output_len=60), None, 2, speculation=Speculation()))
    lost, also_lost, later = (scheduler.submit(Request([first] * 20, max_new_tokens=25)) for first in range(3))
    while scheduler.advance():
        pass
    for ticket in (lost, also_lost):
        with pytest.raises(UnsupportedEnvironment):
            ticket.result(0)
    (expected,) = Session(FakeDraftExecutor(max_output_len=60), None, 1).generate([later.request])
    assert later.result(0).token_ids == expected.token_ids


@pytest.mark.parametrize("poisoned", [22, 25, 30])
def test_a_scheduler_ends_the_request_alone_whose_drafts_are_not_finite(poisoned):
    """The others' answers are those of a run without it."""
    executor = FakeDraftExecutor(max_output_len=60)
    executor.poisoned = {poisoned}
    scheduler = Scheduler(Session(executor, None, 3, speculation=Speculation()))
    bad = scheduler.submit(Request([0, 1] * 8, max_new_tokens=30))
    good = [scheduler.submit(Request([first] * 34, max_new_tokens=20)) for first in (2, 3)]
    while scheduler.advance():
        pass
    with pytest.raises(InputError, match="not finite"):
        bad.result(0)
    expected = Session(FakeDraftExecutor(max_output_len=60), None, 1).generate([one.request for one in good])
    assert [one.result(0).token_ids for one in good] == [output.token_ids for output in expected]


def test_executors_without_drafts_say_why():
    executor = FakeDraftExecutor()
    executor.limits = replace(executor.limits, no_drafts=NoDrafts("the reason", "what to do"))
    with pytest.raises(InputError, match="speculate: the reason") as raised:
        Session(executor, None, 1, speculation=Speculation())
    assert raised.value.hint == "what to do"
    with pytest.raises(InputError, match="this executor checks no drafts"):
        Session(FakeExecutor(), None, 1, speculation=Speculation())


@pytest.mark.parametrize("tokens", [0, 5])
def test_drafts_that_the_engine_does_not_check_are_refused_with_the_numbers(tokens):
    with pytest.raises(InputError, match=rf"drafts of {tokens} tokens, expected 1 to 4"):
        opened(tokens=tokens)


@pytest.mark.parametrize(("text", "tokens"), [("ngram", None), ("ngram:4", 4)])
def test_the_speculate_option_is_parsed(text, tokens):
    assert Speculation.parse(text) == Speculation(tokens)


@pytest.mark.parametrize("text", ["", "ngram:", "ngram:x", "ngram:-1", "model:4", "ngram:4:4"])
def test_invalid_speculate_options_are_refused(text):
    with pytest.raises(InputError, match=r"expected ngram or ngram:TOKENS"):
        Speculation.parse(text)


def test_no_draft_is_checked_unless_it_pays(monkeypatch):
    class Never(Always):
        def pays(self, rows, expected):
            return False

    monkeypatch.setattr(drafting, "Payoff", Never)
    session, executor = opened(1)
    assert len(session.generate([Request([0] * 30, max_new_tokens=30)])[0].token_ids) == 30
    assert executor.passes == 0
    assert np.isfinite(session.timings.decode_seconds)
