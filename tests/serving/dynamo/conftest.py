from __future__ import annotations

import pytest


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
