"""Conversations over an executor without a model: the tokens read for each question, and a template's rewrites."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import Cancelled, InputError
from kvc_trt.progress import NullProgress
from kvc_trt.runtime.chat.conversation import Conversation
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import NoTurns
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.session.session import Session
from tests.readable_model import text
from tests.runtime.fake_executor import FakePacking, FakeTurnExecutor
from tests.runtime.slicing_executor import FakeSlicingExecutor

VOCABULARY = 50
START, USER, ASSISTANT, END = 3, 5, 6, 7
CLOSING = "{{ opened[message.role] }}{{ message.content }}" + text(END)
PLAIN = "{{ opened[message.role] }}{{ message.content }}"
SHORTENING = "{{ opened[message.role] }}{{ message.content if loop.last else message.content[:2] }}" + text(END)
"""Writes of each message but the last only the beginning."""


def template(message: str) -> ChatTemplate:
    opened = {"user": text(USER), "assistant": text(ASSISTANT), "system": text(4)}
    return ChatTemplate(
        text(START)
        + "{% set opened = "
        + repr(opened)
        + " %}{% for message in messages %}"
        + message
        + "{% endfor %}{% if add_generation_prompt %}"
        + text(ASSISTANT)
        + "{% endif %}"
    )


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({text(token): token for token in range(VOCABULARY)}, unk_token=text(0)))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return made


REVERSING = "{{ opened[message.role] }}{{ message.content | reverse }}" + text(END)
TEMPLATES = {
    "closing": template(CLOSING),
    "plain": template(PLAIN),
    "shortening": template(SHORTENING),
    "reversing": template(REVERSING),
}


def opened(tokenizer, name="closing", ends=(END,), **rules):
    executor = FakeTurnExecutor(vocab_size=VOCABULARY, max_input_len=400, budget=30)
    session = Session(executor, tokenizer, 2, end_token_ids=ends)
    rules = Request((), **{"max_new_tokens": 4, **rules})
    return Conversation(session, TEMPLATES[name], tokenizer, end_token_ids=ends, rules=rules), session, executor


def said(reply):
    return list(reply.output.token_ids)


def test_a_conversation_loads_its_turn_graph_when_it_begins(tokenizer):
    _, _, executor = opened(tokenizer)
    assert executor.turns_loaded == 1


def test_a_question_costs_what_is_new_of_the_conversation(tokenizer):
    conversation, session, executor = opened(tokenizer)
    first = conversation.ask(text(20, 21))
    assert first.output.prompt_token_ids == (START, USER, 20, 21, END, ASSISTANT)
    second = conversation.ask(text(22))
    # The answer ended by its length: the template closes it.
    assert said(first)[-1] != END
    assert executor.turns == [(0, [said(first)[-1], END, USER, 22, END, ASSISTANT], 6 + 3)]
    assert (first.read_again, second.read_again) == (False, False)
    assert second.output.logical_length == 9 + 6 + 3
    assert executor.prefills == 1
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    conversation.close()
    assert session.free == 2


@given(
    questions=st.lists(st.lists(st.integers(9, 49), min_size=1, max_size=6), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
@pytest.mark.parametrize("name", ["closing", "plain"])
def test_the_row_has_seen_what_the_template_writes(tokenizer, name, questions, seed):
    """Token for token the whole conversation, whatever ended an answer."""
    ends = {END, *range(10 + seed, 49, 4)}
    conversation, _, executor = opened(tokenizer, name, ends=ends, max_new_tokens=5)
    for question in questions:
        conversation.ask(text(*question))
    written = TEMPLATES[name].render(conversation.messages[:-1])
    (*_, (_, turn, position)) = executor.turns or [(0, [], 0)]
    seen = tokenizer.encode(written, add_special_tokens=False).ids
    fed = executor.buffers[1][0]
    assert fed[: len(seen)].tolist() == seen
    assert len(executor.turns) == len(questions) - 1
    assert position + len(turn) == (len(seen) if executor.turns else 0)


def test_an_end_token_that_the_template_does_not_write_is_left_out(tokenizer):
    conversation, _, executor = opened(tokenizer, "plain", ends=range(9, 50))
    first = conversation.ask(text(20))
    assert first.output.finish_reason == "stop"
    conversation.ask(text(21))
    before = said(first)[:-1]
    assert executor.turns == [(0, [USER, 21, ASSISTANT], 4 + len(before))]


def test_a_template_that_rewrites_what_came_before_is_read_again(tokenizer):
    conversation, session, executor = opened(tokenizer, "shortening")
    first = conversation.ask(text(20, 21, 22, 23))
    second = conversation.ask(text(24))
    assert (first.read_again, second.read_again) == (False, True)
    assert executor.turns == []
    shown = said(first)[:2]
    expected = [START, USER, 20, 21, END, ASSISTANT, *shown, END, USER, 24, END, ASSISTANT]
    assert list(second.output.prompt_token_ids) == expected
    assert session.free == 1


def test_a_question_that_does_not_fit_changes_nothing(tokenizer):
    conversation, _, _ = opened(tokenizer)
    conversation.ask(text(20))
    messages = conversation.messages
    with pytest.raises(InputError, match="a turn of 406 tokens"):
        conversation.ask(text(9) * 401)
    assert conversation.messages == messages
    assert conversation.ask(text(21)).read_again is False
    with pytest.raises(InputError, match="content of the user's message is empty"):
        conversation.ask("")


def test_a_question_is_taken_back_with_its_answer(tokenizer):
    taken, plain = (opened(tokenizer)[0] for _ in range(2))
    for one in (taken, plain):
        one.ask(text(20, 21))
    taken.ask(text(22))
    taken.take_back()
    assert taken.messages == plain.messages
    again, going_on = taken.ask(text(23)), plain.ask(text(23))
    assert (again.read_again, going_on.read_again) == (True, False)
    assert taken.messages[:-1] == plain.messages[:-1]
    for _ in range(3):
        taken.take_back()
    assert taken.messages == ()
    assert taken.ask(text(20, 21)).read_again is False


def test_an_interrupted_answer_is_not_part_of_the_conversation(tokenizer):
    conversation, session, executor = opened(tokenizer)
    conversation.ask(text(20))
    messages = conversation.messages

    def interrupt(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask(text(21), interrupt)
    assert (conversation.messages, session.free) == (messages, 2)
    reply = conversation.ask(text(22))
    assert reply.read_again
    assert executor.prefills == 2
    assert list(reply.output.prompt_token_ids)[-4:] == [USER, 22, END, ASSISTANT]


def test_an_answer_that_was_stopped_is_part_of_the_conversation(tokenizer):
    conversation, session, executor = opened(tokenizer, max_new_tokens=9)
    events = []
    stopped = conversation.ask(text(20), events.append, stop=lambda: len(events) == 2)
    assert (stopped.output.finish_reason, len(stopped.output.token_ids)) == ("interrupted", 2)
    assert conversation.messages[-1] == {"role": "assistant", "content": text(*said(stopped))}
    assert session.rows == ()
    after = conversation.ask(text(21))
    assert (after.read_again, executor.prefills, len(said(after))) == (False, 1, 9)
    assert executor.turns == [(0, [said(stopped)[-1], END, USER, 21, END, ASSISTANT], 5 + 1)]
    whole, _, _ = opened(tokenizer, max_new_tokens=2)
    assert said(whole.ask(text(20))) == said(stopped)
    whole._rules = replace(whole._rules, max_new_tokens=9)
    whole.close()
    assert said(whole.ask(text(21))) == said(after)


def test_a_long_question_is_read_in_slices_and_can_be_stopped(tokenizer, monkeypatch):
    from kvc_trt.runtime.chat import conversation as module

    class Slicing(FakeTurnExecutor, FakeSlicingExecutor):
        pass

    shown = []

    class Shown(NullProgress):
        @contextmanager
        def task(self, description, total):
            shown.append((description, total))
            yield shown.append

    monkeypatch.setattr(module, "LONG_PROMPT", 12)
    executor = Slicing(vocab_size=VOCABULARY, max_input_len=400, budget=30)
    talk = Conversation(
        Session(executor, tokenizer, 1), TEMPLATES["closing"], tokenizer, rules=Request((), max_new_tokens=4),
        progress=Shown(),
    )  # fmt: skip
    with pytest.raises(Cancelled, match="was not read to its end"):
        talk.ask(text(*[20] * 12), stop=lambda: len(shown) == 3)
    assert (shown, talk.messages, executor.open_prefills) == ([("reading 16 tokens", 16), 4, 4], (), 0)
    shown.clear()
    assert len(said(talk.ask(text(*[20] * 12)))) == 4
    assert shown == [("reading 16 tokens", 16), 4, 4, 4]


class TestDocument:
    """It stands before the first question, is read once, and what its caches hold is where each conversation begins."""

    DOCUMENT = tuple(range(10, 19)) * 5

    def talk(self, tokenizer, name="closing"):
        executor = FakeTurnExecutor(vocab_size=VOCABULARY, max_input_len=400, budget=30)
        session = Session(executor, tokenizer, 1, end_token_ids=(END,), packing=FakePacking(executor))
        return Conversation(
            session, TEMPLATES[name], tokenizer, end_token_ids=(END,), document=f"{text(*self.DOCUMENT)}\n",
            rules=Request((), max_new_tokens=4),
        ), session, executor  # fmt: skip

    def test_a_document_is_read_once_and_stays_through_clear(self, tokenizer):
        talk, session, executor = self.talk(tokenizer)
        assert talk.read_document() == len(self.DOCUMENT) + 2 + 2
        assert (executor.prefills, session.free) == (1, 1)
        first = talk.ask(text(20))
        assert first.output.prompt_token_ids == (20, END, ASSISTANT)
        caches = [buffer[0].copy() for buffer in executor.buffers]
        talk.ask(text(21))
        talk.clear()
        assert talk.messages == ()
        again = talk.ask(text(20))
        assert (said(again), again.read_again) == (said(first), False)
        assert all((buffer[0] == held).all() for buffer, held in zip(executor.buffers, caches, strict=True))
        assert executor.prefills == 1
        assert talk.messages[0]["content"] == f"{text(*self.DOCUMENT)}\n\n{text(20)}"

    def test_the_first_question_reads_an_unread_document(self, tokenizer):
        talk, _, executor = self.talk(tokenizer)
        assert talk.ask(text(20)).output.prompt_token_ids == (20, END, ASSISTANT)
        assert executor.prefills == 1

    def test_after_a_failure_the_document_is_not_read_again(self, tokenizer):
        talk, _, executor = self.talk(tokenizer)
        talk.ask(text(20))
        talk.close()
        after = talk.ask(text(21))
        assert (after.read_again, executor.prefills) == (True, 1)

    def test_a_document_that_cannot_be_kept_leaves_no_row(self, tokenizer, monkeypatch):
        talk, session, _ = self.talk(tokenizer)
        with monkeypatch.context() as patch:
            patch.setattr(session, "take", lambda row: bytearray(1 << 62))
            with pytest.raises(MemoryError):
                talk.ask(text(20))
        assert session.free == 1
        assert talk.ask(text(20)).output.prompt_token_ids == (20, END, ASSISTANT)

    def test_a_document_that_cannot_be_read_ahead_is_read_with_the_question(self, tokenizer):
        talk, _, executor = self.talk(tokenizer, "reversing")
        assert talk.read_document() == 0
        assert len(said(talk.ask(text(20)))) == 4
        assert executor.prefills == 1


def test_the_text_decides_where_an_answer_can_be_spelled_in_two_ways():
    """A model may say `ab` as two tokens, which its tokenizer would read as one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {text(token): token for token in range(VOCABULARY)}
    spelled = Tokenizer(models.BPE({**vocabulary, text(30, 30): VOCABULARY}, [(text(30), text(30))]))
    spelled.pre_tokenizer = pre_tokenizers.Split(text(END), "isolated")
    spelled.decoder = decoders.Fuse()

    class Says30(FakeTurnExecutor):
        def _logits(self, stored, position):
            logits = super()._logits(stored, position)
            logits[30] = 99
            return logits

    executor = Says30(vocab_size=VOCABULARY + 1, max_input_len=400)
    conversation = Conversation(
        Session(executor, spelled, 1), TEMPLATES["closing"], spelled, rules=Request((), max_new_tokens=4)
    )
    conversation.ask(text(20))
    conversation.ask(text(21))
    assert executor.turns == [(0, [30, END, USER, 21, END, ASSISTANT], 5 + 3)]


