"""The commands of a conversation on a terminal: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.cli.asking.talk import Talk
from kvc_trt.cli.options.run import END
from kvc_trt.cli.text.printing import show
from kvc_trt.errors import InputError, KvcError, did_you_mean
from kvc_trt.files.atomic import write_new_file
from kvc_trt.tables import text_table


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    argument: str
    """Its placeholder in /help; empty: it takes none."""
    help: str
    run: Callable[[Talk, str], str | None]
    """Return the text to show; None ends the conversation. Raises KvcError for a command that cannot be carried out."""
    argument_may_lack: bool = False


def run_command(line: str, talk: Talk) -> bool:
    """Run the command on a line and show its result; False if it ends the conversation.

    An unknown command is reported with the nearest known one, and is never sent as a question.
    """
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    try:
        said = _named(name, argument).run(talk, argument)
    except KvcError as error:
        said = f"error: {error.message}"
    if said is not None:
        show(said, err=True)
    return said is not None


def _named(name: str, argument: str) -> Command:
    names = [command.name for command in COMMANDS]
    if name not in names:
        known = did_you_mean(name, names) or ", /help lists them."
        raise InputError(f"no such command {name!r}{known} Put a space before a question that begins with /.")
    (command,) = (one for one in COMMANDS if one.name == name)
    if bool(argument) != bool(command.argument) and not (command.argument_may_lack and not argument):
        found = f"found {argument!r}" if argument else "found nothing"
        raise InputError(f"{name}: expected {command.argument or 'nothing'} after it, {found}")
    return command


def _help(talk: Talk, argument: str) -> str:
    rows = [(f"{command.name} {command.argument}".strip(), command.help) for command in COMMANDS]
    return text_table(("command", ""), rows)


def _clear(talk: Talk, argument: str) -> str:
    for conversation in talk.conversations:
        conversation.clear()
    return "The conversation begins again" + ("." if talk.document is None else ", after the document.")


def _system(talk: Talk, argument: str) -> str:
    talk.begin(argument or None)
    return f"The conversation begins again, {'with that' if argument else 'without a'} system message."


def _save(talk: Talk, argument: str) -> str:
    messages = talk.conversations[0].messages
    if not messages:
        raise InputError("there is nothing to save: nothing was asked yet")
    path = Path(argument).expanduser()
    write_new_file(path, json.dumps(messages, indent=2, ensure_ascii=False) + "\n", replace=False)
    return f"{path}: {len(messages)} messages; kvc-trt run ENGINE --messages FILE reads them."


def _exit(talk: Talk, argument: str) -> None:
    return None


COMMANDS = (
    Command("/help", "", "list these commands", _help),
    Command("/clear", "", "forget the questions and answers; system message and document stay", _clear),
    Command("/system", "TEXT", "set the system message (none without TEXT) and begin again", _system, True),
    Command("/save", "FILE", "write the conversation's messages to a new JSON file", _save),
    Command(END, "", "end the conversation", _exit),
)
