"""One call as Qwen3-Coder writes it, in tags, read character by character:

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

Its values are texts or JSON, which the tool's schema tells apart. The arguments come as a JSON object, each when its
tag is closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvc_trt.tool_calls.json_text import JsonText

FUNCTION, PARAMETER, END = "<function=", "<parameter=", "</function>"
VALUE_END = "</parameter>"
_LONGEST_NAME = 200
"""Characters of the name of a function or a parameter."""


class XmlCall:
    """A call from its first tag on. `push` it its characters, and take the arguments from `new_arguments`."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin; `tools` are the schemas of the parameters of each tool that may be called."""
        self._tools = tools
        self.name: str | None = None
        self.is_whole = False
        """True once its last tag has come."""
        self._text = ""
        """The characters of this tag; of a value, the last ones, which may be the tag that ends it."""
        self._value: list[str] = []
        """The characters of this value with the tag that ends it."""
        self._parameter: str | None = None
        """The parameter whose value comes."""
        self._seen: set[str] = set()
        self._arguments = ""
        """Characters of the arguments that were not taken yet."""

    @property
    def has_begun(self) -> bool:
        """True once it is certain to be a call: its name is known."""
        return self.name is not None

    def new_arguments(self) -> str:
        """Return the text of the arguments that has arrived since the last call."""
        new, self._arguments = self._arguments, ""
        return new

    def push(self, character: str) -> bool:
        """Take one more character; False if no call continues so."""
        if self._parameter is not None:
            self._value.append(character)
            self._text = (self._text + character)[-len(VALUE_END) :]
            if self._text == VALUE_END:
                self._took_value("".join(self._value[: -len(VALUE_END)]))
            return True
        self._text += character
        if self._text.isspace() and self.name is not None:
            self._text = ""
            return True
        if self.name is None:
            return self._tag(FUNCTION) and (character != ">" or self._took_name())
        if self._text == END:
            self._arguments += "}" if self._seen else "{}"
            self.is_whole = True
            return True
        return END.startswith(self._text) or (self._tag(PARAMETER) and (character != ">" or self._took_parameter()))

    def _tag(self, opening: str) -> bool:
        """Return whether the text may become, or is, a tag that opens so."""
        if len(self._text) <= len(opening):
            return opening.startswith(self._text)
        return self._text.startswith(opening) and len(self._text) <= len(opening) + _LONGEST_NAME

    def _took_name(self) -> bool:
        name, self._text = self._text[len(FUNCTION) : -1].strip(), ""
        if name not in self._tools:
            return False
        self.name = name
        return True

    def _took_parameter(self) -> bool:
        self._parameter, self._text = self._text[len(PARAMETER) : -1].strip(), ""
        return bool(self._parameter) and self._parameter not in self._seen

    def _took_value(self, text: str) -> None:
        assert self.name is not None
        assert self._parameter is not None
        text = text.removeprefix("\n").removesuffix("\n")
        schema = properties_of(self._tools[self.name]).get(self._parameter)
        self._arguments += f"{', ' if self._seen else '{'}{_quoted(self._parameter)}: {_value(text, schema)}"
        self._seen.add(self._parameter)
        self._parameter, self._text, self._value = None, "", []


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters, by their names; a reference to a definition is followed once."""
    found = parameters.get("properties")
    return {name: _followed(one, parameters) for name, one in found.items()} if isinstance(found, Mapping) else {}


def _followed(schema: Any, parameters: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping) or schema.keys() != {"$ref"} or not isinstance(schema["$ref"], str):
        return schema
    for group in ("$defs", "definitions"):
        name, defined = schema["$ref"].removeprefix(f"#/{group}/"), parameters.get(group)
        if isinstance(defined, Mapping) and name in defined and schema["$ref"] != name:
            return defined[name]
    return schema


def is_text(schema: object) -> bool:
    """Return whether a parameter's value is a text, and is written as it is."""
    if not isinstance(schema, Mapping):
        return False
    choices = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return schema.get("type") == "string" or (
        "type" not in schema and bool(choices) and all(isinstance(one, str) for one in choices)
    )


def _value(text: str, schema: object) -> str:
    """Return a value as JSON: a text where the schema says so, or where it is not JSON."""
    if not is_text(schema):
        is_switch = isinstance(schema, Mapping) and schema.get("type") == "boolean"
        plain = text.strip().lower() if is_switch else text.strip()  # templates write True
        scanner = JsonText()
        if plain and all(map(scanner.push, plain)) and scanner.is_whole:
            return plain
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
