"""A conversation: questions go through the chat template, and one row reads the new part of the prompt as a turn."""

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
"""The number of tokens from which a prompt is read in slices, so that reading it shows progress and can be stopped."""
_SLICE_SECONDS = 0.5
_BREAK = "\n\n"
"""The text between a document and the first question."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Reply:
    """The answer to one question of a conversation, and its times."""

    output: Output
    """The answer; its `prompt_token_ids` are the tokens that were read for this question."""
    read_again: bool
    """True if earlier messages were read again, because the template now writes them differently, or because the row
    was freed: after a failed answer, a cancelled question or `take_back`."""
    read_seconds: float
    """The time to read the tokens."""
    answer_seconds: float
    """The time from then to the last token of the answer."""


@dataclass(frozen=True)
class _Seen:
    """The part of a conversation that a row has read."""

    tokens: list[int]
    """The tokens that the row was fed, without the last one of the latest answer."""
    text: str
    """The text of these tokens and of the latest answer's last one, unless that is an end token."""
    unfed: list[int]
    """The last token of the latest answer; empty if it is an end token."""


@dataclass(frozen=True)
class _Opening:
    """The beginning of the conversation up to the end of its document, with the stored caches."""

    seen: _Seen
    context: Context


class Conversation:
    """A conversation in one row of a session, which nothing else may use meanwhile. `ask` it question after question.

    The template renders the whole conversation for each question. If the result begins with the text that the row has
    seen, the rest is read as a turn. If the template writes earlier messages differently (for example, it drops the
    reasoning of earlier answers), the row cannot continue: the whole conversation is read again (`Reply.read_again`).

    A `document` comes before the first question. It is read once, without any question, and its caches are stored then:
    after `clear` the next question continues from them, bit for bit.
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
        """Begin a conversation, with a `system` message if given. `rules`, without a prompt, apply to all answers.

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

        Return 0 if there is no document, or if the template changes its text; it is then read with the first question.
        Raises InputError if it does not fit.
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

        `schema` constrains this answer alone; without it, the conversation's rules apply. `stop` is called after each
        token, and between slices of a long prompt. Once it returns True, the answer ends with the `finish_reason`
        interrupted, and its text stays part of the conversation. If the prompt is still being read, Cancelled is raised
        and the conversation is as before.

        Raises InputError, with the numbers, for a question that does not fit; the conversation is then as before. An
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
            self._take_turn(row, new, rules)
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
        """Remove the last question and its answer. The next question reads the messages before them again."""
        self.close()
        self._messages = self._messages[:-2]

    def clear(self) -> None:
        """Remove all questions and answers. The system message and the document stay."""
        self.close()
        self._messages = []

    def close(self) -> None:
        """Free the row. The next question reads the conversation again, from its beginning or the document's end."""
        if self._row is not None and self._session.holds(self._row):  # a failed run has removed the row already
            self._session.remove(self._row)
        self._row = None

    def _new(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return the tokens of the whole text, and the new ones after those that the row or the stored document has.

        The latter are None if the text must be read from its beginning.
        """
        seen = self._seen if self._row is not None else None if self._opening is None else self._opening.seen
        new = None if seen is None else self._unread(seen, text)
        if seen is None or new is None:
            return self._encode(text), None
        return [*seen.tokens, *new], new

    def _begin(self, tokens: list[int], new: list[int] | None, rules: Request, stop: Callable[[], bool]) -> int:
        """Make a row that reads all `tokens`, or only the `new` ones after the document's caches; return its number."""
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

    def _take_turn(self, row: int, tokens: list[int], rules: Request) -> None:
        try:
            self._session.constrain(row, rules.grammar)
            self._session.turn(row, tokens, feed_last=False)
        except InputError:  # the turn was refused, and the row is unchanged
            raise
        except BaseException:
            self.close()
            raise

    def _render(self, messages: list[Message]) -> str:
        return self._template.render(check_messages(messages, system=self._system), now=self._now)

    def _unread(self, seen: _Seen, text: str) -> list[int] | None:
        """Return the tokens of the conversation after those that were seen; None if it does not begin with them.

        A model may write a text in other tokens than the tokenizer would, so texts are compared as well.
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
        """Record the question and its answer. A stop string belongs to the answer, because the row has read it."""
        *before, last = output.token_ids
        ended = output.finish_reason == "stop" and last in self._ends
        said = str(self._tokenizer.decode(before if ended else [*before, last], skip_special_tokens=True))
        self._messages = [*asked, {"role": "assistant", "content": said}]
        self._seen = _Seen([*fed, *before], text + said, [] if ended else [last])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
