"""A conversation on a terminal: lines that can be edited and called back, commands, and Ctrl-C that ends an answer."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings

from kvc_trt.cli.asking.commands import COMMANDS, run_command
from kvc_trt.cli.asking.talk import Talk
from kvc_trt.cli.options.prompts import read_text
from kvc_trt.cli.process.ending import event_loop_inside, first_interrupt
from kvc_trt.cli.text.printing import show
from kvc_trt.errors import KvcError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

    from kvc_trt import Engine
    from kvc_trt.cli.options.run import RunArguments

_PROMPT = "> "
_GREETING = "/help lists the commands. Ctrl-C stops an answer; a second one, or Ctrl-D, ends the conversation."


def converse_on_terminal(engine: Engine, given: RunArguments) -> None:
    """Answer the question of --chat, then the questions typed, until /exit, Ctrl-D, or Ctrl-C at an empty prompt.

    --document is read at once, before any question. A question that cannot be answered is reported as an error, and the
    conversation goes on.
    """
    document = None if given.document is None else read_text(given.document)
    show(_GREETING, err=True)
    with contextlib.closing(Talk(engine, given, document)) as talk:
        lines = _Lines()
        line: str | None = None if given.questions_follow else given.chat
        if line is not None:
            _answer(talk, line)
        while (line := lines.next()) is not None:
            if not line.strip():
                continue
            if not line.startswith("/"):
                _answer(talk, line)
            elif not run_command(line, talk):
                return


class _Lines:
    """The lines that a user types: a question or a command each."""

    def __init__(self) -> None:
        keys = KeyBindings()
        keys.add("c-c")(_clear_or_end)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory(),
            key_bindings=keys,
            completer=WordCompleter([command.name for command in COMMANDS], sentence=True),
            complete_while_typing=False,
        )

    def next(self) -> str | None:
        """Return the next line; None where the conversation ends."""
        try:
            with event_loop_inside():
                return self._session.prompt(_PROMPT, handle_sigint=False)
        except (EOFError, KeyboardInterrupt):
            return None


def _clear_or_end(event: KeyPressEvent) -> None:
    """Ctrl-C: drop the typed text; at an empty prompt, end."""
    if event.current_buffer.text:
        event.current_buffer.reset()
    else:
        event.app.exit(exception=KeyboardInterrupt())


def _answer(talk: Talk, question: str) -> None:
    stopped = threading.Event()
    try:
        with first_interrupt(stopped.set):
            talk.ask(question, stopped.is_set)
    except KvcError as error:
        show(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
