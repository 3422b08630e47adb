"""Conversations over an executor without a model: the tokens read for each question, and a template's rewrites."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.conversation import Conversation
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.executor import NoTurns
from kvc_trt.runtime.request import Request
from kvc_trt.runtime.session.session import Session
from tests.readable_model import text
from tests.runtime.test_turn import FakeTurnExecutor

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


TEMPLATES = {"closing": template(CLOSING), "plain": template(PLAIN), "shortening": template(SHORTENING)}


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


def test_an_answer_that_was_interrupted_is_not_part_of_it(tokenizer):
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
