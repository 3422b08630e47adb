"""A real chat model in a real tritonserver: characters of several tokens, chat prompts, and answers in a batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import kvc_trt
from kvc_trt.backends.opening import open_engine
from kvc_trt.serving.triton.family.ensemble import export_ensemble
from kvc_trt.serving.triton.repository import export_model
from tests.serving.triton.server import check_environment, serving

pytestmark = [
    pytest.mark.triton,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::kvc_trt.errors.BarePromptWarning"),
]

QUESTIONS = ["Write three smiling emojis.", "Say 'naïve café' in Japanese."]
TOKENS = 16


@pytest.fixture(scope="module")
def engine(smollm2_gguf, tmp_path_factory):
    path = tmp_path_factory.mktemp("smollm2") / "chat"
    settings = {"policy": "rocketkv", "max_input_len": 512, "max_output_len": 64, "token_budget": 128}
    kvc_trt.build("smollm2-135m-instruct", checkpoint=str(smollm2_gguf), output=path, verify=False, **settings)
    return kvc_trt.Engine.open(path, threads=1)


def test_the_server_answers_as_kvc_trt_run_does_alone_and_together(engine, tmp_path):
    check_environment()
    export_model(open_engine(engine.path), tmp_path / "repository", "chat")
    prompts = [engine.chat_prompt(question) for question in QUESTIONS]
    expected = [engine.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    with serving(tmp_path / "repository", tmp_path) as server:

        def ask(prompt):
            events = server.stream("chat", input_ids=prompt, max_tokens=TOKENS, stream=True)
            return "".join(event["text_output"] for event in events)

        assert [ask(prompt) for prompt in prompts] == [output.text for output in expected]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, prompts)) == [output.text for output in expected]
        written = server.generate("chat", text_input="naïve 🙂", max_tokens=8).body["text_output"]
        assert written == engine.generate("naïve 🙂", max_new_tokens=8).text


@pytest.mark.exhaustive
def test_an_ensemble_splits_no_character(engine, tmp_path):
    check_environment()
    export_ensemble(open_engine(engine.path), tmp_path / "repository")
    prompts = ["Smileys: 🙂 😀 🎉 🙂 😀 🎉 🙂 😀", "naïve café, naïve café, na"]
    expected = [engine.generate(prompt, max_new_tokens=TOKENS).text for prompt in prompts]
    assert any(not text.isascii() for text in expected), "there are characters of several tokens"
    with serving(tmp_path / "repository", tmp_path) as server:

        def ask(prompt):
            events = server.stream("ensemble", text_input=prompt, max_tokens=TOKENS, stream=True)
            return "".join(event["text_output"] for event in events)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, prompts)) == expected
        whole = server.generate("ensemble", text_input=prompts[0], max_tokens=TOKENS)
        assert whole.body["text_output"] == expected[0]
