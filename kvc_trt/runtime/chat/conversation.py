"""A conversation: questions go through the chat template, and only what is new of it is read, as a turn of one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from kvc_trt.errors import Cancelled, InputError
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.runtime.chat.messages import Message, check_messages
from kvc_trt.runtime.chat.template import ChatTemplate
from kvc_trt.runtime.context import Context
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.request import Event, Output, Request
from kvc_trt.runtime.session.session import Session
from kvc_trt.runtime.session.turn import check_takes_turns

if TYPE_CHECKING:
    from kvc_trt.models.sources.tokenizer_library import Tokenizer
    from kvc_trt.runtime.grammar.grammar import Schema

LONG_PROMPT = 512
"""Tokens of a prompt that is read in slices, so that its reading shows progress and can be stopped."""
_SLICE_SECONDS = 0.5
_BREAK = "\n\n"
"""Stands between a document and the question after it."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Reply:
    """The answer to one question of a conversation, and what it took."""

    output: Output
    """Its `prompt_token_ids` are the tokens that were read for this question."""
    read_again: bool
    """True if the whole conversation was read from its beginning, since the template now writes what came before in
    another way, or since the answer before this one failed."""
    read_seconds: float
    """Time to read the tokens."""
    answer_seconds: float
    """Time from then to the last token of the answer."""


@dataclass(frozen=True)
class _Seen:
    """The part of a conversation that a row was fed."""

    tokens: list[int]
    """The tokens that it was fed; of an answer, all but the last."""
    text: str
    """Decode these tokens and the last one of the answer, without an end token."""
    unfed: list[int]
    """The last token of the answer, unless it is an end token."""


@dataclass(frozen=True)
class _Opening:
    """The beginning of the conversation up to the end of its document, as the caches hold it."""

    seen: _Seen
    context: Context


