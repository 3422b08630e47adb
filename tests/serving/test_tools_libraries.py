"""Libraries for agents against the light server, where they are installed: none of them is needed for anything else.

pip install langchain-openai instructor
"""

from __future__ import annotations

import os
from typing import Literal

import pytest


@pytest.fixture(scope="module")
def address(tool_engine):
    from tests.serving.http.in_process import InProcess

    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    with InProcess({"model": tool_engine}) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def test_langchains_tool_loop(address):
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    asked = []

    @tool
    def get_weather(city: Literal["Paris", "Rome"], now: bool) -> str:
        """The weather of a city."""
        asked.append((city, now))
        return "rain"

    model = langchain_openai.ChatOpenAI(model="model", base_url=address, api_key="none", max_tokens=200, max_retries=0)
    messages = [HumanMessage("Weather?")]
    answer = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke(messages)
    assert answer.invalid_tool_calls == []
    (call,) = answer.tool_calls
    messages += [answer, get_weather.invoke(call)]
    assert asked[0][0] in ("Paris", "Rome")
    assert isinstance(asked[0][1], bool)
    model.bind_tools([get_weather]).bind(max_tokens=5).invoke(messages)

    streamed = None
    for chunk in model.bind_tools([get_weather], tool_choice="get_weather").stream(messages[:1]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [one["args"].keys() for one in streamed.tool_calls] == [{"city", "now"}]


def test_instructor(address):
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Paris", "Rome"]
        now: bool

    with OpenAI(base_url=address, api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
        found = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "Weather?"}],
            response_model=Weather,
            max_retries=0,
            max_tokens=200,
        )
    assert found.city in ("Paris", "Rome")
