"""A model's chat template: from messages to the prompt that the model was trained to answer.

The template is a Jinja text that came with the model, so it is a stranger's program: `template_process` says how it is
kept in bounds. Its result is what `apply_chat_template` of transformers gives for the same files. It already holds the
model's special tokens, so it is encoded without adding any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.files.held import HeldFile
from kvc_trt.files.inputs import decoded_text, parsed_json
from kvc_trt.models.sources.containment import contained
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES
from kvc_trt.runtime.chat.template_process import TemplateProcess

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
_FILES = (TEMPLATE_FILE, CONFIG_FILE, TOKENS_FILE)
ROLES = ("system", "user", "assistant", "tool")
LONGEST_MESSAGES = 16 << 20
"""Characters of a conversation."""
_LARGEST_TEMPLATE = TOKENIZER_FILES[TEMPLATE_FILE]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One template with the special tokens that it may name; `load` finds it."""

    def __init__(
        self, template: str, *, special_tokens: Mapping[str, str] | None = None, source: str = "messages"
    ) -> None:
        self.template = template
        """The Jinja text."""
        self.special_tokens = dict(special_tokens or {})
        """The special tokens that the tokenizer has: bos_token, eos_token and so on."""
        self._process = TemplateProcess(template, self.special_tokens, source)

    @classmethod
    def load(cls, directory: str | PathLike[str]) -> ChatTemplate | None:
        """Return the template of a Hugging Face directory; None where there is none.

        chat_template.jinja comes before `chat_template` of tokenizer_config.json, of whose named templates `default`
        is taken. Raises InputError for files that cannot be read; the template itself shows when it is rendered.
        """
        directory = Path(directory)
        present = [name for name in _FILES if (directory / name).exists()]
        return cls.of({name: HeldFile(contained(directory, name).resolve()) for name in present})

    @classmethod
    def of(cls, files: Mapping[str, HeldFile]) -> ChatTemplate | None:
        """Return the template of a tokenizer's files, by their names; otherwise like `load`."""
        config = _json_object(files, CONFIG_FILE)
        template, source = _text(files, TEMPLATE_FILE), files.get(TEMPLATE_FILE)
        if source is None and CONFIG_FILE in files:
            source = files[CONFIG_FILE]
            template = _configured(config.get("chat_template"), source.path)
        if template is None or source is None:
            return None
        tokens = {**_special_tokens(_json_object(files, TOKENS_FILE)), **_special_tokens(config)}
        return cls(template, special_tokens=tokens, source=str(source.path))

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Return the prompt for these messages, each with `role` (one of `ROLES`) and `content`.

        `add_generation_prompt` opens the assistant's answer at its end. `now` is the date that a template may write
        into the prompt; None is the clock's. Raises InputError, one line, for something that is not a list of messages,
        and for messages that the template refuses, or cannot render within its bounds.
        """
        checked = check_messages(messages)
        names = {"messages": checked, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return self._process.render(names if now is None else {**names, "now": now.isoformat()})


def check_messages(messages: object, what: str = "messages", *, system: str | None = None) -> list[dict[str, str]]:
    """Return the messages as plain values; InputError, which opens with `what`, for what is not a conversation.

    Every message has `role` and `content`, and may have other keys for the template, all of them text. `system` is put
    before them as a message of that role.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f"{what}: expected a list of messages, found {describe(messages)}")
    if not messages:
        raise InputError(f"{what}: there is no message, expected at least one")
    checked = [_checked(message, f"{what}: message {index}") for index, message in enumerate(messages)]
    if system is not None:
        if checked[0]["role"] == "system":
            raise InputError(f"{what}: message 0 has the role system, and another system message is given")
        checked.insert(0, _checked({"role": "system", "content": system}, f"{what}: system message"))
    length = sum(len(text) for message in checked for text in message.values())
    if length > LONGEST_MESSAGES:
        raise InputError(f"{what}: {length} characters, expected at most {LONGEST_MESSAGES}")
    return checked


def _checked(message: object, what: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InputError(f"{what}: expected an object with role and content, found {describe(message)}")
    for key in ("role", "content"):
        if key not in message:
            raise InputError(f"{what}: {key} is missing")
    for key, value in message.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(f"{what}: {describe(key)} must be text, found {describe(value)}")
        if not _is_unicode(key + value):
            raise InputError(f"{what}: {describe(key)} holds half of a character (a lone surrogate)")
    if message["role"] not in ROLES:
        raise InputError(f"{what}: role is {describe(message['role'])}, expected one of {', '.join(ROLES)}")
    if message["role"] == "user" and not message["content"]:
        raise InputError(f"{what}: content of the user's message is empty")
    return {str(key): str(value) for key, value in message.items()}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(files: Mapping[str, HeldFile], name: str) -> str | None:
    """The text of one of `TOKENIZER_FILES`; None where there is no such file."""
    return None if name not in files else decoded_text(files[name].read(TOKENIZER_FILES[name]), files[name].path)


def _json_object(files: Mapping[str, HeldFile], name: str) -> dict[str, Any]:
    """A JSON file; an empty object where there is no such file."""
    text = _text(files, name)
    if text is None:
        return {}
    path = files[name].path
    value = parsed_json(text, path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def _configured(value: object, source: Path) -> str | None:
    """`chat_template` of a tokenizer_config.json: one template, or a list of {name, template}."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        if not isinstance(named.get("default"), str):
            raise InputError(f"{source}: no chat_template is named 'default', found {describe(list(named))}")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise InputError(f"{source}: chat_template must be text, found {describe(value)}")
    if value is not None and len(value) > _LARGEST_TEMPLATE:
        raise InputError(f"{source}: chat_template has {len(value)} characters, expected at most {_LARGEST_TEMPLATE}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is written as its text, or as an object with `content`."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
