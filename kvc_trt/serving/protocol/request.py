"""Read a client's request to one of OpenAI's endpoints, with every check that needs no engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from kvc_trt.errors import InputError, KvcError, describe
from kvc_trt.proof.record import proof_kind
from kvc_trt.runtime.answer_rules import RULES
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.kinds import Kind, is_integer
from kvc_trt.runtime.request import Request, request_under
from kvc_trt.serving.protocol.errors import refused
from kvc_trt.serving.protocol.fields import FIELDS, Endpoint, given_fields
from kvc_trt.serving.protocol.grammars import grammar_of
from kvc_trt.serving.protocol.tools import ToolUse, tool_use

MOST_ANSWERS = 128
"""The largest number of answers to one request, over all of its prompts."""
MOST_STOPS = 4
"""The largest number of stop texts, as in OpenAI's API."""
_LONGEST_ID = 20
"""Names of `logit_bias` with fewer digits than this are read as token ids."""
_LENGTHS = ("max_completion_tokens", "max_tokens")

Prompt: TypeAlias = "str | tuple[int, ...]"


@dataclass(frozen=True)
class ApiRequest:
    """A client's request. A chat has `messages`, a completion has `prompts`."""

    endpoint: Endpoint
    model: str
    rules: Request = field(default_factory=lambda: Request(()))
    """The request of each answer, without its prompt."""
    prompts: tuple[Prompt, ...] = ()
    """Texts, or unchecked token ids."""
    messages: list[Any] = field(default_factory=list)
    """The conversation, unchecked; `ChatTemplate.render` checks it."""
    tools: ToolUse = field(default_factory=ToolUse)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    """True if the chat template opens the assistant's answer."""
    n: int = 1
    """The number of answers to each prompt."""
    priority: int = 0
    """Among waiting requests, the one with the lowest value is answered first, as in vLLM."""
    is_salted: bool = False
    """True if the prompts must share no cached prefix with other requests (`cache_salt`)."""
    stream: bool = False
    include_usage: bool = False
    """True if the last chunk of the stream has the usage."""
    echo: bool = False
    """True if each answer begins with its prompt."""

    def of_answer(self, prompt: tuple[int, ...], index: int, grammar: Grammar | None = None) -> Request:
        """Return the request of answer `index` (of `n`) to a prompt; a given seed is raised by `index`.

        With equal seeds, all answers to a prompt would be equal.
        """
        sampling = self.rules.sampling
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + index) % (1 << 64))
        return replace(self.rules, prompt_token_ids=prompt, sampling=sampling, grammar=grammar)


def parse(body: Mapping[str, object], endpoint: Endpoint) -> ApiRequest:
    """Return the request in a JSON object; ApiError with status 400, naming the field, if one is wrong."""
    given = given_fields(body, endpoint)
    chat = endpoint is Endpoint.CHAT
    for name in ("model", "messages" if chat else "prompt"):
        if name not in given:
            raise refused(f"{name} is missing", name)
    stream, asked = _switch(given, "stream"), _plain(given, "n", Kind.INTEGER, 1)
    prompts = () if chat else _prompts(given["prompt"])
    if not 1 <= asked * max(1, len(prompts)) <= MOST_ANSWERS:
        found = f"n is {asked}, with {max(1, len(prompts))} prompts"
        raise refused(f"{found}: expected 1 to {MOST_ANSWERS} answers in all", "n")
    rules = _rules(given, endpoint)
    echo = _switch(given, "echo")
    if echo and rules.logprobs is not None:
        raise refused("echo goes without logprobs: log-probabilities are of the answer alone", "echo")
    return ApiRequest(
        endpoint=endpoint,
        model=_plain(given, "model", Kind.TEXT, ""),
        rules=rules,
        prompts=prompts,
        messages=_messages(given["messages"]) if chat else [],
        tools=_tools(given, rules) if chat else ToolUse(),
        template_variables=_variables(given),
        opens_answer=_switch(given, "add_generation_prompt", True),
        n=asked,
        priority=_plain(given, "priority", Kind.INTEGER, 0),
        is_salted=bool(_plain(given, "cache_salt", Kind.TEXT, "")),
        stream=stream,
        include_usage=_include_usage(given, stream),
        echo=echo,
    )


def _plain(given: Mapping[str, object], name: str, kind: Kind, default: Any) -> Any:
    """Return a field's value as the Python type of `kind`, or the default; ApiError for another type."""
    if name not in given:
        return default
    try:
        return kind.plain(given[name], name)
    except InputError as error:
        raise refused(error.message, name) from None


def _switch(given: Mapping[str, object], name: str, default: bool = False) -> bool:
    return bool(_plain(given, name, Kind.SWITCH, default))


