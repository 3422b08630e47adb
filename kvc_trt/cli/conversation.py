"""`kvc-trt run --chat` without a question: a conversation, line by line, from a terminal or from another program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvc_trt.cli.prompts import read_text
from kvc_trt.cli.run_arguments import RunArguments
from kvc_trt.cli.text.printing import answer_text, json_text, show
from kvc_trt.cli.text.run_report import cache_of, held, logprobs_of
from kvc_trt.errors import InputError
from kvc_trt.runtime.session.turn import takes_turns

if TYPE_CHECKING:
    from kvc_trt import Engine
    from kvc_trt.runtime import Event, Session
    from kvc_trt.runtime.chat.conversation import Reply

END = "/exit"
_PROMPT = "> "


def is_conversation(given: RunArguments, session: Session) -> bool:
    """Return whether further questions are read: all of them from the input, or those after --chat from a terminal."""
    if given.chat is None or given.questions_follow:
        return given.questions_follow
    return on_terminal() and not given.as_json and not given.proves and takes_turns(session.executor)


def on_terminal() -> bool:
    """Return whether someone can be asked for the next question."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def converse(engine: Engine, given: RunArguments) -> None:
    """Answer the question of --chat, then line after line of standard input; --document goes before the first one.

    Each answer is streamed to stdout, with a line of figures on stderr; --json prints one line of JSON per answer
    instead. Raises InputError, which ends the conversation, for a question that does not fit.
    """
    before = "" if given.document is None else f"{read_text(given.document).rstrip()}\n\n"
    with contextlib.closing(engine.conversation(system=given.system, **given.rules)) as conversation:
        for question in _questions(None if given.questions_follow else given.chat):
            reply = conversation.ask(before + question, None if given.as_json else _show)
            before = ""
            if given.as_json:
                click.echo(json_text(_report(question, reply, engine)))
            else:
                click.echo()
                show(_line(reply, engine), err=True)
            sys.stdout.flush()


def _questions(first: str | None) -> Iterator[str]:
    """Yield the first question, then each line that is not empty, until the end of the input or `END`."""
    if first is not None:
        yield first
    for line in _typed() if on_terminal() else _piped():
        if line.strip() == END:
            return
        if line.strip():
            yield line


def _typed() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and earlier ones called back
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            click.echo()
            return


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: line {number} is not UTF-8 text (byte {error.start})") from error


def _show(event: Event) -> None:
    sys.stdout.write(answer_text(event.text))
    sys.stdout.flush()


def _line(reply: Reply, engine: Engine) -> str:
    output = reply.output
    again = "the chat template rewrites what came before, so all of it was read again: " if reply.read_again else ""
    return " | ".join(
        [
            f"[{again}{len(output.prompt_token_ids)} tokens read in {reply.read_seconds:.2f} s",
            f"{len(output.token_ids)} new ({output.finish_reason}) in {reply.answer_seconds:.2f} s",
            f"{held([output], engine)}]",
        ]
    )


def _report(question: str, reply: Reply, engine: Engine) -> dict[str, object]:
    output = reply.output
    return {
        "question": question,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "read_token_ids": list(output.prompt_token_ids),
        "read_again": reply.read_again,
        "read_seconds": reply.read_seconds,
        "answer_seconds": reply.answer_seconds,
        "cache": cache_of(output, engine),
        **logprobs_of(output),
    }
