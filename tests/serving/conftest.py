from __future__ import annotations

import json

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


@pytest.fixture(scope="session")
def tool_engine(tmp_path_factory):
    """A tiny model of random weights that writes any text, with a template that takes tools."""
    from safetensors.numpy import save_file

    from kvc_trt.cli.main import run
    from kvc_trt.models.random_weights import RandomWeights
    from kvc_trt.models.sources.hugging_face import read_config
    from tests.conftest import TINY_MODEL
    from tests.runtime.chat_templates import HERMES
    from tests.runtime.grammars.byte_tokenizer import END, byte_tokenizer

    directory = tmp_path_factory.mktemp("tools")
    model, tokenizer = directory / "model", byte_tokenizer()
    model.mkdir()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": END, "bos_token_id": END}
    (model / "config.json").write_text(json.dumps({**TINY_MODEL, **sizes, "max_position_embeddings": 8192}))
    weights = RandomWeights(read_config(model), 0)
    save_file({name: weights.read(name) for name in weights.names()}, model / "model.safetensors")
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(HERMES)
    lengths = ["--max-input-len", "3000", "--max-output-len", "400", "--policy", "full", "--no-verify"]
    assert run(["build", "--model", str(model), *lengths, "-o", str(directory / "engine")]) == 0
    return directory / "engine"
