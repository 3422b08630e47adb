"""A model's chat template, which turns messages into the prompt that the model was trained to answer.

The template is a Jinja text that came with the model, so it is an untrusted program: `template_process` confines it.
Its result equals that of transformers' `apply_chat_template` for the same files. It already has the model's special
tokens, so it is encoded without adding any. If it has no place for tools, they are written into messages (`tools`).
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
from kvc_trt.runtime.chat.messages import check_messages, json_value, with_objects
from kvc_trt.runtime.chat.template_process import TemplateProcess
from kvc_trt.runtime.chat.tools import check_tools, has_calls, mentions_tools, written_out

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
_FILES = (TEMPLATE_FILE, CONFIG_FILE, TOKENS_FILE)
_LARGEST_TEMPLATE = TOKENIZER_FILES[TEMPLATE_FILE]
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
"""The names of a model's templates, if it has several."""
_OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "now", "strftime_now", "raise_exception")
"""The variables of a template that only `render` may set."""
_MOST_VARIABLES = 64
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One chat template, with the special tokens that it may use. `load` finds it in a directory."""

    def __init__(
        self,
        template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "messages",
        for_tools: str | None = None,
    ) -> None:
        self.template = template
        """The Jinja text."""
        self.for_tools = template if for_tools is None else for_tools
        """The Jinja text for conversations with tools; for most models the same."""
        self.special_tokens = dict(special_tokens or {})
        """The texts of the tokenizer's special tokens by their names, such as bos_token."""
        self._process = TemplateProcess(template, self.special_tokens, source)
        self._tool_process = (
            self._process if for_tools is None else TemplateProcess(for_tools, self.special_tokens, source)
        )

    @classmethod
    def load(cls, directory: str | PathLike[str]) -> ChatTemplate | None:
        """Return the template of a Hugging Face directory; None if there is none.

        chat_template.jinja takes precedence over `chat_template` of tokenizer_config.json. Of several named templates,
        `default` is taken, and `tool_use` for conversations with tools. Raises InputError for files that cannot be
        read; errors in the template itself appear when it is rendered.
        """
        directory = Path(directory)
        present = [name for name in _FILES if (directory / name).exists()]
        return cls.of({name: HeldFile(contained(directory, name).resolve()) for name in present})

    @classmethod
    def of(cls, files: Mapping[str, HeldFile]) -> ChatTemplate | None:
        """Return the template in a tokenizer's files, given by name; the rules and errors are those of `load`."""
        config = _json_object(files, CONFIG_FILE)
        template, source = _text(files, TEMPLATE_FILE), files.get(TEMPLATE_FILE)
        named = {} if template is None else {_DEFAULT: template}
        if source is None and CONFIG_FILE in files:
            source = files[CONFIG_FILE]
            named = _configured(config.get("chat_template"), source.path)
        if source is None or not named:
            return None
        tokens = {**_special_tokens(_json_object(files, TOKENS_FILE)), **_special_tokens(config)}
        return cls(named[_DEFAULT], special_tokens=tokens, source=str(source.path), for_tools=named.get(_FOR_TOOLS))

    def for_strangers(self) -> ChatTemplate:
        """Return the same template for requests from clients: its errors do not name the template's path."""
        for_tools = None if self.for_tools == self.template else self.for_tools
        return ChatTemplate(self.template, special_tokens=self.special_tokens, for_tools=for_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """Return the prompt for these messages, in the form that `check_messages` takes.

        `tools` are the tools that the model may call, in OpenAI's form; `variables` are further variables that the
        template may read, such as `enable_thinking`. `add_generation_prompt` opens the assistant's answer at the end.
        `now` is the date for templates that write one; None takes the clock's. Truncated arguments of a call are passed
        as a text; if the template fails with it, it gets an object made of the readable part. Raises InputError, one
        line, for invalid messages or tools, and for messages that the template refuses or cannot render within its
        limits.
        """
        checked, offered = check_messages(messages), check_tools(tools) if tools else None
        process, template = self._process, self.template
        if offered or has_calls(checked):
            process, template = self._tool_process, self.for_tools
            if not mentions_tools(template):
                checked, offered = written_out(checked, offered), None
        names = {
            **({} if variables is None else check_variables(variables)),
            "messages": checked,
            "tools": offered,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if now is not None:
            names["now"] = now.isoformat()
        try:
            return process.render(names)
        except InputError:
            readable = with_objects(checked)
            if readable is None:
                raise
        return process.render({**names, "messages": readable})


def check_variables(variables: object, what: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return further variables of a template as plain values; InputError for invalid ones.

    They cannot replace variables that `ChatTemplate.render` sets itself, nor special tokens.
    """
    if not isinstance(variables, Mapping):
        raise InputError(f"{what}: expected an object, found {describe(variables)}")
    if len(variables) > _MOST_VARIABLES:
        raise InputError(f"{what}: {len(variables)} variables, expected at most {_MOST_VARIABLES}")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"{what}: {describe(name)} is not a name of a variable")
        if name in _OWN_NAMES or name in _SPECIAL_TOKENS:
            raise InputError(f"{what}: {name} cannot be set from outside")
    return {name: json_value(value, f"{what}: {name}") for name, value in variables.items()}


def _text(files: Mapping[str, HeldFile], name: str) -> str | None:
    """Return the text of one of `TOKENIZER_FILES`; None if there is no such file."""
    return None if name not in files else decoded_text(files[name].read(TOKENIZER_FILES[name]), files[name].path)


def _json_object(files: Mapping[str, HeldFile], name: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file."""
    text = _text(files, name)
    if text is None:
        return {}
    path = files[name].path
    value = parsed_json(text, path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {describe(value)}")
    return value


def _configured(value: object, source: Path) -> dict[str, str]:
    """Return the templates by name in `chat_template` of a tokenizer_config.json; empty if there is none.

    The value is one template, which is named `default`, or a list of {name, template}, of which those named `default`
    and `tool_use` are returned.
    """
    if value is None:
        return {}
    named = {_DEFAULT: value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        found = {entry["name"]: entry.get("template") for entry in entries}
        if not isinstance(found.get(_DEFAULT), str):
            raise InputError(f"{source}: no chat_template is named 'default', found {describe(list(found))}")
        named = {name: found[name] for name in (_DEFAULT, _FOR_TOOLS) if found.get(name) is not None}
    return {name: _template(one, source) for name, one in named.items()}


def _template(value: object, source: Path) -> str:
    if not isinstance(value, str):
        raise InputError(f"{source}: chat_template must be text, found {describe(value)}")
    if len(value) > _LARGEST_TEMPLATE:
        raise InputError(f"{source}: chat_template has {len(value)} characters, expected at most {_LARGEST_TEMPLATE}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name; the file has a token's text, or an object with `content`."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
