"""Calls as models write them, and what a reader makes of them."""

from __future__ import annotations

import json

from kvc_trt.serving.protocol.tools import PARSERS, message_of
from kvc_trt.tool_calls.reader import Reader

NAMES = ("get_weather", "clock")
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOON = '{"name": "clock", "arguments": {}}'
IN_TAGS = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
NOON_IN_TAGS = "<function=clock>\n</function>"
OF_WEATHER = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "now": {"type": "boolean"}, "where": {"type": "object"},
    "unit": {"enum": ["C", "F"]},
}  # fmt: skip
PARAMETERS = {"get_weather": {"type": "object", "properties": OF_WEATHER}, "clock": {}}


def written(parser: str, name: str, arguments: dict, **layout) -> str:
    """Return a call as a model of this form writes it, without its marks."""
    if parser == "qwen3_coder":
        values = (f"<parameter={key}>\n{json.dumps(one, **layout)}\n</parameter>\n" for key, one in arguments.items())
        return f"<function={name}>\n{''.join(values)}</function>"
    if parser == "mistral_args":
        return f"{name}[ARGS]{json.dumps(arguments, **layout)}"
    return json.dumps({"name": name, PARSERS[parser].grammar.arguments: arguments}, **layout)


def reader(parser: str, **settings) -> Reader:
    ids = iter(f"id{index}" for index in range(100))
    return Reader(PARSERS[parser].marks, PARAMETERS, make_id=lambda: next(ids), **settings)


def read(parser: str, *pieces: str, **settings):
    """Return the content, the thoughts and the calls with their arguments that a parser reads from pieces."""
    reading = reader(parser, **settings)
    deltas = [delta for piece in pieces for delta in reading.feed(piece)] + reading.finish()
    message = message_of(deltas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content"), calls


WEATHER_CALL, CLOCK_CALL = ("get_weather", '{"city": "Paris"}'), ("clock", "{}")
