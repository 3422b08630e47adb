from __future__ import annotations

import json
import re

import pytest

from kvc_trt.tasks.kinds.tool_calls import SHOWN, TOOLS, generate, score
from tests.tasks.readers import by_word


def draw(**arguments):
    return generate(**{"seed": 0, "index": 0, "target_tokens": 1500, "encode": by_word} | arguments)


@pytest.mark.parametrize("index", range(5))
def test_the_call_is_looked_up_in_two_places(index):
    sample = draw(index=index)
    call = json.loads(sample.answers[0])
    described, returned = sample.context.split("A call of a tool returned this:\n")
    tools = [json.loads(line) for line in described.splitlines()[1:]]
    assert len({tool["name"] for tool in tools}) == TOOLS
    (tool,) = [one for one in tools if one["name"] == call["name"]]
    assert sample.question == f"\n\nRequest: {tool['description'].replace('Reports', 'report')}\nCall:"
    records = [json.loads(found) for found in re.findall(r"\{[^{}]*\}", returned.split("\n\nRequest:")[0])]
    assert len(records) == TOOLS
    assert call["arguments"] in records
    assert tool["parameters"].keys() == call["arguments"].keys()


def test_solved_requests_are_of_other_tools():
    sample = draw()
    solved = re.findall(r"\nCall: (.*)", sample.context)
    assert len(solved) == SHOWN
    assert sample.answers[0] not in solved
    assert score(solved[0], [solved[0]]) == 1


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ('{"name": "a", "arguments": {"b": "1", "c": [2]}}', 1),
        (' \n{"arguments": {"c": [2],"b":"1"}, "name":"a"}\n\nRequest: and so on', 1),
        ('[{"name": "a", "parameters": {"b": "1", "c": [2]}}]', 1),
        ('{"name": "a", "arguments": {"b": "1", "c": [2]}', 1),  # the arguments are whole
        ('{"name": "a", "arguments": {"b": "1", "c": [2], "d": 0}}', 0),
        ('{"name": "a", "arguments": {"b": "2", "c": [2]}}', 0),
        ('{"name": "a", "arguments": {"b": "1", "c": [2', 0),
        ('{"name": "b", "arguments": {"b": "1", "c": [2]}}', 0),
        ('So: {"name": "a", "arguments": {"b": "1", "c": [2]}}', 0),
        ("", 0),
    ],
)
def test_a_call_counts_if_its_name_and_arguments_are_right(said, right):
    assert score(said, ['{"name": "a", "arguments": {"b": "1", "c": [2]}}']) == right