def _rules(given: Mapping[str, object], endpoint: Endpoint) -> Request:
    """Return the answer rules that a request's fields set, as a request without a prompt."""
    rules: dict[str, Any] = {}
    for name, one in FIELDS[endpoint].items():
        rule = one.rule
        if rule is None or name not in given or given[name] in rule.also_default:
            continue
        try:
            value = rule.kind.plain(_spelled(rule.kind, given[name]), name)
            for place, one in value.items() if rule.kind is Kind.BIASES else [(name, value)]:
                rule.check(one, name=name if place == name else f"{name} of token {place}")
        except InputError as error:
            raise refused(error.message, name) from None
        rules[rule.name] = value
    rules |= _length(given, rules)
    stops = rules.get("stop_strings", ())
    if len(stops) > MOST_STOPS or not all(stops):
        found = f"{len(stops)} texts" if all(stops) else "an empty text"
        raise refused(f"stop: expected up to {MOST_STOPS} texts, found {found}", "stop")
    least, most = rules.get("min_tokens", 0), rules.get("max_new_tokens")
    if most is not None and least > most:
        raise refused(f"min_tokens is {least}, expected at most max_tokens, which is {most}", "min_tokens")
    rules["logprobs"] = _logprobs(given, endpoint)
    rules["grammar"] = grammar_of(given)
    try:
        rules["kv_proof"] = proof_kind(given.get("return_kv_proof"), "return_kv_proof")
    except InputError as error:
        raise refused(error.message, "return_kv_proof") from None
    return request_under((), rules)


def _spelled(kind: Kind, value: object) -> object:
    """Return a value; for biases, with the names of a JSON object turned into integer token ids."""
    if kind is not Kind.BIASES or not isinstance(value, dict):
        return value
    return {int(name) if name.isdecimal() and len(name) < _LONGEST_ID else name: one for name, one in value.items()}


def _length(given: Mapping[str, object], rules: Mapping[str, Any]) -> dict[str, int]:
    """Return the longest answer if given as `max_completion_tokens`; ApiError if `max_tokens` contradicts it."""
    newer, older = _LENGTHS
    if newer not in given:
        return {}
    value = _plain(given, newer, Kind.INTEGER, None)
    if value < 1:
        raise refused(f"{newer} must be at least 1, found {value}", newer)
    if rules.get("max_new_tokens", value) != value:
        raise refused(f"{newer} is {value}, and {older} is {rules['max_new_tokens']}: give one of them", newer)
    return {"max_new_tokens": value}


def _logprobs(given: Mapping[str, object], endpoint: Endpoint) -> int | None:
    """Return the number of most likely tokens whose log-probabilities are returned; None returns none at all."""
    rule = RULES["logprobs"]
    if endpoint is Endpoint.CHAT and not _switch(given, "logprobs"):
        if "top_logprobs" in given:
            raise refused("top_logprobs: expected beside logprobs true", "top_logprobs")
        return None
    name = "top_logprobs" if endpoint is Endpoint.CHAT else "logprobs"
    count: int | None = _plain(given, name, Kind.INTEGER, 0 if endpoint is Endpoint.CHAT else None)
    try:
        rule.check(count, name=name)
    except InputError as error:
        raise refused(error.message, name) from None
    return count


def _include_usage(given: Mapping[str, object], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise refused("stream_options: expected beside stream true", "stream_options")
    if not isinstance(options, dict):
        raise refused(f"stream_options is {describe(options)}, expected a JSON object", "stream_options")
    for name, value in options.items():
        if name != "include_usage" and value not in (None, False):
            raise refused(f"stream_options: {describe(name)} is not supported; include_usage is", "stream_options")
    return _switch({name: value for name, value in options.items() if value is not None}, "include_usage")


def _tools(given: Mapping[str, object], rules: Request) -> ToolUse:
    try:
        use = tool_use(given)
    except InputError as error:
        raise refused(error.message, field_of(error, "tools")) from None
    if use.is_forced and rules.grammar is not None:
        raise refused("tool_choice asks for a call, and another field for a grammar: give one of them", "tool_choice")
    return use


def field_of(error: KvcError, default: str) -> str:
    """Return the chat field that an error's message begins with; `default` if it begins with none."""
    name = re.split(r"[ :]", error.message, maxsplit=1)[0]
    return name if name in FIELDS[Endpoint.CHAT] else default


def _messages(given: object) -> list[Any]:
    if not isinstance(given, list):
        raise refused(f"messages is {describe(given)}, expected a list", "messages")
    return given


def _variables(given: Mapping[str, object]) -> dict[str, Any]:
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise refused(f"chat_template_kwargs is {describe(variables)}, expected a JSON object", "chat_template_kwargs")
    return variables


def _prompts(given: object) -> tuple[Prompt, ...]:
    """Return a completion's prompts from its `prompt` field: one prompt, or a list of several."""
    if isinstance(given, list) and given and not is_integer(given[0]):
        if len(given) > MOST_ANSWERS:
            raise refused(f"prompt: {len(given)} prompts, expected at most {MOST_ANSWERS}", "prompt")
        return tuple(_prompt(one, f"prompt {index}") for index, one in enumerate(given))
    return (_prompt(given, "prompt"),)


def _prompt(given: object, what: str) -> Prompt:
    if not isinstance(given, (str, list)):
        raise refused(f"{what} is {describe(given)}, expected text or token ids", "prompt")
    if not given:
        raise refused(f"{what} is empty", "prompt")
    if isinstance(given, list):
        return tuple(given)
    try:
        text: str = Kind.TEXT.plain(given, what)
    except InputError as error:
        raise refused(error.message, "prompt") from None
    return text
