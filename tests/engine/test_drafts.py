"""Engines that check drafts: built on request, refused where a policy or a backend cannot."""

from __future__ import annotations

import json

import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.engine.program import engine_program


def test_an_engine_has_a_draft_graph_if_it_is_asked_for(tiny_arguments, tmp_path, capfd):
    path = tmp_path / "engine"
    assert run([*tiny_arguments, "--draft-tokens", "3", "-o", str(path)]) == 0
    engine = open_engine(path)
    assert engine.draft_graph is not None
    assert engine.draft_graph.path == path / "draft.onnx"
    limits = engine_program(engine).limits
    assert (limits.draft_tokens, limits.no_drafts) == (3, None)
    capfd.readouterr()
    assert run([*tiny_arguments, "-o", str(path)]) == 2
    assert "it is another build" in capfd.readouterr().err
    assert run([*tiny_arguments, "-o", str(path), "--force"]) == 0
    engine = open_engine(path)
    assert engine.draft_graph is None
    assert "draft_tokens" not in json.loads((path / "config.json").read_text())["build_config"]["kvc_trt"]
    assert engine_program(engine).limits.no_drafts.reason.startswith("the engine has no draft graph")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "h2o"], "--draft-tokens 3: policy h2o checks no drafts: a step drops a token"),
        (["--draft-tokens", "9"], "draft_tokens"),
        (["--draft-tokens", "1"], "draft_tokens"),
    ],
)
def test_drafts_that_cannot_be_checked_are_refused(tiny_arguments, tmp_path, capfd, more, message):
    assert run([*tiny_arguments, "--draft-tokens", "3", *more, "-o", str(tmp_path / "engine")]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "engine").exists()
