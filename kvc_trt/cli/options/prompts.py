"""The prompts that `run` is given: a text, token ids or messages, from the command line or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvc_trt.cli.text.printing import show
from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_json_input, read_text_input
from kvc_trt.runtime.chat.messages import check_messages

if TYPE_CHECKING:
    from kvc_trt import Engine

PROMPT_OPTIONS = "--prompt TEXT, --prompt-file FILE, --prompt-ids FILE, --chat TEXT or --messages FILE"
LARGEST_PROMPT = 64 << 20
"""Bytes of a file of a prompt, a document, token ids or messages: some sixteen million tokens."""
_SHOWN_WORDS = 5


@dataclass(frozen=True)
class PromptOptions:
    """The prompts as given, before an engine reads them; exactly one of the three is set."""

    text: str | None = None
    ids: Sequence[Sequence[Any]] = ()
    conversations: Sequence[list[dict[str, str]]] = ()

    def __len__(self) -> int:
        return 1 if self.text is not None else len(self.ids) or len(self.conversations)

    @property
    def is_bare_text(self) -> bool:
        """True if a text goes to the model unchanged."""
        return self.text is not None

    def for_engine(self, engine: Engine) -> Sequence[Any]:
        """Return the prompts for the engine: the text, or token ids; InputError for messages that it cannot take."""
        if self.text is not None:
            return [self.text]
        return engine.chat_prompt(self.conversations) if self.conversations else self.ids


def read_prompts(
    text: str | None,
    text_file: Path | None,
    ids_file: Path | None,
    question: str | None,
    messages_file: Path | None,
    *,
    document: Path | None,
    system: str | None,
) -> PromptOptions:
    """Return the prompts that the options give; UsageError unless exactly one of the first five gives a prompt."""
    if sum(source is not None for source in (text, text_file, ids_file, question, messages_file)) != 1:
        raise click.UsageError(f"give exactly one of {PROMPT_OPTIONS}")
    if system is not None and question is None and messages_file is None:
        raise click.UsageError("--system goes with --chat or --messages")
    if document is not None and question is None:
        raise click.UsageError("--document goes with --chat")
    if ids_file is not None:
        return PromptOptions(ids=read_prompt_ids(ids_file))
    if question is not None:
        if document is not None and question:
            question = f"{read_text(document).rstrip()}\n\n{question}"
        asked = [{"role": "user", "content": question}]
        return PromptOptions(conversations=[check_messages(asked, "--chat", system=system)])
    if messages_file is not None:
        return PromptOptions(conversations=read_messages(messages_file, system))
    return PromptOptions(text=text if text_file is None else read_text(text_file))


def warn_of_bare_text(asked: PromptOptions, engine: Engine, hint: str) -> None:
    """Say on stderr that a text bypasses the model's chat template, if that is so."""
    if asked.is_bare_text and engine.directory.chat_template is not None:
        message = "the model has a chat template, and this prompt bypasses it: chat models often give no answer then"
        show(f"warning: {message}\nhint: {hint}", err=True)


def warn_of_unknown_words(asked: PromptOptions, engine: Engine) -> None:
    """Say on stderr which words the model reads as its unknown token, if there are any."""
    tokenizer = engine.directory.tokenizer
    said = (message.get("content") for messages in asked.conversations for message in messages)
    texts = [asked.text or "", *(text for text in said if isinstance(text, str))]
    if tokenizer is None or not (words := list(dict.fromkeys(chain(*map(tokenizer.unknown_words, texts))))):
        return
    shown = ", ".join(describe(word) for word in words[:_SHOWN_WORDS]) + (", ..." if words[_SHOWN_WORDS:] else "")
    show(
        f"warning: the model's vocabulary lacks {len(words)} of the prompt's words, which it cannot read: {shown}",
        err=True,
    )


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; InputError names the fault."""
    return read_text_input(path, LARGEST_PROMPT)


def read_prompt_ids(path: Path) -> list[list[Any]]:
    """Read one list of token ids per prompt; InputError unless the file is a JSON list, or a list of lists.

    Whether the ids are tokens of the model is checked by the session.
    """
    found = read_json_input(path, LARGEST_PROMPT)
    lists = [isinstance(item, list) for item in found] if isinstance(found, list) else []
    if not isinstance(found, list) or any(lists) != (bool(lists) and all(lists)):
        raise InputError(f"{path}: expected a list of token ids, or a list of such lists, found {describe(found)}")
    return found if any(lists) else [found]


def read_messages(path: Path, system: str | None = None) -> list[list[dict[str, str]]]:
    """Read one conversation, a list of messages, or a list of conversations; InputError for anything else."""
    found = read_json_input(path, LARGEST_PROMPT)
    if isinstance(found, list) and found and all(isinstance(item, list) for item in found):
        places = enumerate(found)
        return [check_messages(item, f"{path}: conversation {index}", system=system) for index, item in places]
    return [check_messages(found, str(path), system=system)]
