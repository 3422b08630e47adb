from __future__ import annotations

import pytest


@pytest.fixture(scope="package")
def demo_engine(tmp_path_factory):
    """The shipped model under RocketKV; prompts to 1,024 tokens, of which it keeps a part."""
    from kvc_trt.cli.main import run

    engine = tmp_path_factory.mktemp("demo") / "demo"
    arguments = ["--token-budget", "64", "--max-input-len", "1024", "--max-output-len", "512", "--no-verify"]
    assert run(["build", "--model", "retrieval-tiny", "--policy", "rocketkv", *arguments, "-o", str(engine)]) == 0
    return engine


@pytest.fixture(scope="package")
def needle(demo_engine):
    """A prompt of the longest length, as token ids."""
    from kvc_trt import Engine
    from tests.serving.dynamo.served import ROOT

    engine = Engine.open(demo_engine)
    ids = engine.directory.tokenizer.encode((ROOT / "docs" / "demo" / "needle.txt").read_text()).ids
    return ids[:1] + ids[-1000:]


@pytest.fixture(scope="package")
def answers(demo_engine):
    """What the engine answers without any server."""
    from kvc_trt import Engine

    engine = Engine.open(demo_engine, threads=1)

    def answer(prompt, max_new_tokens=16, **rules):
        return engine.generate(prompt, max_new_tokens=max_new_tokens, **rules)

    return answer
