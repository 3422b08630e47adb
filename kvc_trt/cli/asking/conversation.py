"""`kvc-trt run --chat` without a question, or on a terminal: a conversation, line by line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvc_trt.cli.asking.talk import Talk
from kvc_trt.cli.options.prompts import read_text
from kvc_trt.cli.options.run import END, RunArguments
from kvc_trt.errors import InputError
from kvc_trt.runtime.session.turn import takes_turns

if TYPE_CHECKING:
    from kvc_trt import Engine
    from kvc_trt.runtime import Session


def is_conversation(given: RunArguments, session: Session) -> bool:
    """Return whether further questions are read: all of them from the input, or those after --chat from a terminal."""
    if given.chat is None or given.questions_follow:
        return given.questions_follow
    return on_terminal() and not given.as_json and not given.proves and takes_turns(session.executor)


def on_terminal() -> bool:
    """Return whether someone can be asked for the next question."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def converse(engine: Engine, given: RunArguments) -> None:
    """Answer the question of --chat, then the questions typed, or each line of standard input.

    Each answer is streamed to stdout, with a line of figures on stderr; --json prints one line of JSON per answer
    instead. From a program, InputError for a question that does not fit ends the conversation.
    """
    if on_terminal() and not given.as_json:
        from kvc_trt.cli.asking.typed import converse_on_terminal

        converse_on_terminal(engine, given)
        return
    before = "" if given.document is None else f"{read_text(given.document).rstrip()}\n\n"
    with contextlib.closing(Talk(engine, given)) as talk:
        for question in _questions(None if given.questions_follow else given.chat):
            talk.ask(before + question)
            before = ""


def _questions(first: str | None) -> Iterator[str]:
    """Yield the first question, then each line that is not empty, until the end of the input or `END`."""
    if first is not None:
        yield first
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        try:
            line = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: line {number} is not UTF-8 text (byte {error.start})") from error
        if line.strip() == END:
            return
        if line.strip():
            yield line
