"""The backend as users meet it: probed, built for, run by name, verified, profiled."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from kvc_trt.backends import registry
from kvc_trt.backends.openvino.backend import OpenVinoBackend
from kvc_trt.cli.main import run
from tests.models.gguf.tiny import write


def answer(capfd, *arguments):
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([3 + i % 40 for i in range(150)]))
    return path


def test_engines_of_either_backend_run_on_the_other(tiny_engine, tiny_arguments, prompt, tmp_path, capfd):
    own = tmp_path / "own"
    assert run([*tiny_arguments, "--backend", "openvino", "-o", str(own)]) == 0
    capfd.readouterr()
    assert answer(capfd, "inspect", own)["target"] == {"backend": "openvino", "architecture": "cpu"}
    asked = ("--prompt-ids", prompt, "--max-new-tokens", "8", "--ignore-eos")
    tokens = [
        answer(capfd, "run", engine, *asked, "--backend", backend)["outputs"][0]["token_ids"]
        for engine, backend in [(tiny_engine, "onnxruntime"), (tiny_engine, "openvino"), (own, "onnxruntime")]
    ]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.slow
def test_an_engine_passes_verification_on_openvino(tiny_engine, capfd):
    report = answer(capfd, "verify", tiny_engine, "--backend", "openvino")
    assert report["passed"]


@pytest.mark.slow
def test_blocks_of_a_gguf_file_run_unchanged(tmp_path, capfd):
    """Q4_0, Q4_1 with its minima, Q8_0 and floats in one engine, and an embedding in 4 bits."""
    kinds = {"attn_q.weight": "Q4_1", "attn_k.weight": "Q8_0", "attn_v.weight": "F16", "ffn_up.weight": "Q4_1"}
    file, engine = write(tmp_path / "model.gguf", kind="Q4_0", kinds=kinds), tmp_path / "engine"
    settings = ["--weights", "keep", "--token-budget", "64", "--max-input-len", "256", "--max-output-len", "32"]
    build = ["build", "--model", str(file), "--backend", "openvino", *settings, "--no-verify", "-o", str(engine)]
    assert run(build) == 0
    for level in ("ops", "logits", "tokens"):
        assert run(["verify", str(engine), "--level", level, "--checkpoint", str(file)]) == 0, capfd.readouterr().out


@pytest.mark.slow
def test_profile_measures_an_engine_built_for_it(tiny_arguments, tmp_path, capfd):
    engine = tmp_path / "engine"
    assert run([*tiny_arguments, "--backend", "openvino", "-o", str(engine)]) == 0
    capfd.readouterr()
    short = ("--contexts", "64", "--batch", "1", "--steps", "2", "--prefills", "1")
    assert answer(capfd, "profile", engine, *short)["engine"]["backend"] == "openvino"


def test_auto_never_selects_openvino():
    assert registry.backend("openvino").automatic is None


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        (None, "Python package openvino (not installed)"),
        (SimpleNamespace(__version__="2026.5.0-23000-abc"), "openvino 2026.4, found 2026.5.0"),
        (SimpleNamespace(__version__="2026.40.0"), "openvino 2026.4, found 2026.40.0"),
    ],
)
def test_the_probe_says_what_is_missing_and_what_installs_it(monkeypatch, module, missing):
    monkeypatch.setitem(sys.modules, "openvino", module)
    monkeypatch.setattr("kvc_trt.backends.probes._version", lambda package: None)
    probe = OpenVinoBackend().probe()
    assert not probe.usable
    assert probe.missing == (missing,)
    assert probe.install == ("pip install 'kvc-trt[openvino]'",)
