"""Libraries over OpenAI's client against a light server: `clients_story.py URL MODEL`, in the environment of clients.

`test_clients.py` runs it; what it prints last is the answer of each.
"""

from __future__ import annotations

import asyncio
import json
import sys

import instructor
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

CALLED: list[str] = []


class City(BaseModel):
    name: str
    country: str


@function_tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    CALLED.append(city)
    return "It rains."


def instructed(url: str, model: str, mode: instructor.Mode) -> dict[str, str]:
    """Return an answer as instructor parses it."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=mode)
    messages = [{"role": "user", "content": "Name the capital of France, and its country."}]
    return client.create(model=model, messages=messages, response_model=City, max_tokens=80).model_dump()


async def agent(url: str, model: str) -> list[str]:
    """The kinds of items of a run in which the model has to call a tool first; a small one calls it again and again."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none")
    settings = ModelSettings(tool_choice="required", max_tokens=60)
    one = Agent(
        name="weather",
        instructions="Answer with the weather.",
        model=OpenAIChatCompletionsModel(model, client),
        tools=[weather],
        model_settings=settings,
    )
    try:
        items = (await Runner.run(one, "What is the weather in Paris?", max_turns=3)).new_items
    except MaxTurnsExceeded as ended:
        items = ended.run_data.new_items if ended.run_data is not None else []
    return [type(item).__name__ for item in items]


@tool
def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return f"{len(city)} degrees"


def langchain(url: str, model: str) -> list[dict[str, str]]:
    """Return the messages of a loop in which the model has to call a tool, gets the result, and answers."""
    asked = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0, max_completion_tokens=60)
    messages: list[BaseMessage] = [HumanMessage("What is the temperature in Paris?")]
    first = asked.bind_tools([temperature], tool_choice="required", strict=True).invoke(messages)
    results = [temperature.invoke(call) for call in first.tool_calls]
    assert all(isinstance(one, ToolMessage) for one in results)
    messages += [first, *results]
    streamed = list(asked.bind_tools([temperature], tool_choice="none").stream(messages))
    last = sum(streamed[1:], streamed[0])
    return [{"type": one.type, "text": str(one.content)} for one in [*messages, last]]


def main() -> None:
    url, model = sys.argv[1:]
    found = {
        "schema": instructed(url, model, instructor.Mode.JSON_SCHEMA),
        "tools": instructed(url, model, instructor.Mode.TOOLS),
        "agent": asyncio.run(agent(url, model)),
        "called": CALLED,
        "langchain": langchain(url, model),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
