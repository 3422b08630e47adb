"""A backend that is dropped in as one folder: every list of backends has it, and no other file names it."""

from __future__ import annotations

import json
import sys

import pytest

import kvc_trt.backends
from kvc_trt.backends import registry
from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError

SOURCE = '''
"""ONNX Runtime under another name, which runs dense policies alone."""

from pathlib import Path

from kvc_trt.backends.base import Backend
from kvc_trt.backends.onnxruntime.benchmark import OnnxRuntimeBenchmark
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.onnxruntime.harness import OnnxRuntimeHarness
from kvc_trt.backends.probes import Probe


class ThrowAwayBackend(Backend):
    name = "throw-away"
    purpose = "this test"
    weight_kinds = ("fp32",)
    own_settings = ("compatibility",)

    def probe(self):
        return Probe(self.name, self.purpose, True, {"throw-away": "1.0"}, (), ())

    def missing(self, parameters, layers):
        return None if parameters.policy == "rocketkv" else "patience"

    def default_weights(self, choice):
        return "fp32"

    def break_even(self, model, parameters, dtype):
        return 77

    def sources(self):
        return (Path(__file__),)

    def open(self, engine, options, **own):
        return OnnxRuntimeExecutor(engine, options, **own)

    def harness(self, engine, options):
        return OnnxRuntimeHarness(engine, options)

    def benchmark(self, engine, options):
        return OnnxRuntimeBenchmark(options, engine.model.dtype)


BACKEND = ThrowAwayBackend()
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One more place where folders of backends are looked for, and the folder in it."""
    folder = tmp_path / "backends" / "throw_away"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "backend.py").write_text(SOURCE)
    monkeypatch.setattr(kvc_trt.backends, "__path__", [*kvc_trt.backends.__path__, str(folder.parent)])
    registry.backends.cache_clear()
    yield folder
    registry.backends.cache_clear()
    for name in [name for name in sys.modules if name.startswith("kvc_trt.backends.throw_away")]:
        del sys.modules[name]


@pytest.fixture
def engine(folder, tiny_arguments, tmp_path, capfd):
    """Built as a user builds it."""
    path = tmp_path / "engine"
    assert run([*tiny_arguments, "--set", "backend=throw-away", "--set", "dense_until=auto", "-o", str(path)]) == 0
    capfd.readouterr()
    return path


def answer(capfd, *arguments):
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_new_backend_builds_engines_that_are_known(engine, capfd):
    found = answer(capfd, "inspect", engine)
    assert found["target"] == {"backend": "throw-away", "architecture": "any"}
    assert open_engine(engine).parameters.dense_until == 77
    assert registry.runners("throw-away") == ("throw-away", "onnxruntime", "openvino", "torch")


def test_an_engine_is_built_again_where_its_source_changed(engine, folder, tiny_arguments, capfd):
    again = [*tiny_arguments, "--set", "backend=throw-away", "--set", "dense_until=auto", "-o", str(engine)]
    assert run(again) == 0
    assert "up to date" in capfd.readouterr().out
    (folder / "backend.py").write_text(SOURCE + "\n# changed\n")
    assert run(again) == 2
    assert "another build (different code)" in capfd.readouterr().err


@pytest.mark.slow
def test_a_new_backend_runs_verifies_and_profiles(engine, tmp_path, capfd):
    (tmp_path / "ids.json").write_text(json.dumps([3] * 40))
    answers = answer(
        capfd, "run", engine, "--prompt-ids", tmp_path / "ids.json", "--max-new-tokens", "3", "--ignore-eos"
    )
    assert len(answers["outputs"][0]["token_ids"]) == 3
    report = answer(capfd, "verify", engine, "--level", "ops")
    assert report["passed"]
    short = ("--contexts", "64", "--batch", "1", "--steps", "2", "--prefills", "1")
    assert answer(capfd, "profile", engine, *short)["engine"]["backend"] == "throw-away"


def test_the_rest_knows_it(folder, tiny_model, capfd):
    assert "throw-away" in [found["name"] for found in answer(capfd, "doctor")["backends"]]
    assert registry.select_backend("throw-away").versions == {"throw-away": "1.0"}
    able = {found["name"]: found["engines"] for found in answer(capfd, "policies")["policies"]}
    assert [policy for policy, backends in able.items() if "throw-away" in backends] == ["rocketkv"]
    sizes = ["--token-budget", "64", "--max-output-len", "32", "--set", "backend=throw-away"]
    assert run(["plan", "--model", str(tiny_model), *sizes, "--policy", "full"]) == 2
    assert "backend throw-away has no patience; it runs on onnxruntime" in capfd.readouterr().err
    assert run(["plan", "--model", str(tiny_model), *sizes]) == 0
    assert run(["build", "--model", str(tiny_model), *sizes, "--random-weights", "0", "--weights", "fp16"]) == 2
    assert "backend throw-away takes fp32" in capfd.readouterr().err


def test_without_its_folder_nothing_knows_it():
    with pytest.raises(InputError, match="unknown backend 'throw-away'"):
        registry.backend("throw-away")
