"""Engines whose turns give the logits after every token: built on request, refused where there are no turns."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt import Engine, build
from kvc_trt.backends.registry import backends
from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.program import engine_program
from kvc_trt.engine.resolution.resolve import check_backend_settings
from kvc_trt.errors import InputError

PROMPT, REST = "<record> lamp scarlet tiger lagos eight", "<query> lamp scarlet tiger"


@pytest.mark.parametrize("policy", ["rocketkv", "full"])
def test_an_engine_built_with_all_logits_returns_them(policy, tmp_path):
    budget = {} if policy == "full" else {"token_budget": 64}
    build("retrieval-tiny", policy=policy, **budget, all_logits=True, verify=False, output=tmp_path / "engine").close()
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        assert engine_program(engine.directory).limits.all_logits
        context = engine.context(PROMPT)
        logits = engine.turn_logits(REST, context=context)
        ids = engine.directory.tokenizer.encode(REST, add_special_tokens=False).ids
        assert logits.shape == (len(ids), engine.model.vocab_size)
        # The model says the record's words after the query, so the last two are foretold.
        assert logits[-3:-1].argmax(-1).tolist() == ids[-2:]
        np.testing.assert_allclose(logits[-1], engine.context(REST, context=context).logits, atol=1e-5)
        with pytest.raises(InputError, match="turn_logits takes one text, found a list of 2"):
            engine.turn_logits([REST, REST], context=context)
        with pytest.raises(InputError, match="the turn is empty"):
            engine.turn_logits("", context=context)
        assert engine.generate(PROMPT).token_ids  # no row is left behind


def test_an_engine_without_all_logits_names_the_build_option(tmp_path):
    engine = build("retrieval-tiny", token_budget=64, verify=False, output=tmp_path / "engine")
    with engine:
        with pytest.raises(InputError, match="only after the last token of a turn") as error:
            engine.turn_logits(REST, context=engine.context(PROMPT))
        assert "--all-logits" in error.value.hint
        assert engine.generate(PROMPT).token_ids


def test_a_policy_without_turns_is_refused(tiny_arguments, tmp_path, capfd):
    more = ["--policy", "streaming-llm", "--set", "positions=cache", "-o", str(tmp_path / "engine")]
    assert run([*tiny_arguments, "--all-logits", *more]) == 2
    assert "--all-logits: policy streaming-llm takes no turns" in capfd.readouterr().err
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-llm"])
def test_a_backend_without_all_logits_is_refused(backend):
    config = BuildConfig(model="tiny", backend=backend, weights="fp16", all_logits=True)
    with pytest.raises(InputError, match="all_logits: True is for --backend"):
        check_backend_settings(config, backends())
