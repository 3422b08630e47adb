from __future__ import annotations

import pytest


@pytest.fixture(scope="package")
def demo_engine(tmp_path_factory):
    """The shipped model under RocketKV; it keeps a part of each prompt, up to 1,024 tokens.

    Its answers may be long: what leaves, or kills a process, during an answer needs one that is not soon over.
    """
    from kvc_trt.cli.main import run

    engine = tmp_path_factory.mktemp("demo") / "demo"
    lengths = ["--max-input-len", "1024", "--max-output-len", "8192"]
    policy = ["--policy", "rocketkv", "--token-budget", "64"]
    derived_for_short_answers = ["--set", "prompt_budget=512", "--set", "page_size=4", "--set", "top_r=8"]
    arguments = [*policy, *derived_for_short_answers, *lengths, "--no-verify", "-o", str(engine)]
    assert run(["build", "--model", "retrieval-tiny", *arguments]) == 0
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
    """The engine's answers without any server."""
    from kvc_trt import Engine

    engine = Engine.open(demo_engine, threads=1)

    def answer(prompt, max_new_tokens=16, **rules):
        return engine.generate(prompt, max_new_tokens=max_new_tokens, **rules)

    return answer


@pytest.fixture
def pair(demo_engine):
    """A prefill and a decode of the demo's engine in this process."""
    from tests.serving.dynamo.handed_over import pair_of

    with pair_of(demo_engine) as made:
        yield made
