"""A grammar as a client writes it, and every check of it that needs no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from kvc_trt.errors import InputError, describe
from kvc_trt.runtime.grammar.schema import MOST_CHARACTERS, check_lark, check_schema, closed, parsed_schema

if TYPE_CHECKING:
    from pydantic import BaseModel

Schema: TypeAlias = "Mapping[str, Any] | bool | str | type[BaseModel]"
"""The forms of a JSON schema that callers may pass: a mapping, its JSON text, or a pydantic model class."""
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True)
class Grammar:
    """The texts that an answer may be. Make one with the functions below; they raise InputError for invalid input."""

    kind: GrammarKind
    text: str = ""
    """The JSON schema, the regular expression, the JSON list of choices, or the grammar in Lark's notation."""

    def __post_init__(self) -> None:
        """Check the grammar's text alone; a session checks that it compiles, and that its tokenizer can write it."""
        if self.kind not in get_args(GrammarKind):
            raise InputError(f"a grammar of kind {describe(self.kind)}, expected {' or '.join(get_args(GrammarKind))}")
        if not isinstance(self.text, str):
            raise InputError(f"a grammar's text is {describe(self.text)}, expected a text")
        if len(self.text) > MOST_CHARACTERS:
            raise InputError(f"{self.name} has {len(self.text)} characters, expected at most {MOST_CHARACTERS}")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{self.name} is not valid Unicode: character {error.start} is half of one") from error
        if self.kind == "json_schema":
            check_schema(parsed_schema(self.text))
        elif self.kind == "choice":
            _check_choices(self.choices())
        elif not self.text and self.kind != "json_object":
            raise InputError(f"{self.name} is empty")
        elif self.kind == "lark":
            check_lark(self.text)

    @staticmethod
    def json_object() -> Grammar:
        """Return the grammar of any JSON object."""
        return Grammar("json_object")

    @staticmethod
    def of(asked: Grammar | Schema) -> Grammar:
        """Return a given grammar unchanged, or make one of a JSON schema."""
        return asked if isinstance(asked, Grammar) else Grammar.json_schema(asked)

    @staticmethod
    def json_schema(schema: Schema) -> Grammar:
        """Return the grammar of JSON that a schema allows; a pydantic class allows no fields but its own."""
        if isinstance(schema, str):
            schema = parsed_schema(schema)
        elif isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = closed(schema.model_json_schema())
        if not isinstance(schema, (Mapping, bool)):
            raise InputError(
                f"a JSON schema is {describe(schema)}, expected a mapping, JSON text, or a class of pydantic's models"
            )
        try:
            return Grammar(
                "json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the JSON schema cannot be written as JSON: {error}") from error

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches whole.

        The notation is Rust's: without look-around and back references.
        """
        return Grammar("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> Grammar:
        """Return the grammar of these texts: an answer is one of them."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise InputError(f"the choices are {describe(texts)}, expected a list of texts")
        try:
            return Grammar("choice", json.dumps(list(texts), ensure_ascii=False))
        except TypeError as error:
            raise InputError(f"the choices are {describe(texts)}, expected a list of texts") from error

    @staticmethod
    def lark(text: str) -> Grammar:
        """Return a context-free grammar in llguidance's variant of Lark, which may embed `%json {...}`."""
        return Grammar("lark", text)

    @property
    def name(self) -> str:
        """The grammar's name in error messages."""
        return {
            "json_object": "the grammar of a JSON object",
            "json_schema": "the JSON schema",
            "regex": "the regular expression",
            "choice": "the list of choices",
            "lark": "the grammar",
        }[self.kind]

    @property
    def is_json(self) -> bool:
        """True for the kinds `json_object` and `json_schema`, whose answers are JSON."""
        return self.kind in ("json_object", "json_schema")

    def choices(self) -> list[str]:
        """Return the texts of a grammar of kind `choice`; InputError if `text` is not a JSON list."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InputError("the choices are not a JSON list of texts") from error
        if not isinstance(found, list):
            raise InputError(f"the choices are {describe(found)}, expected a list of texts")
        return found


def _check_choices(texts: Sequence[object]) -> None:
    if not texts:
        raise InputError("the list of choices is empty")
    for index, one in enumerate(texts):
        if not isinstance(one, str) or not one:
            raise InputError(f"choice {index} is {describe(one)}, expected a text that is not empty")