class Conversation:
    """One row of a session that nothing else uses meanwhile. `ask` it question after question.

    The template renders the whole conversation each time. Where that begins with what the row has seen, the rest is
    read as a turn. Where the template rewrites what came before (it drops the thoughts of earlier answers, say), a row
    that has seen it otherwise cannot go on: the whole conversation is read anew, which `Reply.read_again` says.

    A `document` stands before the first question. It is read once, without a question in sight, and what its caches
    hold then is kept: after `clear` the next question begins there, bit for bit.
    """

    def __init__(
        self,
        session: Session,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        end_token_ids: Iterable[int] = (),
        system: str | None = None,
        document: str | None = None,
        rules: Request | None = None,
        progress: Progress | None = None,
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
        self._document = None if document is None else document.strip()
        self._progress = progress or NullProgress()
        self._messages: list[Message] = []
        self._now = datetime.now()  # a template writes the local date; it must not change in between
        self._opening: _Opening | None = None
        self._row: int | None = None
        self._seen = _Seen([], "", [])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as messages with role and content."""
        return tuple(check_messages(self._messages, system=self._system)) if self._messages else ()

    def read_document(self) -> int:
        """Read the document now rather than at the first question; return the number of tokens up to its end.

        0 if there is none, or if the template does not write it as it stands: it is then read with the first question.
        Raises InputError for one that does not fit.
        """
        if not self._document:
            return 0
        if self._opening is None:
            opening = self._document + _BREAK
            asked: list[Message] = [{"role": "user", "content": f"{opening}?"}]
            text = self._render(asked)
            if (found := text.find(opening)) < 0:
                return 0
            text = text[: found + len(opening)]
            tokens = self._encode(text)
            row = self._join(replace(self._rules, prompt_token_ids=tokens, keep_logits=True), _never)
            try:
                self._opening = _Opening(_Seen(tokens, text, []), self._session.take(row))
            finally:
                self.close()
        return len(self._opening.seen.tokens)

    def ask(
        self,
        question: str,
        on_token: Callable[[Event], None] | None = None,
        *,
        schema: Grammar | Schema | None = None,
        stop: Callable[[], bool] = _never,
    ) -> Reply:
        """Answer a question; `on_token` is called with each event of the answer as it comes.

        `schema` is of this answer alone; without it the rules of the conversation say what the answer may be.
        `stop` is asked after each token, and while a long prompt is read. Once it is true, the answer ends (its
        `finish_reason` is interrupted), and what was said is part of the conversation, which goes on. If nothing was
        said yet, Cancelled is raised and the conversation is as it was.

        Raises InputError, with the numbers, for a question that does not fit; then the conversation is as it was. An
        answer that fails is not part of the conversation either.
        """
        rules = self._rules if schema is None else replace(self._rules, grammar=Grammar.of(schema))
        if not self._messages:
            self.read_document()
        content = f"{self._document}{_BREAK}{question}" if self._document and not self._messages else question
        asked: list[Message] = [*self._messages, {"role": "user", "content": content}]
        text = self._render(asked)
        start = time.perf_counter()
        fed, new = self._new(text)
        row, continued = self._row, self._row is not None and new is not None
        if row is not None and new is not None:
            self._turn(row, new, rules)
        else:
            row = self._begin(fed, new, rules, stop)
        read = time.perf_counter()
        try:
            output = self._answer(row, on_token, stop)
            finished = time.perf_counter()
            reply = Reply(output, bool(self._messages) and not continued, read - start, finished - read)
            self._answered(asked, text, fed, output)
        except BaseException:
            self.close()
            raise
        return reply

    def take_back(self) -> None:
        """Forget the last question and its answer. The next question reads what came before them again."""
        self.close()
        self._messages = self._messages[:-2]

    def clear(self) -> None:
        """Forget every question and answer. The system message and the document stay, and are not read again."""
        self.close()
        self._messages = []

    def close(self) -> None:
        """Give the row back. Another question would read the conversation from its beginning, or the document's end."""
        if self._row is not None and self._session.holds(self._row):  # a run that failed has taken it out
            self._session.remove(self._row)
        self._row = None

    def _new(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return the tokens of the whole text, and those that come after what the row, or the document's, has seen.

        The latter are None where the text must be read from its beginning.
        """
        seen = self._seen if self._row is not None else None if self._opening is None else self._opening.seen
        new = None if seen is None else self._unread(seen, text)
        if seen is None or new is None:
            return self._encode(text), None
        return [*seen.tokens, *new], new

    def _begin(self, tokens: list[int], new: list[int] | None, rules: Request, stop: Callable[[], bool]) -> int:
        """Let a row read the conversation: `tokens`, or the `new` ones among them after the document's caches."""
        if new is None or self._opening is None:
            return self._join(replace(rules, prompt_token_ids=tokens), stop)
        opening = self._opening
        request = replace(rules, prompt_token_ids=new, context=opening.context, context_token_ids=opening.seen.tokens)
        return self._join(request, stop)

    def _join(self, request: Request, stop: Callable[[], bool]) -> int:
        self._session.check(request)
        self.close()
        self._session.check_idle("a conversation needs an idle session")
        count = len(list(request.prompt_token_ids))
        if count < LONG_PROMPT or request.context is not None:
            (self._row,) = self._session.add([request])
            return self._row
        with (
            self._progress.task(f"reading {count} tokens", count) as advance,
            closing(self._session.add_in_slices(request, _SLICE_SECONDS)) as slices,
        ):
            done = 0
            while True:
                try:
                    share = next(slices)
                except StopIteration as joined:
                    self._row = int(joined.value)
                    return self._row
                advance(round(share * count) - done)
                done = round(share * count)
                if stop():
                    raise Cancelled("the question was not read to its end, and is not part of the conversation")

    def _turn(self, row: int, tokens: list[int], rules: Request) -> None:
        try:
            self._session.constrain(row, rules.grammar)
            self._session.turn(row, tokens, feed_last=False)
        except InputError:  # it was refused, and nothing has changed
            raise
        except BaseException:
            self.close()
            raise

    def _render(self, messages: list[Message]) -> str:
        return self._template.render(check_messages(messages, system=self._system), now=self._now)

    def _unread(self, seen: _Seen, text: str) -> list[int] | None:
        """Return the tokens of the conversation after what was seen; None if something else was.

        What a model says need not be the tokens that a tokenizer would make of it, so texts are compared as well.
        """
        tokens = self._encode(text)
        if tokens[: len(seen.tokens)] == seen.tokens:
            return tokens[len(seen.tokens) :]
        if text.startswith(seen.text):
            return [*seen.unfed, *self._encode(text[len(seen.text) :])]
        return None

    def _answer(self, row: int, on_token: Callable[[Event], None] | None, stop: Callable[[], bool]) -> Output:
        while True:
            for event in self._session.sample():
                assert event.row == row, "nothing else uses the session"
                if on_token is not None:
                    on_token(event)
                if event.output is not None:
                    return event.output
            if stop():
                return self._session.end_answer(row)
            self._session.advance()

    def _answered(self, asked: list[Message], text: str, fed: list[int], output: Output) -> None:
        """Remember what was said. A stop string is part of it, for the row has seen it."""
        *before, last = output.token_ids
        ended = output.finish_reason == "stop" and last in self._ends
        said = str(self._tokenizer.decode(before if ended else [*before, last], skip_special_tokens=True))
        self._messages = [*asked, {"role": "assistant", "content": said}]
        self._seen = _Seen([*fed, *before], text + said, [] if ended else [last])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
