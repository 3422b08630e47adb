from __future__ import annotations

import pytest

import kvc_trt


@pytest.fixture(scope="session")
def retrieval_engine(tmp_path_factory):
    """An engine directory of the shipped model, which tests leave as it is."""
    path = tmp_path_factory.mktemp("serving") / "tiny"
    kvc_trt.build("retrieval-tiny", token_budget=64, output=path, verify=False)
    return path


@pytest.fixture(scope="session")
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
