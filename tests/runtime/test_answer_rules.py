"""Penalties, bans, least lengths and log-probabilities in sessions: in batches, turns, contexts and with drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime import Request, Sampling, Session, Speculation
from kvc_trt.runtime.context import NO_TOKENS, extended_digest
from kvc_trt.runtime.session import drafting
from tests.runtime.fake_drafts import FakeDraftExecutor
from tests.runtime.fake_executor import FakeExecutor, FakeGreedyExecutor, FakePacking, FakeTurnExecutor

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 20.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, 2.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
REQUESTS = st.lists(
    st.builds(
        Request,
        st.lists(st.integers(0, 6), min_size=1, max_size=20),
        max_new_tokens=st.integers(6, 12),
        sampling=SAMPLINGS,
        stop_token_ids=st.sampled_from([(), (3, 4), tuple(range(0, 50, 3))]),
        min_tokens=st.integers(0, 6),
        banned_token_ids=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), max_size=4),
        logprobs=st.sampled_from([None, 0, 3]),
        continuation_token_ids=st.lists(st.integers(0, 6), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


class Recording(FakeTurnExecutor):
    """One row of its own, whose logits are kept."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def _logits(self, stored, position):
        self.seen.append(super()._logits(stored, position))
        return self.seen[-1]


def transformed(logits, text, answer, request):
    """transformers' processed logits, with OpenAI's formula for the two penalties that transformers lacks."""
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
    )

    ids, scores = torch.tensor([text]), torch.from_numpy(logits.copy())[None]
    scores = RepetitionPenaltyLogitsProcessor(request.sampling.repetition_penalty)(ids, scores)
    for token in set(answer):
        scores[0, token] -= request.sampling.frequency_penalty * answer.count(token) + request.sampling.presence_penalty
    if request.banned_token_ids:
        scores = NoBadWordsLogitsProcessor([list(one) for one in request.banned_token_ids])(ids, scores)
    if request.min_tokens and request.stop_token_ids:
        begun = len(text) - len(answer)
        ends = list(request.stop_token_ids)
        scores = MinNewTokensLengthLogitsProcessor(begun, request.min_tokens, ends, device="cpu")(ids, scores)
    return scores[0].numpy()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(REQUESTS)
def test_greedy_tokens_are_the_best_of_what_transformers_leaves(requests):
    for request in requests:
        request = replace(request, sampling=replace(request.sampling, temperature=0.0), logprobs=2)
        executor = Recording()
        [output] = Session(executor, None, 1).generate([request])
        text = [*request.prompt_token_ids, *request.continuation_token_ids]
        given_logits = executor.seen[len(request.continuation_token_ids) :]
        answer: list[int] = []
        for logits, token, logprobs in zip(given_logits, output.token_ids, output.logprobs, strict=True):
            scores = transformed(logits, text + answer, answer, request)
            assert scores[token] == pytest.approx(scores.max(), rel=1e-6)
            assert np.isfinite(scores[token])
            expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
            assert logprobs.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            assert [one for one, _ in logprobs.top] == expected.topk(2).indices.tolist()
            answer.append(token)
        ended = set(output.token_ids[: request.min_tokens]) & set(request.stop_token_ids)
        assert not ended


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(2, 4))
def test_a_row_of_a_batch_answers_as_it_does_alone(requests, rows):
    alone = [Session(FakeExecutor(), None, 1).generate([request])[0] for request in requests]
    assert Session(FakeGreedyExecutor(), None, rows).generate(requests) == alone


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sets(st.integers(1, 40)))
def test_drafts_change_no_answer_under_any_rules(requests, breaks):
    class Always:
        def affords(self):
            return True

        def pays(self, rows, expected):
            return True

        def stepped(self, rows, seconds): ...
        def passed(self, rows, seconds): ...
        def spent(self, rows, seconds): ...
        def accepted(self, rows, tokens): ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "Payoff", Always)
        options = {"breaks": breaks, "max_output_len": 40}
        plain = Session(FakeDraftExecutor(**options), None, 3).generate(requests)
        drafted = Session(FakeDraftExecutor(**options), None, 3, speculation=Speculation(None)).generate(requests)
    assert drafted == plain


