"""Caches in a format between processes, through NIXL: fewer bytes, and the answer of the engine alone."""

from __future__ import annotations

import pytest

from kvc_trt import Engine
from kvc_trt.cli.main import run
from tests.serving.dynamo.served import ROOT
from tests.serving.dynamo.test_disaggregated import Apart, text_of

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]
MOVED = {"int8": 106_712, "int4": 65_720}
"""Bytes of docs/demo/needle.txt, as docs/serving-dynamo.md has them; those of `auto` are 384,824."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", MOVED)
def test_nixl_moves_as_many_bytes_as_the_format_has(form, tmp_path):
    engine = tmp_path / "engine"
    arguments = ["--policy", "rocketkv", "--token-budget", "64", "--kv-cache", form, "--no-verify", "-o", str(engine)]
    assert run(["build", "--model", "retrieval-tiny", *arguments]) == 0
    prompt = (ROOT / "docs" / "demo" / "needle.txt").read_text()
    alone = Engine.open(engine, threads=1).generate(prompt, max_new_tokens=12)
    apart = Apart(engine, tmp_path / "store")
    try:
        answer = apart.client.complete("engine", prompt, max_tokens=12)
    finally:
        apart.end()
    assert text_of(answer) == alone.text
    assert answer["choices"][0]["kvc"]["moved_bytes"] == MOVED[form]