def test_an_engine_without_turns_says_what_to_do(tokenizer):
    executor = FakeTurnExecutor()
    executor.limits = replace(executor.limits, no_turns=NoTurns("the reason", "what to do"))
    with pytest.raises(InputError, match=re.escape("a conversation: the reason")) as error:
        Conversation(Session(executor, tokenizer, 1), TEMPLATES["plain"], tokenizer)
    assert error.value.hint == "what to do"


class OnceFailing:
    """A tokenizer that fails once, at the text of a whole answer."""

    def __init__(self, tokenizer):
        self._tokenizer, self.fails = tokenizer, True

    def encode(self, given, add_special_tokens):
        return self._tokenizer.encode(given, add_special_tokens=add_special_tokens)

    def decode(self, ids, skip_special_tokens):
        if self.fails:
            self.fails = False
            raise InputError("tokenizer.json: the tokenizer cannot write these tokens as text")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_an_answer_that_the_tokenizer_cannot_write_is_not_part_of_the_conversation(tokenizer):
    expected, _, _ = opened(tokenizer)
    conversation, session, _ = opened(tokenizer)
    conversation._tokenizer = OnceFailing(tokenizer)
    with pytest.raises(InputError, match="cannot write these tokens"):
        conversation.ask(text(20, 21))
    assert (conversation.messages, session.rows) == ((), ())
    assert conversation.ask(text(22)).output.token_ids == expected.ask(text(22)).output.token_ids
