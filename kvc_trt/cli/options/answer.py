"""The options of `kvc-trt run` that are rules of an answer, made from the table of rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import cloup

from kvc_trt import Grammar, Sampling
from kvc_trt.errors import InputError
from kvc_trt.files.inputs import read_text_input
from kvc_trt.runtime.answer_rules import RULES, AnswerRule, Client, rules_of
from kvc_trt.runtime.grammar.schema import MOST_CHARACTERS
from kvc_trt.runtime.kinds import Kind

_RULES = rules_of(Client.COMMAND_LINE)
_TYPES: dict[Kind, type] = {Kind.INTEGER: int, Kind.LARGE_INTEGER: int, Kind.NUMBER: float, Kind.TEXT: str}


def answer_options() -> list[Callable[..., Any]]:
    """Return one option for each rule that the command line has. Its value goes by the rule's own name.

    Of a grammar there are simple ones beside it.
    """
    return [
        *(_option(f"--{name.replace('_', '-')}", rule) for name, rule in _RULES.items()),
        cloup.option("--choice", "choices", multiple=True, metavar="TEXT", help="Answer with one of these texts."),
        cloup.option(
            "--regex", metavar="PATTERN", help="Answer with a text that matches this regular expression in full."
        ),
    ]


def take_rules(parameters: dict[str, Any]) -> dict[str, Any]:
    """Take the rules out of a command's parameters, and return them as `Engine.generate` takes them.

    Raises InputError for a value of sampling that is out of its range, and for a grammar that is none.
    """
    parameters["grammar"] = _grammar(parameters["grammar"], parameters.pop("choices"), parameters.pop("regex"))
    given = {rule.name: parameters.pop(rule.name) for rule in _RULES.values()}
    sampling = {rule.name: given.pop(rule.name) for rule in _RULES.values() if rule.of_sampling}
    keywords = {rule.name: keyword for keyword, rule in rules_of(Client.PYTHON).items()}
    return {"sampling": Sampling(**sampling), **{keywords[name]: value for name, value in given.items()}}


def _grammar(schema: Path | None, choices: tuple[str, ...], regex: str | None) -> Grammar | None:
    if (schema is not None) + bool(choices) + (regex is not None) > 1:
        raise click.UsageError("give one of --json-schema, --choice and --regex")
    if schema is not None:
        text = read_text_input(schema, MOST_CHARACTERS)
        try:
            return Grammar.json_schema(text)
        except InputError as error:
            raise InputError(f"{schema}: {error.message}", hint=error.hint) from error
    if choices:
        return Grammar.choice(choices)
    return None if regex is None else Grammar.regex(regex)


def _option(flag: str, rule: AnswerRule) -> Callable[..., Any]:
    if rule.kind is Kind.SWITCH:
        return cloup.option(flag, rule.name, is_flag=True, help=rule.help)
    if rule.kind is Kind.TEXTS:
        return cloup.option(flag, rule.name, multiple=True, metavar=rule.metavar, help=rule.help)
    return cloup.option(
        flag, rule.name, type=_type(rule), default=rule.default, metavar=rule.metavar, help=rule.help
    )  # fmt: skip


def _type(rule: AnswerRule) -> Any:
    if rule.choices:
        return click.Choice(rule.choices)
    if rule.name == "max_new_tokens":  # only the session would refuse it, after the engine is loaded
        return click.IntRange(min=1)
    if rule is RULES["grammar"]:
        return click.Path(path_type=Path)
    return _TYPES[rule.kind]