def test_greedy_rows_without_rules_stay_on_the_fast_path_and_others_leave_it():
    for rules, asked in (
        ({}, "best"),
        ({"stop_token_ids": (1,)}, "best"),
        ({"logprobs": 0}, "logits"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "logits"),
        ({"sampling": Sampling(presence_penalty=0.1)}, "logits"),
        ({"banned_token_ids": [[1, 2]]}, "logits"),
        ({"min_tokens": 1, "stop_token_ids": (1,)}, "logits"),
        ({"sampling": Sampling(min_p=0.1)}, "best"),
    ):
        executor = FakeGreedyExecutor()
        Session(executor, None, 1).generate([Request([1, 2], 4, **rules)])
        assert set(executor.asked) == {asked}, rules


def answer_of(session, row):
    while True:
        for event in session.step():
            if event.row == row and event.output is not None:
                return event.output


def test_a_turn_goes_on_with_the_text_and_begins_another_answer():
    """The repetition penalty is so strong that no earlier token is said; the presence penalty counts anew."""
    executor = Recording(vocab_size=60)
    session = Session(executor, None, 1)
    request = Request([1, 2], 4, sampling=Sampling(repetition_penalty=100.0), stay=True, logprobs=0)
    (row,) = session.add([request])
    first = answer_of(session, row)
    session.turn(row, [5, 6])
    second = answer_of(session, row)
    said = [*first.token_ids, *second.token_ids]
    assert len(set(said)) == len(said)
    assert not {1, 2, 5, 6} & set(said)
    assert len(second.logprobs) == len(second.token_ids) == 4


def test_min_tokens_counts_from_each_turn():
    session = Session(FakeTurnExecutor(), None, 1)
    (row,) = session.add([Request([1, 2], 8, stop_token_ids=range(1, 50), min_tokens=2, stay=True)])
    first = answer_of(session, row)
    session.turn(row, [5, 6])
    second = answer_of(session, row)
    assert first.token_ids[:2] == second.token_ids[:2] == (0, 0)
    assert first.finish_reason == second.finish_reason == "stop"
    assert len(first.token_ids) == len(second.token_ids) == 3


def test_stop_strings_are_looked_for_after_the_first_tokens(letters):
    def ask(**rules):
        return Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1, 2], 8, **rules)])[0]

    free = ask()
    stopped = ask(stop_strings=[free.text[1]], min_tokens=0)
    assert len(stopped.token_ids) == 2
    later = ask(stop_strings=[*free.text[1], free.text[5]], min_tokens=4)
    place = next(i for i in range(4, 8) if free.text[i] in (free.text[1], free.text[5]))
    assert later.text == free.text[:place]
    whole = ask(stop_strings=list(free.text), min_tokens=8)
    assert (whole.text, whole.finish_reason) == (free.text, "length")


def test_bad_words_are_never_said(letters):
    free = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1, 2], 8)])[0]
    word = free.text[2:4]
    rules = Request([1, 2], 8, banned_token_ids=[letters.encode(free.text[0]).ids], bad_words=[free.text[1]])
    output = Session(FakeExecutor(vocab_size=26), letters, 1).generate([rules])[0]
    assert free.text[0] not in output.text
    assert free.text[1] not in output.text
    pair = [ord(letter) - ord("a") for letter in word]
    other = Session(FakeExecutor(vocab_size=26), letters, 1).generate([Request([1, 2], 8, banned_token_ids=[pair])])[0]
    assert other.text[:3] == free.text[:3]
    assert other.text[3] != free.text[3]


