"""Libraries that build on OpenAI's client, with a real chat model behind the light server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.serving.dynamo.served import ROOT
from tests.serving.http.in_process import InProcess

pytestmark = pytest.mark.slow

CLIENTS = Path(os.environ.get("KVC_TRT_CLIENTS", ROOT / "build" / "clients")) / "bin" / "python"
"""Made by `make clients-env`."""
ASKED = [{"role": "user", "content": "Name the capital of France, and its country."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url(smollm2_gguf, tmp_path_factory):
    from kvc_trt.cli.main import run

    path = tmp_path_factory.mktemp("smollm2") / "chat"
    arguments = ["--policy", "rocketkv", "--token-budget", "128", "--max-input-len", "1024", "--weights", "keep"]
    assert run(["build", "--model", str(smollm2_gguf), *arguments, "--no-verify", "-o", str(path)]) == 0
    with InProcess({"chat": path}) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("NO_PROXY", "127.0.0.1")
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture
def client(url):
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_parse_of_the_openai_client_returns_an_object(client):
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        country: str

    found = client.chat.completions.parse(model="chat", messages=ASKED, response_format=City, max_tokens=80)
    assert isinstance(found.choices[0].message.parsed, City)


def test_a_tool_loop_works_with_the_openai_client(client):
    """A call that has to be made, its result, and the answer; streamed, the call is the same."""
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": "chat", "tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
    first = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
    with client.chat.completions.stream(messages=messages, **asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    last = client.chat.completions.create(model="chat", messages=messages, tools=[WEATHER], max_tokens=20).choices[0]
    assert last.message.content or last.message.tool_calls


def test_instructor_the_agents_sdk_and_langchain_get_answers(url):
    if not CLIENTS.exists():
        pytest.skip(f"there is no {CLIENTS}: make clients-env")
    command = [str(CLIENTS), str(Path(__file__).with_name("clients_story.py")), url, "chat"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["schema"].keys() == found["tools"].keys() == {"name", "country"}
    assert found["agent"][:2] == ["ToolCallItem", "ToolCallOutputItem"]
    assert len(found["called"]) >= 1
    assert [one["type"] for one in found["langchain"]] == ["human", "ai", "tool", "AIMessageChunk"]
    assert found["langchain"][2]["text"].endswith(" degrees")
    assert found["langchain"][3]["text"]
