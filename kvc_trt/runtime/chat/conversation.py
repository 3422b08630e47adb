"""A conversation: questions go through the chat template, and only what is new of it is read, as a turn of one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError
from kvc_trt.runtime.chat.messages import Message, check_messages
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Event, Output, Request
from kvc_trt.runtime.session.session import Session
from kvc_trt.runtime.session.turn import check_takes_turns

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer
    from kvc_trt.runtime.grammar.grammar import Schema


@dataclass(frozen=True)
class Reply:
    """The answer to one question of a conversation, and what it took."""

    output: Output
    """Its `prompt_token_ids` are the tokens that were read for this question."""
    read_again: bool
    """True if the whole conversation was read from its beginning, since the template now writes what came before in
    another way, or since the answer before this one was not finished."""
    read_seconds: float
    """Time to read the tokens."""
    answer_seconds: float
    """Time from then to the last token of the answer."""


class Conversation:
    """One row of a session that nothing else uses meanwhile. `ask` it question after question.

    The template renders the whole conversation each time. Where that begins with what the row has seen, the rest is
    read as a turn. Where the template rewrites what came before (it drops the thoughts of earlier answers, say), a row
    that has seen it otherwise cannot go on: the whole conversation is read anew, which `Reply.read_again` says.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        end_token_ids: Iterable[int] = (),
        system: str | None = None,
        rules: Request | None = None,
    ) -> None:
        """Begin with nothing but a `system` message, if there is one. `rules` are for every answer; it has no prompt.

        InputError for an engine that takes no turns; its hint says how to build it again.
        """
        check_takes_turns(session.executor, "a conversation")
        session.load_turns()
        self._session, self._template, self._tokenizer = session, template, tokenizer
        self._ends = frozenset(end_token_ids)
        self._rules = replace(rules or Request(()), stay=True)
        self._system = system
        self._messages: list[Message] = []
        self._now = datetime.now()  # a template writes the local date; it must not change in between
        self._row: int | None = None
        self._fed: list[int] = []
        """The tokens that the row was fed; of an answer, all but the last."""
        self._text = ""
        """Decode these tokens and the last one of the answer, without an end token."""
        self._unfed: list[int] = []
        """The last token of the answer, unless it is an end token."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as messages with role and content."""
        return tuple(check_messages(self._messages, system=self._system)) if self._messages else ()

    def ask(
        self,
        question: str,
        on_token: Callable[[Event], None] | None = None,
        *,
        schema: Grammar | Schema | None = None,
    ) -> Reply:
        """Answer a question; `on_token` is called with each event of the answer as it comes.

        `schema` is of this answer alone; without it the rules of the conversation say what the answer may be.
        Raises InputError, with the numbers, for a question that does not fit; then the conversation is as it was. An
        answer that fails or is interrupted is not part of the conversation either.
        """
        asked = [*self._messages, {"role": "user", "content": question}]
        text = self._template.render(check_messages(asked, system=self._system), now=self._now)
        grammar = self._rules.grammar if schema is None else Grammar.of(schema)
        start = time.perf_counter()
        new = None if self._row is None else self._unread(text)
        if self._row is None or new is None:
            fed = self._encode(text)
            row = self._begin(fed, grammar)
        else:
            fed = [*self._fed, *new]
            row = self._turn(self._row, new, grammar)
        read = time.perf_counter()
        try:
            output = self._answer(row, on_token)
            finished = time.perf_counter()
            reply = Reply(output, bool(self._messages) and new is None, read - start, finished - read)
            self._answered(asked, text, fed, output)
        except BaseException:
            self.close()
            raise
        return reply

    def close(self) -> None:
        """Give the row back. Another question would read the conversation from its beginning."""
        if self._row is not None and self._session.holds(self._row):  # a run that failed has taken it out
            self._session.remove(self._row)
        self._row = None

    def _begin(self, tokens: list[int], grammar: Grammar | None) -> int:
        request = replace(self._rules, prompt_token_ids=tokens, grammar=grammar)
        self._session.check(request)
        self.close()
        (self._row,) = self._session.add([request])
        return self._row

    def _turn(self, row: int, tokens: list[int], grammar: Grammar | None) -> int:
        try:
            self._session.constrain(row, grammar)
            self._session.turn(row, tokens, feed_last=False)
        except InputError:  # it was refused, and nothing has changed
            raise
        except BaseException:
            self.close()
            raise
        return row

    def _unread(self, text: str) -> list[int] | None:
        """Return the tokens of the conversation that the row has not been fed; None if it was fed something else.

        What a model says need not be the tokens that a tokenizer would make of it, so texts are compared as well.
        """
        tokens = self._encode(text)
        if tokens[: len(self._fed)] == self._fed:
            return tokens[len(self._fed) :]
        if text.startswith(self._text):
            return [*self._unfed, *self._encode(text[len(self._text) :])]
        return None

    def _answer(self, row: int, on_token: Callable[[Event], None] | None) -> Output:
        while True:
            for event in self._session.sample():
                assert event.row == row, "nothing else uses the session"
                if on_token is not None:
                    on_token(event)
                if event.output is not None:
                    return event.output
            self._session.advance()

    def _answered(self, asked: list[Message], text: str, fed: list[int], output: Output) -> None:
        """Remember what was said. A stop string is part of it, for the row has seen it."""
        *before, last = output.token_ids
        ended = output.finish_reason == "stop" and last in self._ends
        said = str(self._tokenizer.decode(before if ended else [*before, last], skip_special_tokens=True))
        self._messages = [*asked, {"role": "assistant", "content": said}]
        self._fed = [*fed, *before]
        self._text = text + said
        self._unfed = [] if ended else [last]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
