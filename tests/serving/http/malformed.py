"""Malformed requests: values of any kind in every field, nested values, histories, parts, tools; and their answers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvc_trt.serving.protocol.fields import FIELDS, Endpoint
from tests.readable_model import text
from tests.serving.dynamo.served import Client

ROOT = str(Path(__file__).resolve().parents[3])
VALUES: list[Any] = [
    None, "", "x", "é", "\ud800", "\0", "a" * 5000, -1, 0, 1, 2, 5.5, 1e300, -0.0, 2**31, 2**64, -(2**63), 2**70, True,
    False, [], [1], ["a"], [[1]], [None], [{}], {}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, [5, "x"],
    "true", "none", "auto", "required", {"include_usage": True}, {"": None}, {"5": 100}, [-1], [2**40], ["", ""],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}, "[", "(a+)+$", {"regex": "("},
    {"type": "function", "function": {"name": "f"}},
]  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[Any] = [
    {"role": "user", "content": text(9, 10)},
    {"role": "system", "content": text(9)},
    {"role": "developer", "content": text(9)},
    {"role": "user", "content": [{"type": "text", "text": text(9)}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": text(9), "tool_calls": []},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
    {"role": "tool", "tool_call_id": "c", "content": text(9)},
    {"role": "tool", "content": None},
    {"role": "function", "name": "f", "content": ""},
]
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": "chat", "messages": [MESSAGES[0]]},
    Endpoint.COMPLETIONS: {"model": "demo", "prompt": [5, 6, 7]},
}


def requests(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw paths and bodies: a right one of which one to three things were changed, often somewhere inside."""
    draw = random.Random(seed)
    for _ in range(count):
        endpoint = draw.choice(list(Endpoint))
        body: dict[str, Any] = json.loads(json.dumps({**BODIES[endpoint], "max_tokens": 2}))
        if endpoint is Endpoint.CHAT:
            body["messages"] = json.loads(json.dumps(draw.choices(MESSAGES, k=draw.randint(1, 5))))
            if draw.random() < 0.3:
                body["tools"] = json.loads(json.dumps([TOOL] * draw.randint(1, 2)))
        for _ in range(draw.randint(1, 3)):
            if draw.random() < 0.6:
                body[draw.choice([*FIELDS[endpoint], "unknown"])] = copy.deepcopy(draw.choice(VALUES))
            else:
                _change_inside(body, draw)
        body["stream"] = draw.choice([True, False, body.get("stream")])
        yield endpoint.value, body


def _change_inside(value: Any, draw: random.Random) -> None:
    """Change one value at some depth: put another in its place, remove it, repeat it, or wrap it."""
    places = list(_places(value))
    if not places:
        return
    owner, key = draw.choice(places)
    match draw.randint(0, 3):
        case 0:
            owner[key] = copy.deepcopy(draw.choice(VALUES))
        case 1:
            del owner[key]
        case 2:
            owner[key] = [copy.deepcopy(owner[key]) for _ in range(draw.randint(1, 3))]
        case _:
            owner[key] = {"type": "text", "text": owner[key]}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def bad_answers(client: Client, asked: Iterable[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Requests that were the server's failure: status 500 or more, an error of status 200, a path of its machine."""
    found = []
    for path, body in asked:
        status, answer = client.ask(path, body)
        said = json.dumps(answer)
        if status >= 500 or (status == 200 and '"error"' in said) or "/tmp" in said or ROOT in said:
            found.append((path, body, status, said[:300]))
    return found