class TestContexts:
    @pytest.fixture
    def session(self):
        executor = FakeTurnExecutor()
        return Session(executor, None, 2, packing=FakePacking(executor))

    @pytest.fixture
    def stored(self, session):
        (row,) = session.add([Request([1, 2, 3, 4], keep_logits=True)])
        context = session.take(row)
        session.remove(row)
        return context

    RULES = ({"sampling": Sampling(repetition_penalty=3.0)}, {"banned_token_ids": [[4, 7], [1, 2, 5]]})

    @pytest.mark.parametrize("rules", RULES)
    def test_rules_look_back_at_the_text_of_a_context_if_it_is_given(self, session, stored, rules):
        whole = session.generate([Request([1, 2, 3, 4], 8, **rules)])[0]
        ids = [1, 2, 3, 4]
        restored = session.generate([Request([], 8, context=stored, context_token_ids=ids, **rules)])[0]
        assert restored.token_ids == whole.token_ids

    @pytest.mark.parametrize("rules", RULES)
    def test_rules_that_look_back_are_refused_without_the_text_of_a_context(self, session, stored, rules):
        with pytest.raises(InputError, match="looks back at the text, and of a stored context only a digest is known"):
            session.add([Request([5], 4, context=stored, **rules)])

    def test_rules_that_do_not_look_back_are_accepted(self, session, stored):
        sampling = Sampling(presence_penalty=1.0, min_p=0.1, temperature=0.5, seed=1)
        request = Request([5], 4, context=stored, sampling=sampling, banned_token_ids=[[7]], logprobs=1)
        assert len(session.generate([request])[0].logprobs) == 4

    def test_a_text_that_is_not_the_contexts_is_refused(self, session, stored):
        assert stored.token_digest == extended_digest(NO_TOKENS, [1, 2, 3, 4])
        for ids in ([1, 2, 3], [1, 2, 3, 5]):
            with pytest.raises(InputError, match="context_token_ids are not the 4 tokens of its context"):
                session.add([Request([5], 4, context=stored, context_token_ids=ids)])
        with pytest.raises(InputError, match="context_token_ids without a context"):
            session.add([Request([5], 4, context_token_ids=[1])])

    def test_a_shared_prefix_is_known_text(self):
        executor = FakeTurnExecutor()
        session = Session(executor, None, 1, packing=FakePacking(executor), prefix_bytes=1 << 20)
        (row,) = session.add([Request([1, 2, 3, 4], keep_logits=True)])
        session.contexts.share(session.take(row))
        session.remove(row)
        request = Request([1, 2, 3, 4], 8, sampling=Sampling(repetition_penalty=100.0))
        shared = session.generate([request])[0]
        assert shared.reused_tokens == 4
        assert not {1, 2, 3, 4} & set(shared.token_ids)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min_tokens": 9}, "prompt: min_tokens must be from 0 to 8, found 9"),
        ({"min_tokens": -1}, "prompt: min_tokens must be from 0 to 8, found -1"),
        ({"logprobs": 21}, "prompt: logprobs must be from 0 to 20, found 21"),
        ({"logprobs": -1}, "prompt: logprobs must be from 0 to 20"),
        ({"bad_words": ["x"]}, "prompt: bad words need a tokenizer"),
        ({"banned_token_ids": [[i] for i in range(50)]}, "leave none of the model's 50 tokens"),
    ],
)
def test_invalid_rules_are_refused_by_name(rules, message):
    with pytest.raises(InputError, match=message):
        Session(FakeExecutor(), None, 1).generate([Request([1, 2], 8, **rules)])


def test_a_model_that_leaves_only_banned_tokens_says_none_of_them():
    class Narrow(FakeExecutor):
        def _logits(self, stored, position):
            logits = np.full(50, -np.inf, np.float32)
            logits[7] = 1.0
            return logits

    [output] = Session(Narrow(), None, 1).generate([Request([1], 3, banned_token_ids=[[0], [7]], logprobs=1)])
    assert output.token_ids == (1, 1, 1)
    assert output.logprobs[0].logprob == -9999.0
