"""No request ends the scheduler: whatever is in it, it is refused or fails alone, and the others are answered."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from kvc_trt.errors import InputError, KvcError, RequestFailed, UnsupportedEnvironment
from kvc_trt.runtime import Request, Sampling, Session, Speculation
from kvc_trt.runtime.answer_rules import RULES
from kvc_trt.runtime.kinds import MOST_LISTED, Kind
from kvc_trt.runtime.sampling.answer_text import AnswerText
from kvc_trt.runtime.scheduler.scheduler import Scheduler
from tests.runtime.fake_executor import FakeExecutor, FakePacking, FakeTurnExecutor
from tests.runtime.scheduling import context_of, finish

WORDS = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
ROWS = 3
GOOD = (
    Request([1, 2, 3], 6, stop_strings=("w60",)),
    Request([7] * 9, 6, sampling=Sampling(temperature=0.8, seed=5), logprobs=2),
)


def session_of(executor):
    return Session(executor, WORDS, ROWS, packing=FakePacking(executor))


QUIET = [session_of(FakeTurnExecutor()).generate([request])[0] for request in GOOD]


class Nameless:
    """A value whose text cannot be made."""

    def __repr__(self):
        raise ValueError("no text")


NUMBERS = st.one_of(
    st.booleans(), st.integers(), st.integers(-(10**500), 10**500), st.floats(), st.fractions(), st.complex_numbers(),
    st.integers(-5, 25).map(np.int64), st.floats(width=32).map(np.float32), st.just(np.bool_(True)),
    st.sampled_from([np.longdouble("0.1"), np.float64("nan"), np.uint64(2**64 - 1), np.array(3), 2**63]),
)  # fmt: skip
ATOMS = NUMBERS | st.sampled_from([None, "", "w1", "\ud800", "a" * 9000, b"w", Nameless(), object, Sampling(), 5, 1.5])
LISTS = st.one_of(
    st.lists(ATOMS, max_size=4), st.lists(ATOMS, max_size=4).map(tuple), st.lists(st.integers(0, 49), max_size=50),
    st.lists(st.lists(st.integers(0, 49), max_size=3), max_size=3), st.just({5: "x"}),
    st.lists(st.integers(0, 49), max_size=5).map(np.array), st.just(range(10**12)), st.just(iter([1])),
    st.just(np.zeros((2, 2), np.int64)), st.just([""] * 9000), st.just(set("ab")), st.just([[1] * 99] * 99),
)  # fmt: skip
OF_SAMPLING = st.fixed_dictionaries({}, optional={field.name: ATOMS | LISTS for field in fields(Sampling)})
OF_REQUEST = st.fixed_dictionaries(
    {"prompt_token_ids": st.just([4, 5]) | LISTS | ATOMS},
    optional={field.name: ATOMS | LISTS for field in fields(Request) if field.name != "prompt_token_ids"},
)
ORDER = st.fixed_dictionaries({}, optional={"priority": ATOMS, "deadline": ATOMS})


def hostile(scheduler, given_, sampling, order):
    """Submit what cannot be checked by its type; the ticket, or None where it is refused."""
    try:
        made = {"sampling": Sampling(**sampling), **given_} if sampling else given_
        return scheduler.submit(Request(**made), **order)
    except KvcError as error:
        assert "\n" not in error.message  # noqa: PT017
        assert len(error.message) < 300  # noqa: PT017
        return None


@settings(max_examples=80)
@given(st.lists(st.tuples(OF_REQUEST, OF_SAMPLING, ORDER), min_size=1, max_size=3))
def test_a_hostile_request_never_affects_the_others(attempts):
    scheduler = Scheduler(session_of(FakeTurnExecutor()))
    with scheduler:
        good = [scheduler.submit(GOOD[0])]
        strange = [ticket for one in attempts if (ticket := hostile(scheduler, *one)) is not None]
        good.append(scheduler.submit(GOOD[1]))
        assert [ticket.result(60) for ticket in good] == QUIET
        for ticket in strange:
            try:
                ticket.result(60)
            except KvcError:
                ticket.cancel()
            ticket.cancel()  # its row may stay for a turn
        assert scheduler.submit(GOOD[0]).result(60) == QUIET[0]
    assert scheduler.session.free == ROWS


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_value_of_another_type_is_refused_where_it_is_made(rule):
    wrong = [object(), 1j, {"a": 1}, Nameless()]
    if rule.kind is not Kind.SWITCH:
        wrong.append(True)
    if rule.kind not in (Kind.TEXTS, Kind.TEXT):
        wrong += ["x", ["x"]]
    if rule.kind in (Kind.TEXTS, Kind.TEXT):
        wrong += [5, [5], "\ud800", b"x"]
    if rule.kind in (Kind.INTEGER, Kind.LARGE_INTEGER):
        wrong += [1.5, 1.0, 2**64, 10**5000, np.array(3)]
    if rule.kind is Kind.NUMBER:
        wrong += [float("nan"), float("inf"), 10**400, Fraction(1, 3), 2**53 + 1]
    for value in wrong:
        with pytest.raises(InputError) as refused:
            Sampling(**{rule.name: value}) if rule.of_sampling else Request([1], **{rule.name: value})
        assert (rule.words or rule.name) in refused.value.message
        assert "\n" not in refused.value.message


def test_numbers_of_numpy_are_taken_where_they_are_exact():
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int16(3), seed=np.uint64(2**64 - 1))
    assert sampling == Sampling(temperature=0.5, top_k=3, seed=2**64 - 1)
    assert [type(one) for one in (sampling.temperature, sampling.top_k, sampling.seed)] == [float, int, int]
    request = Request(np.array([1, 2]), np.int32(4), stop_token_ids=np.array([5]), ignore_eos=np.bool_(True))
    assert (request.max_new_tokens, request.stop_token_ids, request.ignore_eos) == (4, (5,), True)
    assert type(request.ignore_eos) is bool


def test_a_single_stop_string_becomes_a_list_of_one():
    assert Request([1], stop_strings="abc").stop_strings == ("abc",)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"stop_strings": ["a" * (MOST_LISTED + 1)]}, "stop_strings has 8193 characters in all, expected at most 8192"),
        ({"bad_words": ["a"] * (MOST_LISTED + 1)}, "bad_words has 8193 characters"),
        ({"stop_token_ids": range(10**12)}, "stop_token_ids has 1000000000000 tokens, expected at most 8192"),
        ({"context": 5}, "context is 5, expected a Context"),
        ({"sampling": None}, "sampling is None, expected a Sampling"),
        ({"kv_proof_prompt": "x"}, "kv_proof_prompt is 'x', expected a PromptRecord"),
        ({"kv_proof": "all"}, "kv_proof is 'all', expected digest or lists"),
        ({"stay": 1}, "stay is 1, expected true or false"),
        ({"banned_token_ids": 5}, "banned_token_ids is 5, expected a list of token ids"),
        ({"continuation_token_ids": "ab"}, "continuation_token_ids is 'ab', expected a list"),
        ({"context_token_ids": iter([1])}, "context_token_ids is .* expected a list"),
    ],
)  # fmt: skip
def test_other_fields_are_refused_where_they_are_made(rules, message):
    with pytest.raises(InputError, match=message):
        Request([1], **rules)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda one: one.submit("hello"), "prompt is 'hello', expected a Request"),
        (lambda one: one.submit(Request(range(10**12))), "prompt has 1000000000000 tokens, expected at most 40"),
        (lambda one: one.submit(Request(b"abc")), "prompt_token_ids is b'abc', expected a list of token ids"),
        (
            lambda one: one.submit(Request([1], banned_token_ids=[[i % 50, i // 50] * 20 for i in range(400)])),
            "more than 8192 tokens in all",
        ),
        (lambda one: one.submit(Request([1], banned_token_ids=[5])), "banned sequence 0 is 5"),
        (lambda one: one.submit(Request([1]), priority=1.5), "priority is 1.5, expected an integer"),
        (lambda one: one.submit(Request([1]), priority=2**70), "expected an integer of at most 64 bits"),
        (lambda one: one.submit(Request([1]), deadline=float("nan")), "deadline is nan, expected a finite number"),
        (lambda one: one.submit(Request([1]), deadline="soon"), "deadline is 'soon', expected a number"),
        (lambda one: one.ask("ticket", [1]), "a turn follows 'ticket', expected the ticket of an answer"),
    ],
)
def test_a_refused_request_leaves_no_trace(made, message):
    one = Scheduler(session_of(FakeTurnExecutor()))
    with pytest.raises(InputError, match=message):
        made(one)
    assert one.metrics()["submitted"] == 0
    assert one.advance() is False


@pytest.mark.parametrize("tokens", [1.5, True, "2", 10**30])
def test_draft_lengths_that_are_no_integer_are_refused(tokens):
    with pytest.raises(InputError, match="speculate: tokens is"):
        Speculation(tokens)
    with pytest.raises(InputError, match="speculate is 'ngram:99999"):
        Speculation.parse("ngram:" + "9" * 5000)


class Panic(BaseException):
    """An exception like the one that a library in Rust raises when it panics."""


@pytest.mark.parametrize("error", [TypeError("a mistake\nin two lines"), Panic("index out of bounds"), SystemExit(3)])
@pytest.mark.parametrize("at", [1, 3])
def test_an_exception_of_a_row_ends_that_row_alone(monkeypatch, error, at):
    """The text of one row fails: another ends in its place, one goes on, and one waits for a turn."""
    push, broken = AnswerText.push, Request([8, 8], 9, min_tokens=1)

    def failing(self, token, *rest):
        if self._ends.min_tokens == 1 and len(self.token_ids) == at:
            raise error
        return push(self, token, *rest)

    one = Scheduler(session_of(FakeTurnExecutor()))
    parked = one.submit(Request([5, 6], 1, stay=True))
    finish(one)
    monkeypatch.setattr(AnswerText, "push", failing)
    bad, good = one.submit(broken), one.submit(GOOD[1])
    finish(one)
    with pytest.raises(RequestFailed, match=f"request 1 failed: {type(error).__name__}: ") as failed:
        bad.result(0)
    assert failed.value.__cause__ is error
    assert "\n" not in failed.value.message
    assert good.result(0) == QUIET[1]
    turn = one.ask(parked, [9, 9], max_new_tokens=2)
    finish(one)
    assert len(turn.result(0).token_ids) == 2
    assert one.session.free == ROWS - 1
    one.close()
    assert one.session.free == ROWS


class Failing(FakeTurnExecutor):
    """Fails at one call of one method, and works before and after it."""

    def __init__(self, name, call):
        super().__init__()
        self.left = call
        works = getattr(self, name)

        def fails_once(*arguments):
            self.left -= 1
            if self.left == 0:
                raise UnsupportedEnvironment(f"{name} fails")
            return works(*arguments)

        setattr(self, name, fails_once)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Request, "stop_strings", [5]), (Request, "stop_token_ids", [[1]]), (Request, "logprobs", 1.5),
        (Request, "min_tokens", 1.5), (Request, "stay", Nameless()), (Sampling, "top_k", 1.5),
        (Sampling, "temperature", "hot"), (Sampling, "top_p", float("nan")), (Sampling, "seed", "x"),
        (Sampling, "repetition_penalty", "x"), (Sampling, "frequency_penalty", [1, 2]), (Sampling, "min_p", "x"),
    ],
)  # fmt: skip
def test_a_bad_value_that_passed_the_checks_fails_its_request_alone(owner, name, value):
    """The second line of defence, without the first."""
    sampling = Sampling(temperature=0.7, top_k=3, repetition_penalty=1.1, frequency_penalty=0.1, min_p=0.01)
    request = Request([3, 3, 3], 6, sampling=sampling, logprobs=1)
    object.__setattr__(request if owner is Request else sampling, name, value)
    one = Scheduler(session_of(FakeTurnExecutor()))
    with one:
        good = [one.submit(GOOD[0])]
        try:
            bad = one.submit(request)
        except (InputError, TypeError):
            bad = None
        good.append(one.submit(GOOD[1]))
        assert [ticket.result(60) for ticket in good] == QUIET
        if bad is not None:
            try:
                bad.result(60)
            except RequestFailed as error:
                assert error.message.startswith("request 1 failed: ")  # noqa: PT017
            bad.cancel()
        assert one.submit(GOOD[0]).result(60) == QUIET[0]
    assert one.session.free == ROWS


@settings(max_examples=100)
@given(
    st.sampled_from(["prefill", "insert", "move", "decode", "extend", "read_row", "write_row"]), st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=6), st.lists(st.booleans(), max_size=6),
)  # fmt: skip
def test_an_executor_failure_ends_only_the_requests_it_concerns(name, call, asked, turns):
    one = Scheduler(session_of(Failing(name, call)))
    requests = [Request([10 + place, length], length, stay=stay) for place, (length, stay) in enumerate(asked)]
    expected = [session_of(FakeTurnExecutor()).generate([replace(one, stay=False)])[0] for one in requests]
    tickets = [one.submit(request) for request in requests]
    finish(one)
    for ticket, wanted in zip(tuple(tickets), turns, strict=False):
        if wanted and ticket.done and ticket.request.stay:
            try:
                tickets.append(one.ask(ticket, [3]))
            except InputError as error:
                assert "its row has left" in error.message  # noqa: PT017
    while not all(ticket.done for ticket in tickets):
        finish(one)
        for ticket in tickets:  # rows that stay would keep others out
            if ticket.done:
                ticket.cancel()
    for ticket in tickets:
        ticket.cancel()
    finish(one)
    for ticket, output in zip(tickets, expected, strict=False):
        try:
            assert ticket.result(0).token_ids == output.token_ids
        except KvcError as error:
            assert "fails" in error.message  # noqa: PT017
    assert one.session.free == ROWS
    one.session.executor.left = 0
    last = one.submit(GOOD[0])
    finish(one)
    assert last.result(0) == QUIET[0]


def test_rows_that_wait_survive_a_step_that_fails():
    """Their places in the buffers are not those of the step."""
    executor = Failing("decode", 3)
    one = Scheduler(session_of(executor))
    parked = one.submit(Request([5, 6], 1, stay=True))
    finish(one)
    lost = one.submit(Request([1, 2], 9))
    finish(one)
    with pytest.raises(UnsupportedEnvironment, match="decode fails"):
        lost.result(0)
    turn = one.ask(parked, [9, 9], max_new_tokens=3)
    finish(one)
    quiet = Session(FakeTurnExecutor(), None, 1)
    (row,) = quiet.add([Request([5, 6], 1, stay=True)])
    quiet.sample()
    quiet.turn(row, [9, 9], 3)
    expected = []
    while len(expected) < 3:
        expected += [event.token_id for event in quiet.step()]
    assert turn.result(0).token_ids == tuple(expected)


def test_a_session_without_a_scheduler_raises_the_error_of_a_row():
    executor = FakeExecutor()
    executor.poisoned = {3}
    session = Session(executor, None, 2)
    (row,) = session.add([Request([1, 2, 3])])
    with pytest.raises(InputError, match="not finite"):
        session.sample()
    assert session.holds(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logical_length": 0}, "its context: 0 tokens, expected at most 50"),
        ({"logical_length": 51}, "its context: 51 tokens"),
        ({"cache_lengths": (3,)}, "its context: lengths of 1 caches, expected 2"),
        ({"cache_lengths": (-1, 3)}, "its context: cache 0 has -1 tokens"),
        ({"cache_lengths": (3, 30)}, "its context: cache 1 has 30 tokens, expected at most 3"),
        ({"logits": np.zeros(5, np.float32)}, r"its context has logits of shape \[5\], expected \[50\]"),
        ({"logical_length": 1.5}, "a context: logical_length is 1.5"),
        ({"cache_lengths": 5}, "a context: cache_lengths is 5"),
        ({"cache_lengths": (1, "x")}, "a context: a cache length is 'x'"),
        ({"token_digest": 5}, "a context: token_digest is 5"),
        ({"fingerprint": "x"}, "a context: fingerprint is 'x', expected a Fingerprint"),
        ({"logits": [1.0]}, "a context: logits is .* expected a ndarray"),
        ({"tensors": 5}, "a context: tensors is 5, expected a Mapping"),
    ],
)
def test_an_impossible_context_is_refused(changes, message):
    """A step of all rows would run at a place that does not exist."""
    one = Scheduler(session_of(FakeTurnExecutor()))
    with pytest.raises(InputError, match=message):
        one.submit(Request([], 2, context=replace(context_of([1, 2, 3]), **changes)))


def test_a_context_with_wrong_tensors_fails_its_request_alone():
    one = Scheduler(session_of(FakeTurnExecutor()))
    context = context_of([1, 2, 3])
    strange = [{}, dict.fromkeys(context.tensors), {name: np.zeros((3, 3)) for name in context.tensors}]
    good = one.submit(GOOD[1])
    bad = [one.submit(Request([], 2, context=replace(context, tensors=tensors))) for tensors in strange]
    finish(one)
    assert good.result(0) == QUIET[1]
    for ticket in bad:
        with pytest.raises(RequestFailed):
            ticket.result(0)
    assert one.session.free == ROWS
