from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="package")
def served(demo_engine, chat_engine):
    """A light server in this process, over the shipped model and a tiny chat model."""
    from tests.serving.http.in_process import InProcess

    with InProcess({"demo": demo_engine, "chat": chat_engine}, origins=("https://page.example",)) as server:
        yield server


@pytest.fixture(scope="package")
def client(served):
    return served.client()


@pytest.fixture
def openai(served):
    """OpenAI's own client, which asks no proxy."""
    from openai import OpenAI

    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    with OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def answers(demo_engine):
    """The engine's answers without any server."""
    from kvc_trt import Engine

    engine = Engine.open(demo_engine, threads=1)

    def answer(prompt, max_new_tokens=16, **rules):
        return engine.generate(prompt, max_new_tokens=max_new_tokens, **rules)

    return answer
